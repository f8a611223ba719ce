"""What ranks compare: arguments of calls, generators of random numbers, where a backward began.

A program is right only if all ranks run it alike, and nothing in Python says so. So what could differ is
compared where ranks meet anyway, by one number in a message that is sent in any case. Words that explain a
difference travel only after one was found. ``model_calls`` has the protocol; the other files make numbers and
words of what a rank has: ``arguments``, ``generators``, ``gradient_origin``. ``user_frames`` finds the line
of the user's program that a message names.
"""

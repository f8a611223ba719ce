"""A variable that a step reads once it has imported this file."""

factor = 1.0

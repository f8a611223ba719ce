"""What ranks compare: arguments of calls, generators of random numbers, where a backward began."""

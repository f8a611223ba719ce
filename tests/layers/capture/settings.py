"""Variables that steps of the tests beside it read."""

factor = 1.0


def scaled(y):
    """Read a variable of this file."""
    return y * factor


class Settings:
    """Attributes of a class, for all who import it."""

    factor = 1.0


class Derived(Settings):
    """A class that may get an attribute of its own."""

"""Products with split matrices."""

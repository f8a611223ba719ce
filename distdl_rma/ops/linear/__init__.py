"""Products with a weight that is cut into blocks of rows and columns."""

"""Functions that relabel, choose, move and join elements."""

"""What several ranks do together: reductions, gathers, broadcasts, barriers."""

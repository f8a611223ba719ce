"""Distributed losses: ``base`` has the sum over ranks, ``elementwise`` and ``classification`` the terms."""

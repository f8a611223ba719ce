"""Registered memory, and links to the memory of a peer by load and store or by MPI RMA."""

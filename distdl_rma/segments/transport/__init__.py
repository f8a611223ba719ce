"""The registered memory itself, and the ways to that of a peer: load and store, or MPI RMA."""

"""Ranks that are threads of one process: who runs next, their network, and a communicator like mpi4py's."""

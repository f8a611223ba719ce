"""How the ranks of a group carry out its collectives: in rounds on a node, by MPI between nodes."""

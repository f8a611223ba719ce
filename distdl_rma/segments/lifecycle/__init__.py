"""How the ranks of a machine find each other, and how they part."""

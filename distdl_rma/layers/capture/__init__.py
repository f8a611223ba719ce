"""Recording of the operations behind a call of a model, and their replay, compiled where it can be."""

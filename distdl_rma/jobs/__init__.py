"""Jobs with files: data, checkpoints, and work that is larger than memory."""

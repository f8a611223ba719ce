"""Work that is larger than memory: tensors wait on disk until they are needed."""

"""Base of all operators: operations, movements, and their use of torch's tensors and autograd."""

"""What all operators share: operations, movements, and torch's tensors and autograd under them."""

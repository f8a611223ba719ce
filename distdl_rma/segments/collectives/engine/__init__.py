"""What all collectives are made of: ranks by node, steps, sums."""

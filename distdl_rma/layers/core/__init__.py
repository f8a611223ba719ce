"""What all distributed layers share."""

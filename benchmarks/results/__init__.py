"""What becomes of measured rows: their history, and the page and the picture that show them."""

"""How ranks find each other, wait for each other, and learn who failed or has left."""

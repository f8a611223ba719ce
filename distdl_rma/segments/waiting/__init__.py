"""What ranks say of themselves while others wait for them: who does what, who failed, who has left."""

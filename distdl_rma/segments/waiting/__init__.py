"""Waiting for other ranks without a silent hang: what each one is doing, who failed, who has left."""

"""Meetings of ranks, waits for other ranks, and detection of ranks that failed or left."""

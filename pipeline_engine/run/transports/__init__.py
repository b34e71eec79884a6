"""Ways to move bytes between ranks."""

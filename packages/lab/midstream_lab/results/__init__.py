"""Results so far."""

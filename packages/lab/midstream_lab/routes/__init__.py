"""HTTP routes of experiments."""

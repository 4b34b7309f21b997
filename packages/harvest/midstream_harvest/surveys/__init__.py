"""Examples of features."""

"""Readings of captured rows, a file for each kind with its four forms."""

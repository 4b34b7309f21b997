"""Resolves readings of captured rows, probes and installed readers."""

"""Readings of captured rows: lens, tuned lens, features, installed readers."""

"""Drains, copies, restores."""

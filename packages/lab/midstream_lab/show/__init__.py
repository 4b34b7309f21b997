"""Draws results."""

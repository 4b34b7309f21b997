"""Calls to all ranks, and what they hold for requests."""

"""Calls, commands, tables."""

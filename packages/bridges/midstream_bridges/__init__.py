"""Bridges to other libraries and their files."""

"""Patch studies."""

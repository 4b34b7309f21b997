"""Calls, grids, studies."""

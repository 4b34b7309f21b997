"""Answers of calls: grids, downloads, progress."""

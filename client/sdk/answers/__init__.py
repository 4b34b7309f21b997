"""Answers of calls: downloads, progress."""

"""Edits: steering tables, source runs, installed ops."""

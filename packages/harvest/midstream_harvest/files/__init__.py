"""Shards, surveys, sources."""

"""Harvests: documents, cut into sequences, and their shards."""

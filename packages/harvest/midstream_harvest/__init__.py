"""Harvests: rows of a corpus, as shards."""

"""Weights of probes, watches, aggregates over positions, gates, decisions of policies."""

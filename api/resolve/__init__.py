"""Resolves a request against a model."""

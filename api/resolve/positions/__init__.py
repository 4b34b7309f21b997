"""Resolves captures (hooks, layers, positions of one prompt), windows, gates and heads."""

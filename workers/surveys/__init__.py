"""Surveys of harvests: rows in the order of their keys, the strongest examples of features."""

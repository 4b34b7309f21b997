"""Tests of packages share what those of the core share."""

pytest_plugins = ["sets", "stores"]

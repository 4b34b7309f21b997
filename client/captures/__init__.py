"""Readers and exports of captured rows."""

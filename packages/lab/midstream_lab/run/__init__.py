"""Sweeps, doses on workers."""

"""Experiments: sweeps, fits, doses."""

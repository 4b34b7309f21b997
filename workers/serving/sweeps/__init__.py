"""Sweeps: requests, their verdicts, and the records that they keep."""

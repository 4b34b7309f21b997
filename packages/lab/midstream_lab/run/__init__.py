"""Sweeps: `attempt` runs the cells; requests, verdicts, records."""

"""Calls on hits, marks and replays, the commands for them, and how they are shown."""

"""Replays: stored texts under another version of a policy, before it acts."""

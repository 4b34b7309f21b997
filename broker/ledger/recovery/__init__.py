"""The reaper, harvests and their streams, reconciliation of usage."""

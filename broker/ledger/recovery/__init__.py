"""The reaper, reconciliation of usage."""

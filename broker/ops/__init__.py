"""Logs, metrics, traces, the Redis server and its ACLs, private files, liveness of processes."""

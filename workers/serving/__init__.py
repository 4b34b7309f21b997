"""Celery tasks to stored outputs: attempts, sweeps, harvests, steering, heartbeat."""

"""Celery tasks to stored outputs: attempts, sweeps, steering, heartbeat."""

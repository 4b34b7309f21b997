"""Celery tasks to stored outputs: attempts, harvests, steering, heartbeat."""

"""Celery tasks to stored outputs: attempts, steering, heartbeat."""

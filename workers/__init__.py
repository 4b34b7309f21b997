"""The worker process: `app` runs the engine in a Celery worker, `engines` chooses it."""

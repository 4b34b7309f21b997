"""The one vocabulary of HTTP, Redis, Celery and ZeroMQ. Imports nothing else of Midstream."""

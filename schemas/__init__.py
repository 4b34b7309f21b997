"""The types sent over HTTP, Redis, Celery and ZeroMQ. Imports no other package of Midstream."""

"""The types sent over HTTP, Redis, Celery and ZeroMQ; imports no other package of ours."""

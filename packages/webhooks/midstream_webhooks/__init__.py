"""Webhooks: outbox in Redis, `sender`, `http` (signs, posts), SSRF protection."""

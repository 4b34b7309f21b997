"""Webhooks: outbox in Redis, sender, routes, SSRF protection, signing secrets."""

"""Webhooks: outbox in Redis (scripts in `lua/`), sender, SSRF protection, signing secrets."""

"""The HTTP API: `app` composes it, `context` holds what a process shares between requests."""

"""Keys, sessions, webhooks, handling."""

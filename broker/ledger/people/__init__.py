"""API keys, sessions of the page."""

"""API keys, sessions of the page, its feed."""

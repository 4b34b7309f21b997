"""The engine protocol, and stock vLLM behind it; `requests` makes every engine request."""

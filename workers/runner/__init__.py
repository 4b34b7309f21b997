"""Code inside vLLM's rank processes: it edits and records rows in the forward pass."""

"""On vLLM workers."""

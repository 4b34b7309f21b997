"""vLLM's options that users pass, and which are proven; settings as engine arguments."""

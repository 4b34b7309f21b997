"""What a loaded engine may be: vLLM's settings, drafters, quantisation, names inside vLLM."""

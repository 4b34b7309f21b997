"""Registered artifacts: what every kind has; LoRA adapters, SAEs, lenses, probes."""

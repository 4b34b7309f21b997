"""Jobs, sweeps, receipts, models, the OpenAI-style bodies."""

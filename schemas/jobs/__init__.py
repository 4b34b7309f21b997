"""Jobs, sweeps, harvests, receipts, models, the OpenAI-style bodies."""

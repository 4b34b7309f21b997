"""Jobs, harvests, receipts, models, the OpenAI-style bodies."""

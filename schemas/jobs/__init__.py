"""Jobs, receipts, models, the OpenAI-style bodies."""

"""Bodies that take time: results, event streams, OpenAI-style streams, packed captures."""

"""Chat templates, turns of conversations, spans of text."""

"""Tokenizer, images, tool calls, constraints."""

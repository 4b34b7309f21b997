"""Prompts: conversations, images, tokens, selectors of positions."""

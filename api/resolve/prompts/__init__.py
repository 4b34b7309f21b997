"""Reads prompts: the three body shapes, tokenizer, tools, formats, images."""

"""Reads prompts: the three body shapes, tokenizer, text spans, tools, formats, images."""

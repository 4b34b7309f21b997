"""Reads prompts: the three body shapes, tokenizer, spans, turns, tools, formats, images."""

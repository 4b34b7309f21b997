"""Configuration, the step as the rank sees it, memory, threads."""

"""Plans sweeps: prompts and their alignment, columns, paths, limits."""

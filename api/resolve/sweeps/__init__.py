"""Plans sweeps: prompts, columns, paths, limits."""

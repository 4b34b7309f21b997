"""File formats, and what is valid in them: captures, modules, adapters, SAEs, lenses."""

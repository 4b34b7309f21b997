"""Experiments on models: patched grids, attributions, fits, doses, and the gradients they need."""

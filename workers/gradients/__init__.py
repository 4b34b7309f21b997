"""Gradients of a transformers model at the hook points, and estimates of patches by them."""

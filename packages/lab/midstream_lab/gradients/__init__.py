"""Gradients of a transformers model at the hook points, and estimates by them."""

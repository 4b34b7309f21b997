"""Gradients, and estimates."""

"""Captured rows from the forward pass to the process that writes them; checks after a step."""

"""Jobs of gradients."""

"""Parts and streams."""

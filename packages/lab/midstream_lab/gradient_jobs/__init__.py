"""Jobs of gradient workers."""

"""Redis: start, open, users, durability, repair of its log."""

"""Redis: open, users, durability."""

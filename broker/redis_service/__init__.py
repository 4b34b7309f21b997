"""Redis: start, open, users, durability, replicas, repair of its log."""

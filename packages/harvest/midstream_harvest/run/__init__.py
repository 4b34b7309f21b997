"""Documents, sequences, shards."""

"""The worker's side of a harvest: its documents, cut into sequences, and their shards."""

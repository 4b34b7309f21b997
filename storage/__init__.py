"""The artifact store: its protocol, local folders, shards."""

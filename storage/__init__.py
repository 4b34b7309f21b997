"""The artifact store: its protocol, local folders, buckets (S3); shards."""

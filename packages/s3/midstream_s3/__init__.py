"""The artifact store in a bucket (S3)."""

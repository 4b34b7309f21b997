"""What is sent and stored."""

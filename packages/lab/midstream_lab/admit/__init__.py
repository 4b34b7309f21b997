"""Plans, and checks of requests."""

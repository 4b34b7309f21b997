"""Requests, plans, manifests."""

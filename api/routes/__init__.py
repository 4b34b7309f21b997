"""Handlers, one file per resource: paths, scopes, and how files are sent."""

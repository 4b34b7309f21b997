"""Resolves steering, patches, features, installed ops and adapters."""

"""Celery: application, messages, consumer, visibility timeout, events for Flower."""

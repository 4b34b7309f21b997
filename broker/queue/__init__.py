"""Celery: application, messages, consumer, visibility timeout, task events for Flower."""

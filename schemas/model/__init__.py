"""Facts about a loaded model: layer kinds, attention, routing, banks."""

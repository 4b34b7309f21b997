"""Jobs of the gradient queue on their worker: estimates of attributions, fits."""

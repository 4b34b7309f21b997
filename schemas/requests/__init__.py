"""What a request asks for: specs, interventions, steering, source runs."""

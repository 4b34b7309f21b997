"""Files of other tools: vectors, Jacobian lenses."""

"""Records and their encoding, errors, limits, dtypes, tensors."""

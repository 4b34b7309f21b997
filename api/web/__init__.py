"""What every call passes: deadlines, keys, limits per tenant, bodies, problem details."""

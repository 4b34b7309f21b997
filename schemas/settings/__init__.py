"""Settings, their tables, secret files, and the name of a running stack."""

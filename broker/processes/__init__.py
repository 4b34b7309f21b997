"""What processes share: secrets of an installation, private files, liveness, helper processes."""

"""Makes results, captures (`views`), readings and grids of record and ticket."""

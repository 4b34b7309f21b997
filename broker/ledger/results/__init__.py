"""What is made of record and ticket: results, captures (`views`), readings, grids."""

"""Views of a stored record: results, readings, sweep grids."""

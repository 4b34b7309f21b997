"""`data_plane` calls the parts of a step (`step_*`) in order; reports, re-entry, grading."""

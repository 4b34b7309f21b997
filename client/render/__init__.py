"""Terminal output: columns and facts of each type, figures, notebooks."""

"""Terminal output, figures, tables and notebook output of the results of experiments."""

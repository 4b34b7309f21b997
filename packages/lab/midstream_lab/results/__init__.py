"""Makes the results of experiments from what their workers stored and the receipts."""

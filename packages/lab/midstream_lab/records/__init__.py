"""What the requests, the stored jobs and the results of experiments are."""

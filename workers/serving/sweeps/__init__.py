"""The worker's side of a sweep: its requests, their verdicts, and the records that it keeps."""

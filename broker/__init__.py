"""The processes between API and workers: `relay`, `callbacks`, `health`."""

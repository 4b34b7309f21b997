"""The processes between API and workers: `relay`, `callbacks`, `flower`, `health`."""

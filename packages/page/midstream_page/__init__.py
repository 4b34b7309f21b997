"""The live page: its own calls; assets/views has a file for each view."""

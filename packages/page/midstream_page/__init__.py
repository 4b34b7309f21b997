"""The live page: its files and its own calls."""

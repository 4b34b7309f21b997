"""The `midstream` command."""

"""Calls, commands, bridge, figures."""

"""Turns a parsed request into a job, or a 400."""

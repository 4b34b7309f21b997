"""Capture files of jobs: found, described, removed."""

"""Capture files of jobs: found, described, removed. Files that a harvest reads."""

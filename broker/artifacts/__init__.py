"""Finds, describes and removes a job's capture files; which files a harvest reads."""

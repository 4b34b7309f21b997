"""The HTTP clients: a file per group of calls, each call written once for both."""

"""`map`: a request over any number of prompts, with its retries and its cache."""

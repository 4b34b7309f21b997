"""The checks of `doctor` and `demo`: `redis_checks`, …."""

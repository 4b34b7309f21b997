"""What all tests share; those of packages too (packages/conftest.py)."""

pytest_plugins = ["sets", "stores"]

"""The version of this package. Imports nothing, so that every part can name it."""

__version__ = "0.1.0"

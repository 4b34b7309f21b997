"""Steering vectors in files of other tools: read as entries, and written from entries.

A format is recognised by a file's content. `docs/vectors.md` says what each holds and at which
layers its vectors are applied.
"""

from .files import FORMATS, content, read, to_bytes, write

__all__ = ["FORMATS", "content", "read", "to_bytes", "write"]

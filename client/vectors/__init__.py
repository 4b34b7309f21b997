"""Files of steering vectors in other tools' formats, read as steering entries and written.

A file's format is recognised by its content. `docs/steering.md` lists the formats, and the layers
at which their vectors are applied.
"""

from .files import FORMATS, content, read, to_bytes, write

__all__ = ["FORMATS", "content", "read", "to_bytes", "write"]

"""How much Python some work takes, without a clock."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import midstream

_ROOT = midstream.__path__[0]


def python_lines(action: Callable[[], object]) -> int:
    """The lines of the product that run during `action`; a line in a loop counts each time."""
    count = 0

    def note(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        file = frame.f_code.co_filename
        if not file.startswith(_ROOT) or "/tests/" in file or "/.venv/" in file:
            return None
        if event == "line":
            count += 1
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        action()
    finally:
        sys.settrace(before)
    return count

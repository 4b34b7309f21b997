"""Hides the modules that the variable names, in every Python process that has this folder on its
path; see `tests/gpu_packages.py`.
"""

import os
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

_HIDDEN = frozenset(os.environ.get("ONLY_PACKED", "").split(","))
_find = PathFinder.find_spec


def _find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
    return None if path is None and name in _HIDDEN else _find(name, path, target)


PathFinder.find_spec = staticmethod(_find_spec)  # type: ignore[assignment]

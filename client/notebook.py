"""Detects notebooks, and passes objects to display there to `client.render.notebook`."""

import sys
from importlib import import_module
from typing import Any, TypeVar

from ..schemas.base import records as base

T = TypeVar("T")

#: Module of the rendering functions; imported only when something is displayed.
RENDERER = "midstream.client.render.notebook"


def in_notebook() -> bool:
    """Return whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class Listing(list[T]):
    """A list that notebooks show as a table."""

    _repr_html_ = base.html_of


def rendered(function: str, *values: Any, **options: Any) -> Any:
    """Call `function` of the renderer; return its HTML, its PNG bytes, its figure, or None."""
    return getattr(import_module(RENDERER), function)(*values, **options)


base.plotter = rendered

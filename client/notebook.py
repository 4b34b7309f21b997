"""Finds out whether this program runs in a notebook, and hands what is to be shown there to `client.render.notebook`."""

import sys
from importlib import import_module
from typing import Any

#: Loaded only when something is shown: results know that they can be shown, not how.
RENDERER = "midstream.client.render.notebook"


def in_notebook() -> bool:
    """Whether this program is a notebook's kernel."""
    shell = ipython_shell()
    return shell is not None and getattr(shell, "kernel", None) is not None


def ipython_shell() -> Any:
    """IPython's shell, when this program runs in one; otherwise None."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def install() -> None:
    """Register renderers for the schemas' types in a running IPython. No effect elsewhere."""
    shell = ipython_shell()
    if shell is not None:
        rendered("register", shell)


def rendered(function: str, *values: Any) -> Any:
    """What `function` of the renderer makes of the values: HTML, a PNG's bytes, or None."""
    return getattr(import_module(RENDERER), function)(*values)

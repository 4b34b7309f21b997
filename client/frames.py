"""Imports pandas and xarray (extra `notebook`) when a conversion needs them; the error for
a missing package names the extra.
"""

from importlib import import_module
from typing import Any

from ..schemas.base.errors import MidstreamError, Translated


def pandas() -> Any:
    """Return the module. Raises MidstreamError if it is not installed."""
    return _module("pandas", "a data frame needs pandas")


def xarray() -> Any:
    """Return the module. Raises MidstreamError if it is not installed."""
    return _module("xarray", "labelled arrays need xarray")


def _module(name: str, what: str) -> Any:
    with Translated(
        ImportError,
        lambda error: MidstreamError(
            "unavailable",
            f"{what}, not installed here ({error.name}): pip install 'midstream[notebook]'",
        ),
    ):
        return import_module(name)

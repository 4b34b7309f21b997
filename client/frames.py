"""Imports pandas and xarray (extra `notebook`) when a conversion needs them; the error for
a missing package names the extra.
"""

from typing import Any

from ..schemas.base.errors import MidstreamError, Translated


def pandas() -> Any:
    """Return the module. Raises MidstreamError if it is not installed."""
    with Translated(ImportError, lambda error: _missing("a data frame needs pandas", error)):
        import pandas
    return pandas


def xarray() -> Any:
    """Return the module. Raises MidstreamError if it is not installed."""
    with Translated(ImportError, lambda error: _missing("labelled arrays need xarray", error)):
        import xarray
    return xarray


def _missing(what: str, error: ImportError) -> MidstreamError:
    return MidstreamError(
        "unavailable",
        f"{what}, not installed here ({error.name}): pip install 'midstream[notebook]'",
    )

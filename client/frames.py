"""Imports pandas, xarray and plotly (extra `notebook`) when a conversion needs them; the error for
a missing package names the extra.
"""

from typing import Any

from ..schemas.base.errors import MidstreamError


def pandas() -> Any:
    """Return the module. Raises MidstreamError if it is not installed."""
    try:
        import pandas
    except ImportError as error:
        raise _missing("a data frame needs pandas", error) from error
    return pandas


def xarray() -> Any:
    """Return the module. Raises MidstreamError if it is not installed."""
    try:
        import xarray
    except ImportError as error:
        raise _missing("labelled arrays need xarray", error) from error
    return xarray


def plotly() -> Any:
    """Return `plotly`, with `graph_objects` and `subplots` loaded. Raises MidstreamError if it is
    not installed.
    """
    try:
        import plotly.graph_objects
        import plotly.subplots
    except ImportError as error:
        raise _missing("interactive figures need plotly", error) from error
    return plotly


def _missing(what: str, error: ImportError) -> MidstreamError:
    return MidstreamError(
        "unavailable",
        f"{what}, not installed here ({error.name}): pip install 'midstream[notebook]'",
    )

"""Imports pandas, xarray and plotly (extra `notebook`) when a conversion needs them; the error for
a missing package names the extra.
"""

from typing import Any

from ..schemas.base import MidstreamError, Translated


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


def plotly() -> Any:
    """Return `plotly`, with `graph_objects` and `subplots` loaded. Raises MidstreamError if it is
    not installed.
    """
    with Translated(ImportError, lambda error: _missing("interactive figures need plotly", error)):
        import plotly.graph_objects
        import plotly.subplots
    return plotly


def _missing(what: str, error: ImportError) -> MidstreamError:
    return MidstreamError(
        "unavailable",
        f"{what}, not installed here ({error.name}): pip install 'midstream[notebook]'",
    )

"""pandas, xarray and plotly (extra `notebook`), imported when something is converted to theirs; a
missing one is named with its extra.
"""

from typing import Any

from ..schemas.base.errors import MidstreamError


def pandas() -> Any:
    """The module. Raises MidstreamError without it."""
    try:
        import pandas
    except ImportError as error:
        raise _missing("a data frame needs pandas", error) from error
    return pandas


def xarray() -> Any:
    """The module. Raises MidstreamError without it."""
    try:
        import xarray
    except ImportError as error:
        raise _missing("labelled arrays need xarray", error) from error
    return xarray


def plotly() -> Any:
    """`plotly.graph_objects`, with `plotly.subplots` loaded. Raises MidstreamError without it."""
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

"""How results of the kinds of jobs of packages are drawn and written: what their rows name."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import RenderableType
from rich.table import Table

from ...schemas.base.errors import MidstreamError
from ...schemas.jobs.kinds import of_kinds
from ...schemas.packages import installing, part
from .jobs import Cells

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Shown:
    """The layout of one type of record: columns of a list, facts of a single record."""

    title: str = ""  # of a list
    columns: Cells = field(default_factory=dict)
    # empty facts are left out
    facts: Cells = field(default_factory=dict)
    details: Callable[[Any], Sequence[Table]] = lambda record: ()  # tables below the facts


class Form(NamedTuple):
    """How results of a class are drawn and written; None: they are not."""

    plot: Callable[..., "Figure"] | None = None  # draws one, with its options
    lines: Callable[..., Any] | None = None  # the lines or columns of its data frame
    html: Callable[[Any], str] | None = None  # in notebooks
    png: Callable[[Any], bytes | None] | None = None  # its image in notebooks
    shown: Shown | None = None  # in a terminal, and in tables
    # what the command line prints of a job that has one
    printed: Callable[[Any], Iterable[RenderableType]] | None = None


@cache
def added() -> dict[type, Form]:
    """Return class → form, of all packages."""
    return {kind: form for path in of_kinds("forms") for kind, form in part(path).items()}


def form_of(kind: type) -> Form:
    """Return the form of a class; one without anything for a class of no package."""
    return added().get(kind, Form())


def formless(value: Any) -> MidstreamError:
    """Return the error of a result whose form is that of a package which is absent."""
    kind = type(value).__name__
    return MidstreamError(
        "unavailable", f"what draws a {kind} is not installed: {installing('lab')}"
    )

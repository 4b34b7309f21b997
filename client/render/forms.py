"""How results of the kinds of jobs of packages are drawn and written: what their rows name."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ...schemas.jobs.kinds import of_kinds
from ...schemas.packages import part

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Form(NamedTuple):
    """How results of a class are drawn and written; None: they are not."""

    plot: Callable[..., "Figure"] | None = None  # draws one, with its options
    lines: Callable[..., Any] | None = None  # the lines or columns of its data frame
    html: Callable[[Any], str] | None = None  # in notebooks
    png: Callable[[Any], bytes | None] | None = None  # its image in notebooks
    facts: Mapping[str, Callable[[Any], str]] = {}  # a line each, in a terminal


@cache
def added() -> dict[type, Form]:
    """Return class → form, of all packages."""
    return {kind: form for path in of_kinds("forms") for kind, form in part(path).items()}


def form_of(kind: type) -> Form:
    """Return the form of a class; one without anything for a class of no package."""
    return added().get(kind, Form())

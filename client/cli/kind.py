"""A kind of things, with which the verbs of the command line do something.

An act of a verb is a call of the client, by its path, or a function that first gets what connects
to the service. Both take names as the command line has them, and fields by keyword.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from ...schemas.jobs.kinds import of_kinds
from ...schemas.packages import part
from .terminal import Connector

#: A call of the client, such as `modules.get`, or a function of `Connector`, names and fields, or
#: where that is, as `module:name`.
Act = str | Callable[..., Any]


class Kind(NamedTuple):
    """A kind of things."""

    name: str
    plural: str
    acts: Mapping[str, Act]  # verb → what it does
    show: Callable[[Connector, Any], None] | None = None  # None: as `render.records` shows it
    paged: bool = False  # whether a list has the newest only, as many as `limit`
    begins: str = ""  # its ids, if `wait` and `cancel` take them as those of jobs
    # `wait` and `cancel` → what returns such a thing: it takes the client, an id and, to wait,
    # seconds
    followed: Mapping[str, Callable[..., Any]] = {}


def calls_of(group: str, *verbs: str) -> dict[str, Act]:
    """Return the verbs that are calls of a group of the client."""
    return {verb: f"{group}.{verb}" for verb in verbs}


@cache
def added() -> list[Kind]:
    """Return the kinds of things that jobs of packages make."""
    return [kind for path in of_kinds("things") for kind in part(path)]


def following(id_: str, verb: str) -> Callable[..., Any] | None:
    """Return what `wait` or `cancel` does with a thing that is no job; None for a job."""
    for kind in added():
        if kind.begins and id_.startswith(kind.begins):
            return kind.followed[verb]
    return None

"""How things of packages are shown: tables like those of this folder."""

from collections import ChainMap
from collections.abc import Mapping, MutableMapping
from functools import cache
from types import ModuleType
from typing import TypeVar

from ...schemas.packages import load_all

#: Entry points of them: package → module with tables `SHOWN`, `LINES` and `PLOTS`, as in `records`,
#: `lines` and `figures`.
GROUP = "midstream.renders"

T = TypeVar("T")


@cache
def _modules() -> list[ModuleType]:
    return [*load_all(GROUP)]


def with_added(name: str, ours: MutableMapping[type, T]) -> Mapping[type, T]:
    """Return one of our tables with the rows of packages' tables of that name."""
    return ChainMap(ours, *(getattr(module, name) for module in _modules()))

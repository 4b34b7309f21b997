"""What packages have in the ledger, beside their kinds of jobs."""

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from ..packages import load_all

#: What a record is, in words, and what reads it.
NamedReading = tuple[str, Callable[[], Awaitable[object]]]
#: Entry points of it: package → its `LedgerShare`.
GROUP = "midstream.ledger"


class LedgerShare(NamedTuple):
    """What a package keeps in the ledger, and what has to be done for it.

    Its scripts are its own: `Scripts` of `broker.ledger.core.scripts` loads those of a folder.
    """

    #: Patterns of keys that workers and the relay reach, if those of Redis' users do not include
    #: them.
    keys: tuple[str, ...] = ()
    #: Sorted set `ms:<name>` of ids → family of their records. A record has the fields `tenant` and
    #: `bytes`, which count as capture files; the tenant's own ids are in `ms:<name>:<tenant>`.
    charged: Mapping[str, str] = {}
    #: What the reaper does in every sweep, as `module:name`: a coroutine function of the ledger.
    duty: str = ""
    #: Yields what each record is that unfinished work needs, and a call that reads it, as
    #: `module:name`: an asynchronous generator of the ledger.
    check: str = ""


def shares() -> list[LedgerShare]:
    """Return what installed packages have in the ledger."""
    return [*load_all(GROUP)]

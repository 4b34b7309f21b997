"""Messages between a rank and the process that writes its files.

A message of the rank is MessagePack in the memory that they share, and its place goes through a
pipe, `COMMAND`, which has room for 43,000 of them where a pipe of 1 MiB is allowed. Answers are
MessagePack through another pipe, each after its `LENGTH`.
"""

import struct

from ....schemas.base.records import Wire
from ....schemas.base.store_calls import StoreCalls
from ..base.config import PlaneConfig
from .desk import DeskMessage

#: Number of a message, where it begins in the memory, and its bytes.
COMMAND = struct.Struct("<QQQ")
LENGTH = struct.Struct("<I")
#: Exit code of both if receipts cannot be delivered. The engine ends too, and other workers run its
#: jobs.
EXIT_NO_RECEIPTS = 70


class Setup(Wire, tag="setup"):
    """The first message."""

    config: PlaneConfig
    rank: int
    gives_way: bool  # see `begin_helper`


class Spilled(Wire, tag="spilled"):
    """Rows are in a file from now on, too."""

    descriptor: int  # of the rank's process
    start: int  # of the part of the memory where the file is mapped


class StatusAsked(Wire, tag="status"):
    """The rank asks for a `DeskStatus`."""


class Closed(Wire, tag="closed"):
    """The last message: write what is queued, and end."""


DeskCommand = DeskMessage | Setup | Spilled | StatusAsked | Closed


class Begun(Wire, tag="begun"):
    """The process serves the rank; with an `error` it does not, and ends."""

    error: str = ""


class Freed(Wire, tag="freed"):
    """The memory of this message, and of what it names, is not read any more."""

    number: int


class DeskStatus(Wire, tag="state"):
    """The counts of a rank."""

    outbox: int = 0  # receipts that the relay has not acknowledged
    totals: dict[str, int] = {}
    store: dict[str, StoreCalls] = {}


DeskAnswer = Begun | Freed | DeskStatus

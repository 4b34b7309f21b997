"""What every kind of reading has: a row of its forms, and the members of what a job stores."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ..artifacts.saes import StoredSae
from ..base.records import Record, Wire

#: The consumer that rows of a reading go to. No request can name it.
READER = "reading"

#: Bytes of a part for each position, in addition to those for its rows: position and token id in
#: MessagePack.
_POSITION_BYTES = 10


class StoredReading(Record, omit_defaults=True):
    """A reading after validation: the instruction to the ranks."""

    #: Whether every rank of a tensor-parallel stage records rows and makes a part, because each
    #: holds a part of the weights. By default one rank does, since their rows are equal.
    everywhere: ClassVar[bool] = False

    @property
    def artifact(self) -> StoredSae | None:
        """The registered artifact that ranks must hold for it."""
        return None

    def row_size(self) -> int:
        """Return the most bytes of a part for one row."""
        raise NotImplementedError

    def row_work(self, hidden_size: int, vocab_size: int) -> int:
        """Return the most multiply-adds for one row: one for each float32 weight of the artifact.
        0: not known.
        """
        return self.artifact.bytes // 4 if self.artifact is not None else 0

    def size(self, positions: int, sites: int) -> int:
        """Return the most bytes of one rank's part, without its header."""
        return positions * (sites * self.row_size() + _POSITION_BYTES)


@dataclass(frozen=True, eq=False)
class ReadingKind:
    """The forms of one kind of reading besides its result, from the request to the ranks' parts."""

    request: Any  # type of the request's field
    default: Any  # of that field
    stored: type[StoredReading]  # its tag is the kind's name, under which workers report it
    part: type[Wire]

    @property
    def name(self) -> str:
        return str(self.stored.__struct_config__.tag)

"""The process that writes a rank's files, as one that can be made to fail: see `rank_faults`."""

from typing import Any
from unittest import mock

from midstream.workers.runner.files import __main__ as rowd, desk

from .rank_faults import Faults, told, wrap_writer


class _Desk(desk.Desk):
    def __init__(self, memory: Any, config: Any, outbox: Any, *args: Any, **options: Any) -> None:
        super().__init__(memory, config, outbox, *args, **options)
        wrap_writer(self.writer, _Switched(config, outbox.rank))  # type: ignore[arg-type]


class _Switched:
    """The rank's faults as they are now."""

    def __init__(self, config: Any, rank: int) -> None:
        self._text = config.fault
        self._rank = rank
        self._told = told(config, rank)
        self._told.unlink(missing_ok=True)

    def __contains__(self, name: str) -> bool:
        text = self._told.read_text() if self._told.exists() else self._text
        return name in Faults(text, self._rank)


if __name__ == "__main__":
    with mock.patch.object(rowd, "Desk", _Desk):
        rowd.main()

"""The command line, called in the process of the test."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from http_kit import Reply, Requests, server

from midstream.client.cli import main


class Ended(NamedTuple):
    """How a command ended: its exit code, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """All of it in one line, without the frames that wrapped it."""
        return " ".join((self.out + self.err).replace("│", " ").split())


class Cli:
    """Calls `midstream` with arguments."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Ended:
        with pytest.raises(SystemExit) as ended:
            main.main([str(argument) for argument in arguments])
        return Ended(int(ended.value.code or 0), *self._capsys.readouterr())

    def served(self, *arguments: object, by: Sequence[Reply]) -> tuple[Ended, Requests]:
        """The same at a server that gives the answers `by`; and the requests that it saw."""
        with server(*by) as (url, seen):
            return self(*arguments, "--url", url), seen

"""Logging of every process: one line per entry, plain text with ids, or a JSON object with
`log_format=json`.

The ids that a line concerns (job, request, attempt, worker, rank, …) are bound where they become
known, and are on every line logged in that context, also by libraries. Secrets are redacted:
passwords in URLs, API keys and signing secrets.
"""

import logging
import math
import re
import sys
import time
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from ...schemas.base.recent import Recent
from ...schemas.base.records import JsonObject, to_json
from ...schemas.settings.settings import Settings

#: Identifiers that a log line may carry, in this order.
FIELDS = ("job", "request", "attempt", "worker", "rank", "tenant", "request_id", "trace_id")
#: Fields of the line about an answered call, in JSON.
ACCESS_FIELDS = ("method", "path", "status", "ms")
#: Characters that move a terminal's cursor, or begin a line that could pass for a log line: paths
#: and names come from clients.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
#: Subjects of complaints that are remembered at most: unknown peers may use any name.
REMEMBERED = 1000
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

#: Fields of every line of this process, and of lines that the current task (or thread) logs.
_process = ""
_of_process: dict[str, Any] = {}
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_of_task: ContextVar[Mapping[str, Any]] = ContextVar("midstream_log_fields", default=_NOTHING)

#: Each pattern has the part that may be shown in a group, then the secret.
_SECRETS = re.compile(
    r"(?P<url>\b[a-z][a-z0-9+.-]*://[^\s:/@'\"]*:)[^\s/'\"]+(?=@)"  # a password in a URL
    r"|(?P<key>\bms_[0-9a-z]{12}_)[A-Za-z0-9_-]+"
    r"|(?P<hook>\bwhsec_)[A-Za-z0-9+/=_-]+"
    r"|(?P<bearer>\b[Bb]earer )[^\s'\",]+"
)


def redacted(text: str) -> str:
    """Return `text` with everything that looks like one of Midstream's secrets replaced by ***."""
    return _SECRETS.sub(
        lambda result: next(part for part in result.groups() if part is not None) + "***", text
    )


def bind_process(**fields: Any) -> None:
    """Add these to every log line of this process from now on."""
    _of_process.update(fields)


def bind(**fields: Any) -> None:
    """Add these to every log line of the current task and of tasks it starts from now on; None
    removes a field.
    """
    _of_task.set({**_of_task.get(), **fields})


@contextmanager
def bound(**fields: Any) -> Iterator[None]:
    """`bind` for the length of a block."""
    token = _of_task.set({**_of_task.get(), **fields})
    try:
        yield
    finally:
        _of_task.reset(token)


def about(record: logging.LogRecord) -> dict[str, Any]:
    """Return the ids that a line concerns: those bound, and those in the line's `extra=`."""
    fields = {**_of_process, **_of_task.get()}
    # Celery's own lines about a task have its id in `data`: job, or job.attempts
    data = getattr(record, "data", None)
    task = data.get("id") if isinstance(data, dict) else None
    if isinstance(task, str) and "job" not in fields:
        fields["job"] = task.partition(".")[0]
    fields |= {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}
    return {name: fields[name] for name in FIELDS if fields.get(name) is not None}


class JsonFormatter(logging.Formatter):
    """One JSON object per line.

    `process` and `fields` apply where `configure` was not called (vLLM's own processes).
    """

    def __init__(self, process: str, **fields: Any):
        super().__init__()
        self._process = process
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        line: JsonObject = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": redacted(record.getMessage()),
            "process": _process or self._process,
            "pid": record.process,
            **self._fields,
            **about(record),
        }
        line |= {name: getattr(record, name) for name in ACCESS_FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["exception"] = redacted(self.formatException(record.exc_info))
        if record.stack_info:
            line["stack"] = redacted(record.stack_info)
        return to_json(line).decode()


class TextFormatter(logging.Formatter):
    """Log lines for a terminal: the ids follow the message, and its further lines are indented."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        ids = " ".join(f"{name}={value}" for name, value in about(record).items())
        line = _CONTROL.sub(
            lambda result: repr(result[0])[1:-1], super().formatMessage(record)
        ).replace("\n", "\n    ")
        return f"{line} [{ids}]" if ids else line


class Complaints:
    """Lets a complaint about the same subject be logged once in `every_s` seconds."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._made = Recent[Hashable, float](REMEMBERED)  # subject → when (monotonic)

    def due(self, subject: Hashable) -> bool:
        """Return whether to log a complaint about this now; the next one then waits."""
        at = time.monotonic()
        if at - self._made.get(subject, -math.inf) < self._every_s:
            return False
        self._made[subject] = at
        return True


def announce(line: str) -> None:
    """Print a line to the process's log, which may be on a full disk: the process goes on."""
    with suppress(OSError):
        print(line, flush=True)


def setup(settings: Settings, process: str, **fields: Any) -> None:
    """Send all logging of this process to stderr from now on, as the settings say.

    `fields`: on every line. A later call replaces the effect of an earlier one.
    """
    configure(settings.log_format, settings.log_level, process, **fields)


def configure(log_format: str, log_level: str, process: str, **fields: Any) -> None:
    """`setup` for a rank, which does not have the settings."""
    global _process
    _process = process
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else TextFormatter(TEXT))
    root = logging.getLogger()
    for previous in list(root.handlers):
        root.removeHandler(previous)
    root.addHandler(handler)
    root.setLevel(log_level)
    logging.captureWarnings(log_format == "json")
    for noisy in ("httpx2", "httpcore2", "opentelemetry"):  # they log a line per call
        logging.getLogger(noisy).setLevel(
            max(logging.WARNING, logging.getLevelNamesMapping()[log_level])
        )
    _of_process.clear()
    bind_process(**fields)

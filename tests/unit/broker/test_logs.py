"""Is every line of a log what a machine, or a person, can read: complete, with its ids, and without
a secret?
"""

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from midstream.broker.telemetry import logs
from midstream.schemas.settings.settings import Settings

SECRET = "hunter2hunter2"


Said = Callable[[], list[str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Iterator[Said]:
    """Gives the lines since it was last called; the logging of the test run is put back."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    level = root.level
    yield lambda: capsys.readouterr().err.splitlines()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    logs._of_process.clear()
    logs._process = ""


def start(log_format: str, **fields: Any) -> logging.Logger:
    logs.setup(Settings(log_format=log_format, log_level="INFO"), "worker", **fields)  # type: ignore[arg-type]
    return logging.getLogger("midstream.test")


def test_a_json_line_has_time_level_logger_message_and_process(said: Said) -> None:
    start("json").info('%d jobs\nin two lines, "quoted", é \x00', 3)
    (text,) = said()
    line = json.loads(text)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "INFO",
        "logger": "midstream.test",
        "message": '3 jobs\nin two lines, "quoted", é \x00',
        "process": "worker",
        "pid": os.getpid(),
    }


async def test_bound_log_fields_cover_nested_lines_only(said: Said) -> None:
    log = start("json", worker="w1")

    async def job(name: str) -> None:
        logs.bind(job=name, attempt=1)
        await asyncio.sleep(0)
        with logs.bound(request=0):
            log.info("inside")
        log.info("outside")

    await asyncio.gather(job("a"), job("b"))
    log.info("after")
    told = {
        (line.get("job"), line.get("request"), line["message"], line["worker"])
        for line in map(json.loads, said())
    }
    assert told == {
        (name, *rest) for name in "ab" for rest in ((0, "inside", "w1"), (None, "outside", "w1"))
    } | {(None, None, "after", "w1")}


def test_an_exception_is_a_field_of_its_line(said: Said) -> None:
    start("json").error("it failed", exc_info=ValueError(f"no redis://:{SECRET}@host/0"))
    (line,) = map(json.loads, said())
    assert line["message"] == "it failed"
    assert "ValueError: no redis://:***@host/0" in line["exception"]


def test_celery_task_lines_name_the_job(said: Said) -> None:
    start("json")
    logging.getLogger("celery.worker").info(
        "received", extra={"data": {"id": "job_x.2", "name": "midstream.generate"}}
    )
    assert json.loads(said()[0])["job"] == "job_x"


def test_a_text_line_has_its_ids_behind_the_message_and_before_the_traceback(said: Said) -> None:
    log = start("text")
    with logs.bound(job="job_x", attempt=2):
        log.error("it failed", exc_info=ValueError("no"))
    first, *traceback = said()
    assert first.endswith("ERROR midstream.test: it failed [job=job_x attempt=2]")
    assert traceback[-1] == "ValueError: no"


def test_user_input_cannot_inject_log_lines(said: Said) -> None:
    start("text").info(
        "no such path %s", "/v1/x\n2026-11-20 00:00:00,000 ERROR midstream.api: forged\r\x1b[2K"
    )
    first, second = said()
    assert first.endswith("no such path /v1/x")
    assert second == "    2026-11-20 00:00:00,000 ERROR midstream.api: forged\\r\\x1b[2K"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"redis://:{SECRET}@host:6379/0 is away", "redis://:***@host:6379/0 is away"),
        (f"rediss://worker:{SECRET}@host/0", "rediss://worker:***@host/0"),
        (f"key ms_abcdef012345_{SECRET}-_x", "key ms_abcdef012345_***"),
        (f"whsec_{SECRET}+/=", "whsec_***"),
        (f"{{'authorization': 'Bearer {SECRET}'}}", "{'authorization': 'Bearer ***'}"),
        ("http://host:8321/v1/jobs and user@host", "http://host:8321/v1/jobs and user@host"),
    ],
)
@pytest.mark.parametrize("log_format", ["json", "text"])
def test_logs_redact_secrets(text: str, shown: str, log_format: str, said: Said) -> None:
    start(log_format).warning("%s", text)
    (line,) = said()
    assert SECRET not in line
    assert (json.loads(line)["message"] if log_format == "json" else line).endswith(shown)


def test_without_a_collector_nothing_of_opentelemetry_is_imported() -> None:
    program = (
        "import sys\nfrom midstream.broker.telemetry import start, traces\nfrom "
        "midstream.schemas.settings.settings import Settings\n"
        "start.start(Settings(), 'api')\nspan = traces.begin('x', '00-' + 'a' "
        "* 32 + '-' + 'b' * 16 + '-01')\n"
        "traces.record('y', span.traceparent, 0.0, "
        "1.0)\nspan.end()\nprint(span.traceparent, 'opentelemetry' in sys.modules)"
    )
    assert subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/"
    ).stdout.split() == ["00-" + "a" * 32 + "-" + "b" * 16 + "-01", "False"]


def test_a_ready_line_that_a_full_disk_refuses_ends_no_process() -> None:
    """Without a buffer, as under `midstream up`."""
    code = "from midstream.broker.telemetry.logs import announce; announce('ready'); exit(7)"
    with open("/dev/full", "wb", 0) as full:
        done = subprocess.run([sys.executable, "-u", "-c", code], stdout=full, stderr=full)
    assert done.returncode == 7

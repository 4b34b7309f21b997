"""Can one see what happens?

Logs, metrics, traces and the status of a whole stack, as an operator reads them.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from span_kit import Collector, Span
from stack import Stack, free_port
from typer.testing import CliRunner
from wait_kit import wait_until

from midstream.client.cli import main as cli
from midstream.schemas.base.records import from_json
from midstream.schemas.requests.specs import StoredSteering
from midstream.schemas.service.status import ServiceStatus
from midstream.schemas.settings.tuning import Tuning

SERVED = {"relay", "worker", "callbacks"}  # those that serve their metrics themselves
ADMIN_KEY = "ms_abcdef012345_" + "s3cr3t" * 8
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER_SPAN = "00f067aa0ba902b7"
#: Only ends what hangs.
LONG_S = 60.0
#: Rows of the steering tables of a worker with the default settings.
ROWS = Tuning().table_rows
STAGES = {"POST /v1/completions", "queue", "attempt", "prompt", "receipt", "durable", "release"}


class Seen(Stack):
    """A stack whose processes have a port for their metrics each."""

    ports: dict[str, int]

    def spawn(self, name: str, **changed: Any) -> None:
        self.ports = {**getattr(self, "ports", {}), name: free_port()}
        super().spawn(
            name, **({"metrics_port": self.ports[name]} if name in SERVED else {}), **changed
        )

    def metrics(self, name: str) -> dict[str, float]:
        """Sample → value."""
        url = (
            f"http://127.0.0.1:{self.ports[name]}/metrics"
            if name in SERVED
            else f"{self.url}/metrics"
        )
        text = httpx2.get(url, timeout=LONG_S).text
        lines = [
            line.rpartition(" ") for line in text.splitlines() if line.startswith("midstream_")
        ]
        return {sample: float(value) for sample, _, value in lines}

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Its log; the ready line is for whoever starts it."""
        return [json.loads(line) for line in self.log(name).splitlines() if line.startswith("{")]

    def line(self, name: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first line of its log that is wanted, once it is there: it may be written after the
        answer that it tells of.
        """
        return wait_until(
            lambda: [line for line in self.lines(name) if wanted(line)],
            LONG_S,
            why=lambda: self.log(name)[-3000:],
        )[0]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as started:
        yield started


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Seen]:
    settings = {
        "log_format": "json",
        "otel_endpoint": collector.url,
        "admin_key": ADMIN_KEY,
        "engine.tensor_parallel_size": 2,
        "tuning.dispatch_window": 1,
        # a worker that stands still for some seconds is not dead, and its jobs are not run again
        "lease_s": 15.0,
        "tuning.visibility_timeout_s": 20,
    }
    with Seen(tmp_path_factory.mktemp("seen"), api=True, **settings) as started:
        assert isinstance(started, Seen)
        yield started


@pytest.fixture(scope="module")
def held(stack: Seen) -> httpx2.Response:
    """A completion that was held until its capture was durable."""
    answer = httpx2.post(
        f"{stack.url}/v1/completions",
        json={
            "model": "fake-model",
            "prompt": ["hi there", "and you"],
            "max_tokens": 4,
            "capture": {"layers": [0]},
            "capture_wait": True,
        },
        headers={
            "x-request-id": "mine-1",
            "traceparent": f"00-{TRACE}-{CALLER_SPAN}-01",
            "authorization": f"Bearer {ADMIN_KEY}",
        },
        timeout=LONG_S,
    )
    assert answer.status_code == 200
    return answer


@pytest.fixture(scope="module")
def spans(held: httpx2.Response, collector: Collector) -> list[Span]:
    def whole() -> list[Span]:
        """Spans come of each process once a second: of one stage one after the other."""
        found = collector.trace(TRACE, STAGES, LONG_S)
        enough = len(named(found, "prompt")) >= 2 and len(named(found, "receipt")) >= 4
        return found if enough else []

    return wait_until(whole, LONG_S)


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


# --- Traces
# --------------------------------------------------------------------------------------------------


def test_one_trace_follows_a_held_completion_from_its_caller_to_its_release(
    spans: list[Span],
) -> None:
    post, queue, attempt, release = (
        named(spans, name)[0] for name in ("POST /v1/completions", "queue", "attempt", "release")
    )
    assert post.parent == CALLER_SPAN
    api = "midstream-api"
    worker = "midstream-worker"
    relay = "midstream-relay"
    assert {(span.name, span.parent, span.service) for span in spans if span.name != "durable"} == {
        (post.name, CALLER_SPAN, api),
        ("queue", post.id, worker),
        ("attempt", post.id, worker),
        ("release", post.id, api),
        ("prompt", attempt.id, worker),
        ("receipt", attempt.id, relay),
    }
    # of relay or worker, whoever is last
    assert {span.parent for span in named(spans, "durable")} == {attempt.id}
    assert sorted(span.attributes["request"] for span in named(spans, "prompt")) == [0, 1]
    assert sorted(
        (span.attributes["request"], span.attributes["rank"]) for span in named(spans, "receipt")
    ) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert post.start <= queue.start <= queue.end == pytest.approx(attempt.start, abs=1e-3)
    assert attempt.start <= min(span.start for span in named(spans, "prompt"))
    assert release.end <= post.end


def test_a_failed_job_marks_its_attempt_span(stack: Seen, collector: Collector) -> None:
    trace = "ab" * 16
    missing = StoredSteering(
        layers=[0], hook="post_block", positions="all", family="add", tensors=["0" * 64], scale=1.0
    )
    job = stack.submit(["x"], steering=[missing], trace=f"00-{trace}-{CALLER_SPAN}-01")
    assert stack.wait(job).state == "failed"
    attempt = named(collector.trace(trace, {"attempt", "queue"}, LONG_S), "attempt")[0]
    assert attempt.failed
    assert attempt.attributes["outcome"] == "failed"


# --- Logs
# --------------------------------------------------------------------------------------------------


def test_access_log_lines_have_ids_and_duration(stack: Seen, held: httpx2.Response) -> None:
    line = stack.line("api", lambda line: line.get("request_id") == "mine-1" and "status" in line)
    job = held.headers["x-midstream-job"]
    wanted = {
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "job": job,
        "tenant": "default",
        "trace_id": TRACE,
    }
    assert {name: line[name] for name in wanted} == wanted
    assert 0 < line["ms"] < 60_000
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])


def test_worker_log_lines_name_job_and_attempt(stack: Seen, held: httpx2.Response) -> None:
    job = held.headers["x-midstream-job"]
    line = stack.line(
        "worker", lambda line: line["message"].startswith("attempt over") and line.get("job") == job
    )
    assert line["attempt"] == 1
    assert line["worker"] == "w1"
    assert line["process"] == "worker"
    assert line["trace_id"] == TRACE
    celery = [
        line
        for line in stack.lines("worker")
        if line["logger"].startswith("celery.") and job in line["message"]
    ]
    assert celery
    assert {line["job"] for line in celery} == {job}


def test_a_valid_request_id_is_kept_and_others_are_replaced(
    stack: Seen, held: httpx2.Response
) -> None:
    assert held.headers["x-request-id"] == "mine-1"
    for odd in (b"", b"a b", b"x" * 200, "é".encode()):
        answer = httpx2.get(
            f"{stack.url}/v1/nothing", headers={b"x-request-id": odd}, timeout=LONG_S
        )
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"]), odd


def test_no_process_logs_a_secret(stack: Seen, held: httpx2.Response) -> None:
    text = "".join(stack.log(name) for name in stack.names)
    assert "s3cr3t" not in text
    assert "mine-1" in text, "or nothing was logged at all"


# --- Metrics
# --------------------------------------------------------------------------------------------------


def test_each_stage_of_a_job_is_measured_where_it_ends(stack: Seen, held: httpx2.Response) -> None:
    worker = stack.metrics("worker")
    relay = stack.metrics("relay")
    api = stack.metrics("api")
    of_model = '{model="fake-model"}'
    for name in ("queue_wait", "first_token", "generation"):
        assert worker[f"midstream_{name}_seconds_count{of_model}"] >= 1, name
    for name in ("durable", "job"):
        whole = f"midstream_{name}_seconds_count{of_model}"
        assert worker.get(whole, 0) + relay.get(whole, 0) >= 1, name
    assert api['midstream_release_seconds_count{route="/v1/completions"}'] == 1
    assert relay['midstream_receipts_total{status="ok"}'] >= 4
    callbacks = stack.metrics("callbacks")
    assert callbacks['midstream_build_info{process="callbacks",version="0.1.0"}'] == 1


def test_a_gauge_is_shown_by_the_process_that_measures_it_alone(stack: Seen) -> None:
    wait_until(lambda: stack.metrics("api")["midstream_callbacks_up"] == 1, LONG_S)
    measured = {
        "api": {"ready": 1, "ledger_reachable": 1, "ledger_durable": 1, "held_responses": 0},
        "callbacks": {
            "webhook_outbox_depth": 0,
            "webhook_oldest_due_seconds": 0,
            "webhook_dropped_decisions": 0,
        },
    }
    gauges = {name for own in measured.values() for name in own}
    for process in ("api", "worker", "relay", "callbacks"):
        seen = stack.metrics(process)
        shown = {name: seen[f"midstream_{name}"] for name in gauges if f"midstream_{name}" in seen}
        assert shown == measured.get(process, {}), process


def test_rank_capture_counts_are_in_the_workers_metrics(stack: Seen, held: httpx2.Response) -> None:
    def captured() -> float:
        return stack.metrics("worker").get(
            'midstream_rank_captured_rows_total{model="fake-model",rank="0"}', 0
        )

    wait_until(lambda: captured() >= 2, LONG_S)  # ranks are asked every 5 s
    assert captured() == 2  # the last position of each prompt, at one layer
    assert stack.metrics("worker")['midstream_generated_tokens_total{model="fake-model"}'] >= 8


def test_the_api_counts_every_change_of_state_once(stack: Seen, held: httpx2.Response) -> None:
    counts = stack.metrics("api")
    stack.wait(stack.submit(["count me"]))
    later = stack.metrics("api")
    for state in ("queued", "running", "succeeded"):
        name = f'midstream_jobs_total{{model="fake-model",state="{state}"}}'
        assert later[name] - counts[name] == 1, state


# --- Status, top, inspect
# --------------------------------------------------------------------------------------------------


def test_the_status_shows_the_worker_and_its_engine(stack: Seen, held: httpx2.Response) -> None:
    status = from_json(httpx2.get(f"{stack.url}/v1/status", timeout=LONG_S).content, ServiceStatus)
    (worker,) = status.workers
    assert worker.worker == "w1"
    assert worker.tp == 2
    assert worker.healthy
    assert worker.stats is not None
    assert worker.stats.rows == ROWS
    assert status.relay.alive
    assert status.callbacks.alive
    assert status.redis.policy == "noeviction"
    assert status.redis.aof


@pytest.mark.long  # through Celery's program; test_worker_jobs.py asks in this process
def test_inspect_shows_the_engine_of_a_worker(stack: Seen) -> None:
    asked = ["-A", "midstream.workers.remote", "inspect", "midstream_engine", "-t", "30"]
    of_worker = ["-d", f"w1@{os.uname().nodename}", "--json"]
    done = subprocess.check_output(
        [sys.executable, "-m", "celery", *asked, *of_worker],
        env={**os.environ, "MIDSTREAM_REDIS_URL": stack.settings.redis_url},
        timeout=90,
    )
    (told,) = json.loads(done).values()
    assert told["model"] == "fake-model"
    assert told["tp"] == 2
    assert told["pp"] == 1
    assert told["worker"] == "w1"
    assert told["stats"]["rows"] == ROWS
    assert told["versions"]["midstream"] == "0.1.0"


@pytest.mark.parametrize("shown", ["--once", "-n1", "-n2"])
def test_top_prints_the_service_once_on_80_columns(
    stack: Seen, held: httpx2.Response, shown: str
) -> None:
    arguments = ["top", shown, "--interval=0.2", "--url", stack.url]
    done = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= 80
    for part in ("relay alive", "callbacks alive", "fake-model", "w1", f"0/{ROWS}"):
        assert part in done.output


@pytest.fixture(scope="module")
def lonely(stack: Seen) -> Seen:
    """Its worker and its relay are dead: for the last test."""
    for name in ("relay", "worker"):
        stack.kill(name)
    # as they expire by themselves
    stack.do(lambda ledger: ledger.redis.delete("ms:relay", "ms:alive:w1"))
    for tenant in ("default", "alice", "alice"):
        stack.submit(["wait"], tenant=tenant)
    return stack


def test_the_status_counts_what_waits_by_priority_and_tenant(lonely: Seen) -> None:
    time.sleep(0.2)
    status = from_json(httpx2.get(f"{lonely.url}/v1/status", timeout=LONG_S).content, ServiceStatus)
    (queue,) = status.queues
    assert 0.1 < queue.oldest_s < LONG_S
    assert queue.priority == "batch"
    assert queue.sent == 1
    assert queue.waiting == {"alice": 2}
    assert status.queued == status.live == 3
    assert status.workers == []
    assert not status.relay.alive
    depth = 'midstream_queue_depth{model="fake-model",place="waiting",priority="batch"}'
    assert lonely.metrics("api")[depth] == 2

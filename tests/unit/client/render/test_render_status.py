"""Does the picture of the service fit on a narrow terminal, and does the doctor read it rightly?"""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from http_kit import reply, server
from rich.console import Console, RenderableType

from midstream import MidstreamError, __version__
from midstream.client import extras
from midstream.client.render import readings, records, status as show_status
from midstream.client.stack.checks import engine_checks, service_checks
from midstream.client.stack.checks.finding import CheckFinding
from midstream.client.stack.checks.service import Service
from midstream.schemas.artifacts.conditions import Condition, Decision, Schedule, StoredPolicy
from midstream.schemas.artifacts.probes import ProbeResult
from midstream.schemas.jobs.models import WorkerInfo, WorkerStats
from midstream.schemas.requests.policies import (
    Policy,
    PolicyDay,
    PolicyRequest,
    Webhook,
)
from midstream.schemas.service.status import (
    CallbacksStatus,
    DesyncStatus,
    QueueStatus,
    RedisStatus,
    RelayStatus,
    ServiceStatus,
)
from midstream.schemas.settings.settings import Settings

AT = 1_800_000_000.0


def stats(**changes: Any) -> WorkerStats:
    numbers = dict.fromkeys(WorkerStats.__struct_fields__, 0) | {
        "rows": 256,
        "last_desync": "",
        "last_desync_at": None,
        "at": AT - 2,
    }
    return WorkerStats(**(numbers | changes))


def worker(
    name: str = "gpu-node-17.cluster.example", told: WorkerStats | None = None, **changes: Any
) -> WorkerInfo:
    facts: dict[str, Any] = {
        "worker": name,
        "boot": "b",
        "model": "meta-llama-3.1-70b-instruct",
        "version": __version__,
        "host": "h",
        "pid": 1,
        "started": AT,
        "tp": 8,
        "pp": 2,
        "stats": told or stats(),
    }
    return WorkerInfo(**(facts | changes))


def status(**changes: Any) -> ServiceStatus:
    facts: dict[str, Any] = {
        "version": __version__,
        "at": AT,
        "held": 512,
        "live": 123_456,
        "queued": 100_000,
        "counts": {
            "meta-llama-3.1-70b-instruct": {
                "queued": 1_234_567,
                "running": 1_234_567,
                "succeeded": 1_200_000,
                "failed": 12,
            }
        },
        "queues": [
            QueueStatus(
                model="meta-llama-3.1-70b-instruct",
                priority="interactive",
                sent=64,
                waiting={"a-long-tenant": 99_936},
                oldest_s=7300,
            )
        ],
        "workers": [
            worker(
                told=stats(
                    jobs=128,
                    running=64,
                    waiting=4096,
                    generated_tokens_s=12_345.6,
                    kv_cache=0.973,
                    rows_used=256,
                )
            )
        ],
        "relay": RelayStatus(
            alive=True, url="tcp://10.0.0.1:5557", version=__version__, received=12_345_678
        ),
        "callbacks": CallbacksStatus(
            alive=True, last_sweep=AT - 1, webhooks_pending=3, webhooks_overdue_s=2.0
        ),
        "redis": RedisStatus(
            version="7.0.1",
            used_bytes=3 << 30,
            limit_bytes=4 << 30,
            share=0.75,
            policy="noeviction",
            aof=True,
            clients=99,
            milliseconds=0.4,
        ),
    }
    return ServiceStatus(**(facts | changes))


def drawn(shown: RenderableType) -> str:
    console = Console(width=80, file=io.StringIO())
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def printed(now: ServiceStatus, before: ServiceStatus | None = None) -> str:
    return drawn(show_status.status(now, "http://api.example:8321", before))


def test_a_list_of_policies_breaks_no_word_at_80_columns() -> None:
    content = PolicyRequest(
        probe="personal-data",
        condition=Condition(aggregation="mean", window=4, at_least=0.25),
        actions=["flag", Webhook(url="https://alerts.example.com"), "stop"],
        mode="active",
        all_traffic=True,
    )
    version: Any = SimpleNamespace(version=12, content=content)
    policy = Policy(name="no-personal-data", model="m", digest="d", created=AT, versions=[version])
    words = {"no-personal-data v12", "condition", "mean ≥ 0.25", "actions", "webhook"}
    assert {word for word in words if word in drawn(records.listed([policy], Policy))} == words


def test_a_policy_shows_its_condition_and_its_hits() -> None:
    condition = Condition(at_least=2.5, cool_down=8, schedule=Schedule(tokens="all", every=2))
    content = PolicyRequest(probe="p", condition=condition, actions=[])
    version: Any = SimpleNamespace(version=1, content=content)
    days = [PolicyDay("2026-11-28", 240, 60, 0), PolicyDay("2026-11-29", 9, 4, 4)]
    policy = Policy(name="n", model="m", digest="d", created=AT, versions=[version], days=days)
    shown = " ".join(drawn(records.one(policy)).split())
    lines = ("schedule all tokens, every 2", "cool_down 8", "hits 64 of 249 prompts in 30 days")
    assert [line in shown for line in (*lines, "latch")] == [True] * 3 + [False]


def test_decisions_are_shown_where_there_are_any_with_what_was_done() -> None:
    policy = StoredPolicy(
        name="guard",
        version=2,
        digest="d",
        condition=Condition(at_least=1),
        actions=["flag", "stop"],
        mode="active",
        acts=True,
    )
    found = [Decision(4, "trigger", 1.5), Decision(6, "release", 0.5)]
    decided = ProbeResult(0, "p", "d", {}, 9, policy=policy, decisions=found)
    result: Any = SimpleNamespace(probes=[decided, ProbeResult(1, "p", "d", {}, 9, policy=policy)])
    rows = [line.split()[2:] for line in drawn(readings.decisions(result)).splitlines()]
    assert [row for row in rows if row[:1] == ["v2"]] == [
        ["v2", "4", "trigger", "1.5000", "flag,", "stop"],
        ["v2", "6", "release", "0.5000"],
    ]


def test_a_busy_service_fits_on_80_columns_and_keeps_its_numbers() -> None:
    text = printed(status())
    assert max(map(len, text.splitlines())) <= 80
    for number in ("1234567", "99936", "4096", "12346", "97%", "256/256", "8×2", "2 h"):
        assert number in text, number
    later = status(at=AT + 2, counts={"meta-llama-3.1-70b-instruct": {"succeeded": 1_200_041}})
    assert " 20.5" in printed(later, status())


def test_status_shows_missing_parts_and_ranks_that_disagreed_lately() -> None:
    text = printed(
        status(workers=[], relay=RelayStatus(alive=False), callbacks=CallbacksStatus(alive=False))
    )
    for words in ("no worker is running", "relay not seen", "callbacks not seen"):
        assert words in text
    told = DesyncStatus(worker="w1", at=AT - 120, detail="rank 1 reports another checksum")
    assert "disagreed 2 min ago" in printed(status(last_desync=told))
    assert "disagreed" not in printed(
        status(last_desync=msgspec.structs.replace(told, at=AT - 2 * show_status.DESYNC_SHOWN_S))
    )


@pytest.mark.parametrize(
    ("changes", "about", "level"),
    [
        ({}, "", "ok"),
        ({"workers": []}, "workers", "fail"),
        ({"workers": [worker("w1", healthy=False, detail="resyncing")]}, "worker w1", "fail"),
        ({"workers": [worker("w1", version="0.0.9")]}, "worker w1", "warn"),
        ({"workers": [worker("w1", stats(at=AT + 60))]}, "worker w1 clock", "fail"),
        ({"workers": [worker("w1", stats(at=AT + 2))]}, "worker w1 clock", "warn"),
        ({"workers": [worker("w1", stats(outbox=10_001))]}, "worker w1", "warn"),
        (
            {"workers": [worker("w1", stats(desyncs=1, last_desync="x", last_desync_at=AT - 60))]},
            "worker w1",
            "warn",
        ),
        ({"relay": RelayStatus(alive=False)}, "relay", "fail"),
        ({"relay": RelayStatus(alive=True, version="0.0.9")}, "relay", "warn"),
        ({"callbacks": CallbacksStatus(alive=False)}, "callbacks", "fail"),
        (
            {"callbacks": CallbacksStatus(alive=True, webhooks_pending=5, webhooks_overdue_s=301)},
            "webhooks",
            "warn",
        ),
        (
            {"queues": [QueueStatus(model="other", priority="batch", sent=2, waiting={})]},
            "queue",
            "fail",
        ),
    ],
)
def test_the_doctor_grades_status_findings(changes: dict[str, Any], about: str, level: str) -> None:
    found = [
        finding
        for finding in service_checks.judged(status(**{"queues": [], **changes}), Settings())
        if finding.level != "ok"
    ]
    assert [(finding.about, finding.level) for finding in found] == (
        [] if level == "ok" else [(about, level)]
    )
    assert all(finding.advice for finding in found)


def test_the_doctor_imports_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch.so: cannot open')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (found,) = engine_checks.vllm(Service(Settings(), "", ""))
    assert found.level == "fail"
    assert found.about == "vllm"
    assert found.found == "torch cannot be imported: OSError: libtorch.so: cannot open"
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(extras, "IMPORT_S", 0.5)
    (found,) = engine_checks.vllm(Service(Settings(), "", ""))
    assert found.level == "warn"
    assert found.found.partition(":")[0] == "not checked"


def test_the_doctor_lists_allowed_hosts() -> None:
    problem = MidstreamError(
        "misdirected",
        "this API is not called 'box'",
        field="Host",
        allowed="localhost, api.example",
    ).problem()
    with server(reply(problem, status=421)) as (url, _):
        found = list(service_checks.api(Service(Settings(), "", url)))
    assert found == [
        CheckFinding(
            "fail",
            "api",
            "this API is not called 'box'",
            "give --url with one of: localhost, api.example",
        )
    ]


def test_the_doctor_blames_no_other_part_for_a_fault_of_redis() -> None:
    refused = reply({"missing": ["redis: disk full", "outbox: full: /data/worker"]}, status=503)
    with server(reply({}), refused) as (url, seen):
        service = Service(Settings(), "", url)
        found = [*service_checks.api(service), *service_checks.parts(service)]
    assert [one.about for one in found if one.level != "ok"] == ["ready", "service"]
    assert found[-1].found == "not checked: without Redis no process reports"
    assert found[-2].advice == "mend that: no worker is at fault"
    assert len(seen) == 2

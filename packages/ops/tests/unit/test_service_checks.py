"""Does the doctor read the service's report on itself, and an engine's packages, rightly?"""

from pathlib import Path
from typing import Any

import pytest
from http_kit import reply, server
from status_kit import AT, stats, status, worker

from midstream import MidstreamError
from midstream.schemas.service.status import CallbacksStatus, QueueStatus, RelayStatus
from midstream.schemas.settings.settings import Settings
from midstream_ops import engine_packages
from midstream_ops.checks import engine_checks, service_checks
from midstream_ops.checks.finding import CheckFinding
from midstream_ops.checks.service import Service


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
    monkeypatch.setattr(engine_packages, "IMPORT_S", 0.5)
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

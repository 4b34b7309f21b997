"""Does the picture of the service fit on a narrow terminal?"""

import io
from types import SimpleNamespace
from typing import Any

import msgspec
from rich.console import Console, RenderableType
from status_kit import AT, status, worker

from midstream.client.render import jobs, readings, records, status as show_status
from midstream.schemas.artifacts.conditions import Condition, Decision, Schedule, StoredPolicy
from midstream.schemas.artifacts.probes import ProbeResult
from midstream.schemas.prompts.sight import TurnLook
from midstream.schemas.requests.policies import (
    Policy,
    PolicyDay,
    PolicyRequest,
    Webhook,
)
from midstream.schemas.service.status import (
    CallbacksStatus,
    DesyncStatus,
    RelayStatus,
    ServiceStatus,
)


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


def test_a_policy_shows_where_it_looks_and_what_to_mind() -> None:
    looks = [TurnLook(role="user", turn=-1), TurnLook(role="tool", part="content")]
    condition = Condition(at_least=2.5, schedule=Schedule(tokens=looks))
    content = PolicyRequest(probe="p", condition=condition, actions=[], told=True)
    version: Any = SimpleNamespace(version=1, content=content)
    policy = Policy(
        name="n", model="m", digest="d", created=AT, versions=[version], warnings=["too [long]"]
    )
    shown = " ".join(drawn(records.one(policy)).split())
    for line in ("schedule user turn -1 or tool content tokens", "told in answers", "too [long]"):
        assert line in shown


def test_a_job_says_which_prompts_its_edits_left_alone() -> None:
    ranks = [
        SimpleNamespace(request=request, applied=applied)
        for request, applied in ((0, 0), (0, 0), (1, 4), (2, 0), (3, 0))
    ]
    found: Any = SimpleNamespace(stages=[SimpleNamespace(ranks=ranks)])
    edited: Any = SimpleNamespace(steered=True)
    assert jobs.unedited(edited, found).startswith("no row was edited of prompt 0, 2-3:")
    found.stages[0].ranks = ranks[2:3]
    assert jobs.unedited(edited, found) == ""
    assert jobs.unedited(edited, None) == ""
    edited.steered = False
    assert jobs.unedited(edited, found) == ""


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


def test_workers_whose_names_begin_alike_are_told_apart() -> None:
    name = "gpu-node-17.cluster.example-meta-llama-3.1-70b"
    names = [name, f"{name}-gradients"]
    text = printed(status(workers=[worker(each) for each in names]))
    assert max(map(len, text.splitlines())) <= 80
    folded = "".join(line.split(" ")[0] for line in text.splitlines())
    assert folded.count(name) == 2
    assert f"{name}-gradients" in folded


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

"""Do the commands about steering ask for what was meant, and show what came back?"""

import io
from typing import Any

import numpy as np
import pytest
from cli_kit import Cli
from http_kit import reply
from rich.console import Console

from midstream import MidstreamError, SteeringSpec
from midstream.client.render import records, steering as show_steering
from midstream.schemas.base.records import from_json
from midstream.schemas.requests.steering import (
    Dynamic,
    EntryView,
    GlobalRequest,
    GlobalView,
    ModuleView,
    RankAgreement,
    RankSteering,
    StageAgreement,
    WorkerSteering,
)

JOY = np.arange(4, dtype=np.float32)
ENTRY = EntryView(
    op="add",
    hook="post_block",
    layers=[3],
    positions="all",
    tensors=["ab" * 32],
    scale=2.0,
    numbers=[],
)
MODULE = ModuleView(name="joy", model="m", digest="cd" * 32, entries=[ENTRY], bytes=16, created=1.0)


def rank(number: int = 0, **given: Any) -> RankSteering:
    numbers = dict.fromkeys(
        ("tp", "pp", "step", "epoch", "vectors", "requests", "outbox", "backlog"), 0
    )
    fields = {
        "checksum": "f" * 16,
        "actions": 7,
        "rows_used": 1,
        "rows": 64,
        "entries_used": 2,
        "entries": 4096,
    }
    return RankSteering(rank=number, **{**numbers, **fields, **given})


def worker(*ranks: RankSteering, **given: Any) -> WorkerSteering:
    fields: dict[str, Any] = {"state": "serving", "detail": ""}
    return WorkerSteering(
        worker="w1", boot="b", model="m", at=1.0, ranks=list(ranks), **{**fields, **given}
    )


def everyone(**given: Any) -> GlobalView:
    fields: dict[str, Any] = {
        "version": 3,
        "digest": "ef" * 32,
        "entries": [ENTRY],
    }
    return GlobalView(model="m", changed=1.0, **{**fields, **given})


AGREED = Dynamic(
    workers=[worker(rank(), rank(1, tp=1))],
    determinism=RankAgreement(
        consistent=True,
        stages=[
            StageAgreement(
                worker="w1",
                pp=0,
                consistent=True,
                actions={0: 7, 1: 7},
                checksums={0: "f" * 16, 1: "f" * 16},
            )
        ],
    ),
)
APART = Dynamic(
    workers=[
        worker(
            rank(),
            rank(1, tp=1, checksum="e" * 16),
            state="resyncing",
            detail="ranks disagree",
            desyncs=1,
        )
    ],
    determinism=RankAgreement(
        consistent=False,
        stages=[
            StageAgreement(
                worker="w1",
                pp=0,
                consistent=False,
                actions={0: 7, 1: 7},
                checksums={0: "f" * 16, 1: "e" * 16},
            )
        ],
        detail="w1: ranks 0 and 1 of stage 0 have other checksums",
    ),
)


def shown(what: Any, **options: Any) -> str:
    console = Console(**{"width": 80, "file": io.StringIO()} | options)
    console.print(what, soft_wrap=True)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_global_steering_is_set_from_the_same_options(cli: Cli) -> None:
    ended, seen = cli.served("put", "global", "@joy:2", by=[reply(everyone())])
    assert ended.code == 0
    assert "version 3" in ended.out
    assert from_json(seen.bodies[0], GlobalRequest).steering == [
        SteeringSpec(module="joy", scale=2.0)
    ]


def test_a_refusal_is_a_line_and_an_exit_code(cli: Cli) -> None:
    problem = MidstreamError("intervention_failed", "w1, rank 1: cannot hold it").problem()
    ended, _ = cli.served("put", "global", "@joy", by=[reply(problem, 500)])
    assert ended == (1, "", "error: w1, rank 1: cannot hold it\n")


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_ranks_that_disagree_are_shown_and_an_exit_code(cli: Cli, options: tuple[str, ...]) -> None:
    ended, _ = cli.served("get", "ranks", *options, by=[reply(APART)])
    assert ended.code == 1
    assert "e" * 16 in ended.out
    assert ended.err == "error: w1: ranks 0 and 1 of stage 0 have other checksums\n"


def test_ranks_that_agree_are_one_line_with_checksum_and_actions(cli: Cli) -> None:
    ended, seen = cli.served("get", "ranks", by=[reply(AGREED)])
    assert seen == ["GET /v1/steering/dynamic"]
    assert ended.code == 0
    assert ended.err == ""
    assert (
        f"determinism: consistent, 2 ranks in 1 stage of 1 worker, checksum {'f' * 16} "
        "over 7 actions"
    ) in ended.out
    assert "w1 of m: serving, 0 requests wait for rows" in ended.out


def test_each_rank_keeps_a_line_of_its_own_on_a_narrow_terminal() -> None:
    table = show_steering.ranks(AGREED.workers[0], AGREED.determinism)
    _, _, first, second = [line for line in shown(table).splitlines() if line.strip()]
    assert first.split() == f"0 0 {'f' * 16} 7 1/64 2/4096 0 0, 0 B".split()
    assert second.split()[:3] == ["1", "0", "f" * 16]


@pytest.mark.parametrize(("found", "red"), [(APART, True), (AGREED, False)])
def test_the_ranks_of_a_stage_that_disagrees_are_red(found: Dynamic, red: bool) -> None:
    table = show_steering.ranks(found.workers[0], found.determinism)
    text = shown(table, width=100, force_terminal=True, color_system="standard")
    assert ("\x1b[31m" in text) is red


def test_entries_and_modules_are_listed_with_their_scalars() -> None:
    clamp = EntryView(
        op="clamp",
        hook="mlp_out",
        layers=[1, 2, 3, 7],
        positions=[0, -1],
        tensors=["12" * 32],
        scale=1.0,
        numbers=[0.5, -1.0, 2.0],
    )
    text = shown(show_steering.entries([ENTRY, clamp]), width=160)
    for word in ("post_block", "1-3, 7", "[0,-1]", "0.5, -1, 2", "121212121212"):
        assert word in text
    assert (
        show_steering.what([ENTRY, clamp, ENTRY]) == "add at post_block 3; clamp at mlp_out 1-3, 7"
    )
    listed = shown(records.listed([MODULE], ModuleView), width=160)
    for word in ("joy", "cdcdcdcdcdcd", "add at post_block 3", "16 B"):
        assert word in listed

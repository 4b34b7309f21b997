"""Paths of a sweep: which layers are on them, what is held, what each pass is asked, and which
fields are refused.
"""

from typing import Any

import msgspec
import pytest
from plan_kit import ablated, model, pair, plan, refusal
from refusal_kit import refuses

from midstream.schemas.base.errors import MidstreamError, misfit
from midstream.schemas.jobs.jobs import Job, Sampling
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.model.banks import RowShape
from midstream.schemas.requests.source_runs import parse_row
from midstream.workers.engine.protocol import EngineRequest
from midstream_lab.records.sweep_paths import StoredPath, reaches
from midstream_lab.records.sweep_units import SweepWork
from midstream_lab.records.sweeps import StoredSweep
from midstream_lab.run.requests import SweepRequests

INFO = model(hooks=["pre_attn", "attn_out", "post_attn", "mlp_in", "mlp_out", "post_block"])
TO_LOGITS = {"receivers": "logits"}


def path_of(**path: Any) -> StoredSweep:
    return plan(
        info=INFO,
        axis="together",
        hooks=path.pop("hooks", ["attn_out"]),
        layers=path.pop("layers", "all"),
        path=path,
        noise=1,
    ).sweep


def asks(sweep: StoredSweep, info: ModelInfo = INFO) -> SweepRequests:
    return SweepRequests(
        Job(
            id="job_1",
            kind="sweep",
            model="m",
            prompts=[],
            sampling=Sampling(),
            created=0.0,
            work=SweepWork(sweep=sweep).packed,
        ),
        1,
        info,
        True,
    )


@pytest.mark.parametrize(
    ("sender", "held"),
    [
        (("pre_attn", 1), {"attn_out": [1, 2], "mlp_out": [1, 2]}),
        (("attn_out", 1), {"attn_out": [2], "mlp_out": [1, 2]}),
        (("mlp_out", 1), {"attn_out": [2], "mlp_out": [2]}),
        (("post_block", 2), {}),
        (("z", 1), {"attn_out": [2], "mlp_out": [1, 2]}),
        (("post_attn", 1), {"attn_out": [2], "mlp_out": [1, 2]}),
        (("mlp_in", 1), {"attn_out": [2], "mlp_out": [2]}),
        (("mlp_act", 1), {"attn_out": [2], "mlp_out": [2]}),
    ],
)
def test_branches_that_read_what_the_sender_changes_are_held(sender, held) -> None:
    assert StoredPath(frozen=["attn", "mlp"]).frozen_sites(sender, 2) == held


@pytest.mark.parametrize(
    ("sender", "receiver", "reached"),
    [
        (("z", 1), ("attn_out", 1), True),
        (("post_block", 1), ("q", 2), True),
        (("z", 1), ("z", 1), False),
        (("z", 1), ("v", 1), False),
    ],
)
def test_a_sender_reaches_what_is_computed_after_it(sender, receiver, reached) -> None:
    assert reaches(sender, receiver) is reached


def test_only_layers_on_the_path_are_swept() -> None:
    assert path_of(**TO_LOGITS).layers == [0, 1, 2, 3]
    assert path_of(
        receivers=[{"layer": 2, "hook": "mlp_out"}, {"layer": 0, "hook": "attn_out"}]
    ).layers == [0, 1, 2]
    assert path_of(sender={"layer": 1, "hook": "mlp_out"}).layers == [2, 3]
    refused = refusal(
        pair(),
        info=INFO,
        axis="together",
        hooks=["attn_out"],
        layers=[1, 2],
        path={"sender": {"layer": 1, "hook": "mlp_out"}},
    )
    assert refused.field == "layers"
    assert refused.allowed == "all, or some of 2"


def test_a_path_to_the_logits_is_one_pass_with_the_branches_held() -> None:
    made = asks(path_of(**TO_LOGITS))
    (ask,) = made.patched(next(unit for unit in made.units.cells(0) if unit.layer == 2))
    rows = [
        (entry.hook, entry.layers[0], parse_row(entry.tensors[0]).key.split(".")[2])
        for entry in ask.steering
    ]
    assert set(rows) == {
        ("attn_out", 2, "source"),
        ("attn_out", 3, "base"),
        ("mlp_out", 2, "base"),
        ("mlp_out", 3, "base"),
    }
    assert ask.entry is not None
    assert ask.entry.layer == 2
    assert made.units.width == 1


def test_a_path_to_receivers_has_a_first_pass_whose_rows_they_have_in_the_second() -> None:
    sweep = path_of(
        receivers=[{"layer": 1, "hook": "mlp_out"}, {"layer": 3, "hook": "attn_out"}],
        frozen=["attn"],
    )
    made = asks(sweep)
    cell = next(unit for unit in made.units.cells(0) if unit.layer == 1)
    (first,) = made.asks(cell._replace(kind="sender"))
    (second,) = made.patched(cell)
    assert first.request == cell.number * 2 + 1
    assert second.request == cell.number * 2
    assert first.grade is None
    assert first.sampling.max_tokens == 0
    assert second.grade is not None
    assert second.sampling.max_tokens == 1
    assert [(dict(capture.sites), capture.at) for capture in first.captures] == [
        ({"attn_out": [3], "mlp_out": [1]}, "before")
    ]
    held = {(entry.hook, entry.layers[0]) for entry in first.steering if "base" in entry.tensors[0]}
    assert held == {("attn_out", 2), ("attn_out", 3)}
    assert {parse_row(entry.tensors[0])._replace(position=0) for entry in second.steering} == {
        parse_row(f"run:{made.first_key(cell)}:{site}:0") for site in ("mlp_out:1", "attn_out:3")
    }


def test_a_sender_is_one_first_pass_for_all_cells_of_a_pair() -> None:
    made = asks(path_of(sender={"layer": 1, "hook": "attn_out"}, hooks=["mlp_out"]))
    sender = made.units.sender(0)
    assert sender is not None
    assert [(dict(capture.sites)) for capture in made.first(sender).captures] == [
        {"mlp_out": [1, 2, 3]}
    ]
    cells = [made.patched(cell)[0] for cell in made.units.cells(0)]
    assert {parse_row(entry.tensors[0]).key for ask in cells for entry in ask.steering} == {
        made.first_key(sender)
    }
    numbers = [
        made.units.base(0),
        made.units.source(0),
        sender,
        *made.units.noise(0),
        *made.units.cells(0),
    ]
    assert [unit.number for unit in numbers] == list(range(len(numbers)))


def test_heads_of_both_ends_are_their_dimensions_of_the_rows() -> None:
    """The sender's at the first pass, from the other prompt's counterpart; a cell's or receiver's
    at the second. Frozen rows are whole.
    """
    shapes = {hook: RowShape(heads=2, width=4) for hook in ("z", "q")}
    info = model(hooks=[*INFO.hooks, *shapes], inside=shapes)

    def requests(**fields: Any) -> tuple[SweepRequests, StoredSweep]:
        sweep = plan(info=info, noise=1, **fields).sweep
        return asks(sweep, info), sweep

    def written(ask: EngineRequest, kind: str) -> dict[tuple[str, int], set[str]]:
        """(hook, layer) → dimensions, of rows of a run."""
        found: dict[tuple[str, int], set[str]] = {}
        for entry in ask.steering:
            row = parse_row(entry.tensors[0])
            assert row.hook == entry.hook
            assert [row.layer] == entry.layers
            if row.key.split(".")[2] == kind:
                found.setdefault((row.hook, row.layer), set()).add(
                    entry.tensors[1].partition(":")[2] if len(entry.tensors) > 1 else ""
                )
        return found

    made, stored = requests(
        axis="head", hooks=["q"], path={"sender": {"layer": 1, "hook": "z", "head": 1}}
    )
    sender = made.units.sender(0)
    assert sender is not None
    first = made.first(sender)
    assert written(first, "source") == {("z", 1): {"4-7"}}
    assert written(first, "base") == {
        ("attn_out", 2): {""},
        ("attn_out", 3): {""},
        **{("mlp_out", layer): {""} for layer in (1, 2, 3)},
    }
    places = {
        (entry.positions[0], parse_row(entry.tensors[0]).position)
        for entry in first.steering
        if ".source" in entry.tensors[0]
    }
    assert places == set(stored.pairs[0].sender)
    assert {
        (entry.positions[0], parse_row(entry.tensors[0]).position)
        for entry in first.steering
        if ".base" in entry.tensors[0]
    } == {(place, place) for place in range(min(places)[0], len(stored.pairs[0].base))}
    assert [
        (cell.column, written(made.patched(cell)[0], "first"))
        for cell in made.units.cells(0)
        if made.units.patched(cell)[0] == [3]
    ] == [(0, {("q", 3): {"0-3"}}), (1, {("q", 3): {"4-7"}})]
    made, _ = requests(
        axis="together",
        hooks=["mlp_out"],
        layers=[1],
        path={"receivers": [{"layer": 2, "hook": "q", "head": 0}]},
    )
    assert written(made.patched(next(iter(made.units.cells(0))))[0], "first") == {("q", 2): {"0-3"}}


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"path": {}}, "path", "either a `sender` or `receivers`"),
        ({"path": {"receivers": []}}, "path.receivers", "length >= 1"),
        (
            {"path": {"receivers": [{"layer": 4, "hook": "mlp_out"}]}},
            "path.receivers[0].layer",
            "out of range",
        ),
        (
            {"path": {"receivers": [{"layer": 3, "hook": "mlp_out", "head": 0}]}},
            "path.receivers[0].head",
            "has no heads",
        ),
        (
            {"path": {"sender": {"layer": 0, "hook": "mlp_out", "head": 0}}},
            "path.sender.head",
            "has no heads",
        ),
        ({"path": TO_LOGITS | {"frozen": []}}, "path.frozen", "length >= 1"),
        ({"path": TO_LOGITS, "alpha": 0.5}, "alpha", "not valid with path"),
        ({"path": TO_LOGITS, "mask": "0"}, "mask", "not valid with path"),
        ({"path": {"sender": {"layer": 3, "hook": "mlp_out"}}}, "path", "is on the path"),
        (
            {
                "path": {"sender": {"layer": 0, "hook": "mlp_out"}},
                "axis": "neuron",
                "neurons": {"each": 1},
                "layers": "1-3",
            },
            "neurons",
            "first pass",
        ),
    ],
)
def test_what_is_no_path_is_refused_by_its_field(
    fields: dict[str, Any], field: str, words: str
) -> None:
    try:
        plan(pair(), info=INFO, hooks=["attn_out"], **fields)
    except msgspec.ValidationError as error:
        detail, at = misfit(error)
    except MidstreamError as refused:
        detail = refused.detail
        at = refused.field
    assert at == field
    assert words in detail


@pytest.mark.parametrize(
    ("asked", "fields", "words", "facts"),
    [
        (pair(), {"hooks": ["attn_out"]}, "", {"field": "path.frozen", "allowed": "attn"}),
        (
            ablated(),
            {"info": INFO, "ablation": "zeros", "metric": "logprob"},
            "",
            {"field": "ablation"},
        ),
        (pair(answer=" Paris the"), {"info": INFO}, "2 tokens", {"field": "pairs[0].answer"}),
    ],
)
def test_a_path_needs_its_branches_two_prompts_and_answers_of_one_token(
    asked: dict[str, Any], fields: dict[str, Any], words: str, facts: dict[str, str]
) -> None:
    with refuses(words, **facts):
        plan(asked, path=TO_LOGITS, **fields)

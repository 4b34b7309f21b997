"""Which requests does a sweep come to, and what is asked in each of them?"""

import msgspec
import pytest
from midstream_fake_engine.model import make_bundle, make_info, make_tokenizer
from refusal_kit import refuses

from midstream.schemas.jobs.jobs import Job, Sampling, StoredPrompt
from midstream.schemas.jobs.receipts import CapturedFile, Receipt
from midstream.schemas.jobs.works import NOTHING_MORE
from midstream.schemas.prompts.selectors import HOOKS
from midstream.schemas.requests.source_runs import ZEROS, parse_row
from midstream.schemas.requests.specs import columns_of, steering_rows
from midstream.schemas.settings.settings import Settings
from midstream.workers.engine.protocol import check_lengths
from midstream_lab.records.sweep_units import SweepWork, Units
from midstream_lab.records.sweeps import Column, PatchWindow, StoredPair, StoredSweep
from midstream_lab.run.requests import SweepRequests

BASE = [10, 11, 12, 13]
SOURCE = [20, 21, 22, 23, 24]
COLUMNS = [
    Column(label="a", places=[(0, 0)]),
    Column(label="b", places=[(1, 1), (2, 3)]),
    Column(label="c", places=[], reason="alone"),
    Column(label="d", places=[(3, 4)]),
]
PAIR = StoredPair(base=BASE, source=SOURCE, columns=COLUMNS, answer=[5], foil=[6])
TOKENIZER = make_tokenizer()
INFO = make_info(Settings(model="m"), TOKENIZER, make_bundle(TOKENIZER))


def sweep(**changes: object) -> StoredSweep:
    fields: dict[str, object] = {
        "pairs": [PAIR, PAIR],
        "hooks": ["post_block", "attn_out"],
        "layers": [0, 1, 3],
        "metric": "logit_diff",
        "direction": "denoise",
        "noise": 3,
    }
    return StoredSweep(**(fields | changes))  # type: ignore[arg-type]


def job_of(asked: StoredSweep | None, *prompts: list[int]) -> Job:
    return Job(
        id="job_1",
        kind="sweep" if asked else "generate",
        model="m",
        prompts=[StoredPrompt(token_ids=token_ids) for token_ids in prompts],
        sampling=Sampling(),
        created=0.0,
        work=SweepWork(sweep=asked).packed if asked else NOTHING_MORE,
    )


def asks(asked: StoredSweep, enters: bool = True) -> SweepRequests:
    return SweepRequests(job_of(asked), 2, INFO, enters)


def rows(
    asked: StoredSweep, hook: int, layer: int, column: int, node: int = 0
) -> list[tuple[str, list[int], list[int], str]]:
    """(hook, layers, positions, where the row is from) of each patch of a cell of the first
    pair.
    """
    made = asks(asked)
    unit = next(
        u for u in made.units.cells(0) if (u.hook, u.layer, u.column) == (hook, layer, column)
    )
    return [
        (e.hook, e.layers, list(e.positions), e.tensors[0])
        for e in made.patched(unit)[node].steering
    ]  # type: ignore[arg-type]


def test_units_and_requests_are_numbered_once_each() -> None:
    asked = sweep(
        pairs=[StoredPair(base=BASE, source=SOURCE, columns=COLUMNS, answer=[5, 7], foil=[6]), PAIR]
    )
    units = Units(asked)
    every = [
        unit
        for pair in range(2)
        for unit in (units.base(pair), units.source(pair), *units.noise(pair), *units.cells(pair))
    ]
    assert [unit.number for unit in sorted(every)] == list(range(2 * (2 + 3) + asked.num_cells))
    requests = [
        units.request(unit, node) for unit in every for node in range(len(units.nodes[unit.pair]))
    ]
    assert len(set(requests)) == len(requests)
    assert max(requests) < units.requests
    cells = {unit.number: unit for unit in every if unit.kind == "cell"}
    assert cells == {number: units.cell(number) for number in units.cell_numbers}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ablation": "zeros", "pairs": [StoredPair(base=BASE, source=[], columns=COLUMNS)]},
        {
            "pairs": [
                StoredPair(
                    base=BASE, source=SOURCE, columns=[COLUMNS[2]] * 4, answer=[5], foil=[6]
                ),
                PAIR,
            ]
        },
    ],
)
def test_a_sweep_counts_the_tokens_of_every_request_that_it_sends(
    changes: dict[str, object],
) -> None:
    answered = StoredPair(base=BASE, source=SOURCE, columns=COLUMNS, answer=[5, 7, 8], foil=[6])
    asked = sweep(**({"pairs": [answered, PAIR]} | changes))
    made = asks(asked)
    sent = []
    for pair in range(len(asked.pairs)):
        sent += made.control(made.units.base(pair))
        sent += made.control(made.units.source(pair)) if asked.ablation is None else []
        for unit in (*made.units.noise(pair), *made.units.cells(pair)):
            sent += made.patched(unit) if made.units.patched(unit)[1] else []
    assert made.units.tokens == sum(len(ask.token_ids) + ask.sampling.max_tokens for ask in sent)


def test_a_cell_is_patched_with_the_other_prompts_rows_at_the_aligned_positions() -> None:
    run = "run:job_1.1.source"
    assert rows(sweep(), 1, 2, 1) == [
        ("attn_out", [3], [1], f"{run}:attn_out:3:1"),
        ("attn_out", [3], [2], f"{run}:attn_out:3:3"),
    ]


def test_windows_are_clipped_at_the_ends() -> None:
    places = rows(sweep(window=PatchWindow(layers=2, positions=3)), 0, 0, 1)
    assert [(layers, positions) for _, layers, positions, _ in places] == [
        ([at], [to]) for to in (0, 1, 2) for at in (0, 1)
    ]


def test_an_ablation_needs_no_other_prompt() -> None:
    assert rows(sweep(ablation="zeros"), 0, 1, 1) == [("post_block", [1], [1, 2], ZEROS)]
    ((_, layers, positions, name),) = rows(sweep(ablation="mean"), 0, 1, 1)
    assert layers == [1]
    assert positions == [1, 2]
    assert parse_row(name) == ("job_1.0.base", "post_block", 1, None, ())
    made = asks(sweep(ablation="mean"))
    (capture,) = made.control(made.units.base(0))[0].captures
    assert capture.positions == "all_prompt"
    assert capture.sites["attn_out"] == [0, 1, 3]
    assert made.runs(0) == ["job_1.0.base"]


def test_noise_is_the_prompts_own_row_at_the_same_place() -> None:
    made = asks(sweep())
    for unit in made.units.noise(0):
        for entry in made.patched(unit)[0].steering:
            row = parse_row(entry.tensors[0])
            assert row.key == "job_1.0.base"
            assert row.hook == entry.hook
            assert [row.layer] == entry.layers
            assert [row.position] == entry.positions


def test_a_mask_and_an_alpha_are_part_of_every_patch() -> None:
    made = asks(sweep(mask="f" * 64, alpha=0.25))
    for unit in (made.units.noise(0)[0], next(made.units.cells(0))):
        entry, *_ = made.patched(unit)[0].steering
        assert entry.family == "replace_masked"
        assert entry.tensors[1] == "f" * 64
        assert entry.numbers == [0.25]


def test_a_forward_begins_at_the_lowest_layer_that_is_patched() -> None:
    made = asks(sweep())
    for unit in made.units.cells(0):
        if unit.column != 2:
            (ask,) = made.patched(unit)
            layer = made.units.patched(unit)[0][0]
            assert (ask.entry is None) == (layer == 0)
            assert ask.entry is None or (ask.entry.run, ask.entry.layer) == ("job_1.0.base", layer)
            assert ask.sampling.max_tokens == 1
    (base,) = made.control(made.units.base(0))
    assert base.captures[0].positions == "all_prompt"
    assert base.captures[0].sites["pre_attn"] == [1, 3]
    assert base.keep_blocks == "job_1.0.base"


def test_cells_reuse_the_bases_blocks_at_every_layer_with_or_without_entry() -> None:
    for enters in (True, False):
        made = asks(sweep(), enters=enters)
        (base,) = made.control(made.units.base(0))
        found = [
            ask
            for unit in (*made.units.noise(0), *made.units.cells(0))
            if unit.column != 2
            for ask in made.patched(unit)
        ]
        assert {ask.base for ask in found} == {base.keep_blocks} == {"job_1.0.base"}
        assert any(ask.entry is not None for ask in found) == enters
    made = SweepRequests(job_of(sweep()), 2, INFO, False, reuses=False)
    (base,) = made.control(made.units.base(0))
    assert base.keep_blocks == "" == made.patched(next(iter(made.units.cells(0))))[0].base


def test_without_entry_only_the_rows_that_are_needed_are_captured() -> None:
    made = asks(sweep(), enters=False)
    (base,) = made.control(made.units.base(0))
    (source,) = made.control(made.units.source(0))
    assert set(base.captures[0].sites) == {"post_block"}
    assert source.captures[0].sites == {"post_block": [0, 1, 3], "attn_out": [0, 1, 3]}
    assert source.captures[0].positions == [0, 1, 3, 4]
    assert source.token_ids == SOURCE
    assert source.captured == {"base": 2, "source": 2}


def test_an_answer_of_several_tokens_is_a_request_for_each_beginning_of_it() -> None:
    asked = sweep(
        pairs=[StoredPair(base=BASE, source=SOURCE, columns=COLUMNS, answer=[5, 7], foil=[5, 8])]
    )
    made = asks(asked)
    first, second = made.patched(next(u for u in made.units.cells(0) if u.layer == 1))
    assert first.token_ids == BASE
    assert second.token_ids == [*BASE, 5]
    assert first.grade.token_ids == [5]
    assert second.grade.token_ids == [7, 8]
    assert first.entry.run == "job_1.0.base", "each begins with the rows of its own tokens"
    assert second.entry.run == "job_1.1.base", "each begins with the rows of its own tokens"
    assert first.steering == second.steering
    assert made.runs(0) == ["job_1.0.base", "job_1.1.base", "job_1.2.source"]


def test_kl_compares_everything_with_the_clean_prompt() -> None:
    for changes, clean in (
        ({}, "source"),
        ({"direction": "noise"}, "base"),
        ({"ablation": "zeros"}, "base"),
    ):
        made = asks(sweep(metric="kl", **changes))
        grades = {
            unit.kind: made.control(unit)[0].grade
            for unit in (made.units.base(0), made.units.source(0))
        }
        grades["cell"] = made.patched(next(made.units.cells(0)))[0].grade
        for kind, grade in grades.items():
            assert (grade.keep, grade.against) == (
                ("job_1.2.0", "") if kind == clean else ("", "job_1.2.0")
            )


def test_the_files_of_a_run_are_those_of_its_request_and_tag() -> None:
    made = asks(sweep())

    def told(request: int, tag: str, pp: int) -> Receipt:
        file = CapturedFile(path=f"{tag}/{request}.{pp}", bytes=100, crc32=pp, rows=1, tag=tag)
        return Receipt(
            version="0",
            worker="w",
            boot="b",
            job="job_1",
            request=request,
            attempt=1,
            rank=pp,
            world=2,
            tp=0,
            pp=pp,
            step=1,
            actions=0,
            checksum="0",
            status="ok",
            files=[file],
        )

    receipts = [
        told(request, tag, pp) for request, tag in ((0, "base"), (1, "source")) for pp in range(2)
    ]
    files = made.files(0, "job_1.1.source", receipts)
    assert [file.path for file in files.files] == ["source/1.0", "source/1.1"]
    assert files.positions == [0, 1, 3, 4]
    assert files.hidden_size == INFO.hidden_size
    assert files.bytes == 200
    assert files.sites == {"post_block": [0, 1, 3], "attn_out": [0, 1, 3]}


def test_a_cell_of_any_span_and_window_takes_one_place_of_a_token() -> None:
    made = asks(sweep(window=PatchWindow(layers=3, positions=4), hooks=list(HOOKS)))
    for unit in made.units.cells(0):
        if unit.column != 2:
            assert set(columns_of(steering_rows(made.patched(unit)[0].steering))) == {0}


def test_a_sweep_or_prompt_longer_than_this_worker_takes_is_refused_by_its_field() -> None:
    """Its job was accepted for a larger `max_model_len`, which also has room for one token that is
    generated.
    """
    long_answer = msgspec.structs.replace(PAIR, foil=[6, 7, 8])  # asked behind its first two tokens
    cases = [
        (job_of(sweep()), 5),
        (job_of(sweep(pairs=[long_answer])), 7),
        (job_of(None, SOURCE), 5),
    ]
    for asked, tokens in cases:
        check_lengths(asked, msgspec.structs.replace(INFO, max_model_len=tokens + 1))
        with refuses(
            f"has {tokens} tokens, which leaves no room to generate",
            kind="prompt_too_long",
            field="pairs[0]" if asked.kind == "sweep" else "prompts[0]",
        ):
            check_lengths(asked, msgspec.structs.replace(INFO, max_model_len=tokens))

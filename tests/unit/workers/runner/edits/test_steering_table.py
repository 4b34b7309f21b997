"""Does a rank's steering table hold what requests ask for: the right family at the right place, in
the order that is documented?
"""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from capture_kit import source_run, values
from hypothesis import given, settings, strategies as st
from rank_kit import HIDDEN, Rank, Request, make_buffers, steering, stream_of
from torch.utils._python_dispatch import TorchDispatchMode

from midstream.schemas.requests.interventions import FAMILIES, PLACE, SCALARS, OpFamily
from midstream.schemas.requests.source_runs import ZEROS, RunRow, row_name
from midstream.schemas.requests.specs import ONES, StoredSteering, steering_digest, steering_rows
from midstream.workers.runner.edits.vector_pool import EntryPool, JoinedRow, crc32_of, joined

RNG = np.random.default_rng(7)
V, W = RNG.normal(size=(2, HIDDEN)).astype(np.float32)
UNIT = V / np.linalg.norm(V)
R, M = RNG.normal(size=(2, 2, HIDDEN)).astype(np.float32)
B = RNG.normal(size=2).astype(np.float32)
MASK = np.array([1, 0, 0, 1, 0], dtype=np.float32)


def with_feature(s: np.ndarray) -> np.ndarray:
    reading = s @ (V + R[0] + R[1]) - 0.1
    activation = np.where(reading > 0.2, reading, 0)
    return s + 0.5 * (2.0 - activation)[:, None] * UNIT


#: Family → (its numbers, what it makes of rows `[n, HIDDEN]`); the vector is V.
FORMULAS: dict[OpFamily, tuple[list[float], Any]] = {
    "replace": ([0.25], lambda s: 0.75 * s + 0.25 * V),
    "replace_masked": ([0.25], lambda s: np.where(MASK == 1, 0.75 * s + 0.25 * V, s)),
    "lowrank": ([0.5], lambda s: s + 0.5 * (s @ M.T + B - s @ R.T) @ R),
    "add": ([], lambda s: s + V),
    "add_matched": ([0.1], lambda s: s + 0.1 * np.linalg.norm(s, axis=-1, keepdims=True) * UNIT),
    "ablate": ([1.0], lambda s: s - (s @ UNIT)[:, None] * UNIT),
    "feature": ([0.5, 2.0, -0.1, 0.2, 0.0], with_feature),
    "clamp": (
        [1.0, -2.0, 3.0],
        lambda s: s + (np.clip(s @ UNIT, -2, 3) - s @ UNIT)[:, None] * UNIT,
    ),
}


def entry(
    rank: Rank,
    family: OpFamily,
    *,
    hook: str = "pre_attn",
    positions: Any = "all",
    layers: Sequence[int] = (0,),
) -> StoredSteering:
    named = {"lowrank": (R, M, B), "replace_masked": (V, MASK), "feature": (V, R[0], R[1], UNIT)}
    return steering(
        [rank.vector(each) for each in named.get(family, (V,))],
        list(layers),
        hook,
        positions,
        family,
        FORMULAS[family][0],
        rank=2 if family == "lowrank" else 0,
    )


def left(rank: Rank, edits: Sequence[StoredSteering], hook: str = "pre_attn") -> np.ndarray:
    """What leaves the site of layer 0 for six tokens of a request with these edits."""
    rank.step((rank.admit(Request(1, 6, 7, (), edits)), 0, 6))
    return rank.left[hook, 0]


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    return bool(np.allclose(found, wanted, rtol=1e-5, atol=1e-4))


@pytest.mark.parametrize("hook", ["pre_attn", "attn_out"])
@pytest.mark.parametrize("family", FORMULAS)
def test_families_apply_their_formula(family: OpFamily, hook: str) -> None:
    rank = Rank()
    stream = stream_of(1, hook, 0, 0, 6)
    wanted = stream.copy()
    wanted[[2, 4]] = FORMULAS[family][1](stream[[2, 4]])
    assert same(left(rank, [entry(rank, family, hook=hook, positions=[2, 4])], hook), wanted)
    assert not same(wanted, stream)
    assert (rank.left[hook, 1] == stream_of(1, hook, 1, 0, 6)).all(), (
        "the other layer is left alone"
    )


@pytest.mark.parametrize("seed", range(3))
def test_families_are_applied_in_the_documented_order_whatever_the_given_order(seed: int) -> None:
    rank = Rank()
    families = [family.name for family in FAMILIES]
    written = np.random.default_rng(seed).permutation(families).tolist()
    wanted = stream_of(1, "pre_attn", 0, 0, 6)
    for family in families:
        wanted = FORMULAS[family][1](wanted)  # type: ignore[index]
    edits = [entry(rank, family) for family in written]
    assert len(steering_rows(edits)) == 1, "equal positions, one row"
    assert same(left(rank, edits), wanted)


@pytest.mark.parametrize(
    "family", ["add_matched", "ablate", "clamp", "lowrank", "replace", "replace_masked"]
)
def test_one_family_applies_in_the_order_written(family: OpFamily) -> None:
    rank = Rank()
    first = entry(rank, family)
    second = entry(rank, family, positions=[1, 2])
    formula = FORMULAS[family][1]
    once = formula(stream_of(1, "pre_attn", 0, 0, 6))
    twice = formula(formula(stream_of(1, "pre_attn", 0, 0, 6)))
    wanted = np.where(np.isin(np.arange(6), [1, 2])[:, None], twice, once)
    assert same(left(rank, [first, second]), wanted)


#: A patch: of these dimensions or (None) all, what is written, how much of it, where.
PATCHES = st.lists(
    st.tuples(
        st.one_of(
            st.none(), st.lists(st.sampled_from([0.0, 1.0]), min_size=HIDDEN, max_size=HIDDEN)
        ),
        st.sampled_from([-2.0, 0.5, 8.0]),
        st.sampled_from([0.0, 0.5, 1.0]),
        st.one_of(
            st.sampled_from(["all", "all_prompt", "last_prompt"]),
            st.sets(st.integers(0, 5), min_size=1, max_size=3).map(sorted),
        ),
    ),
    max_size=6,
)


@settings(max_examples=50, deadline=None)
@given(PATCHES)
def test_replacements_masked_or_not_are_applied_in_the_order_written(patches: list[Any]) -> None:
    """Though to the ranks they are two families, whatever columns and rows they get."""
    rank = Rank()
    edits = []
    wanted = stream_of(1, "pre_attn", 0, 0, 6)
    for mask, value, alpha, positions in patches:
        target = np.full(HIDDEN, value, dtype=np.float32)
        tensors = [rank.vector(target)] + ([] if mask is None else [rank.vector(np.array(mask))])
        edits.append(
            steering(
                tensors,
                [0],
                "pre_attn",
                positions,
                "replace" if mask is None else "replace_masked",
                [alpha],
            )
        )
        chosen = (
            {"all": range(6), "all_prompt": range(6), "last_prompt": [5]}[positions]
            if isinstance(positions, str)
            else positions
        )
        here = np.isin(np.arange(6), list(chosen))[:, None] & (
            np.ones(HIDDEN) if mask is None else np.array(mask)
        ).astype(bool)
        wanted = np.where(here, (1 - alpha) * wanted + alpha * target, wanted)
    assert same(left(rank, edits), wanted)


FULL = ("replace", ["v"])
MASKED = ("replace_masked", ["v", "m"])
ALL_OF = ("replace_masked", ["v", ONES])


@pytest.mark.parametrize(
    ("written", "rows"),
    [
        ([("replace", 0), ("replace_masked", 0)], [[FULL, MASKED]]),
        ([("replace_masked", 0), ("replace", 1)], [[MASKED, FULL]]),
        ([("replace_masked", 0), ("replace", 0)], [[MASKED], [ALL_OF]]),
        ([("replace", 0), ("replace_masked", 0), ("replace", 0)], [[FULL, MASKED], [ALL_OF]]),
        ([("replace_masked", 0), *[("replace", 0)] * 20], [[MASKED], [ALL_OF] * 20]),
    ],
)
def test_a_full_replacement_after_a_masked_one_at_a_site_gets_a_full_mask(
    written: list[tuple[OpFamily, int]], rows: list[list[tuple[OpFamily, list[str]]]]
) -> None:
    edits = [
        steering(["v", "m"] if family == "replace_masked" else "v", [layer], family=family)
        for family, layer in written
    ]
    assert [[(e.family, e.tensors) for e in row.entries] for row in steering_rows(edits)] == rows


# -- rows of source runs
# --------------------------------------------------------------------------------------------------

RUN_SITES = {"pre_attn": [0, 1], "mlp_out": [1]}


def run_row(hook: str, layer: int, position: int | None, mean: Sequence[int] = ()) -> str:
    return row_name(RunRow("job_s.0.tag", hook, layer, position, tuple(mean)))  # type: ignore[arg-type]


def test_a_patch_writes_the_row_of_a_run_its_mean_or_zeros(tmp_path: Path) -> None:
    rank = Rank(runs_root=tmp_path)
    rank.runs.put(source_run(tmp_path, RUN_SITES, range(6)))
    edits = [
        steering(run_row("pre_attn", 0, 4), [0], "pre_attn", [1], "replace"),
        steering(run_row("mlp_out", 1, 4), [0], "pre_attn", [2], "replace"),
        steering(run_row("pre_attn", 0, None, [1, 3]), [0], "pre_attn", [3], "replace"),
        steering(ZEROS, [0], "pre_attn", [4], "replace"),
        steering(
            [run_row("pre_attn", 0, 0), rank.vector(MASK)], [0], "pre_attn", [5], "replace_masked"
        ),
    ]
    found = left(rank, edits)
    stream = stream_of(1, "pre_attn", 0, 0, 6)
    assert found[0].tolist() == stream[0].tolist()
    assert found[1].tolist() == values("pre_attn", 0, [4])[0].tolist()
    assert found[2].tolist() == values("mlp_out", 1, [4])[0].tolist(), (
        "whatever site it is written to"
    )
    assert found[3].tolist() == values("pre_attn", 0, [1, 3]).mean(0).tolist()
    assert found[4].tolist() == [0.0] * HIDDEN
    assert (
        found[5].tolist() == np.where(MASK == 1, values("pre_attn", 0, [0])[0], stream[5]).tolist()
    )


def test_only_entries_with_a_local_site_are_resolved(tmp_path: Path) -> None:
    """A row of another stage's layer is on that stage's ranks alone."""
    rank = Rank(layers=2, runs_root=tmp_path)
    rank.runs.put(source_run(tmp_path, {"pre_attn": [0, 1, 2, 3]}, range(3)))
    elsewhere = steering(run_row("pre_attn", 3, 1), [3], "pre_attn", [1], "replace")
    here = steering(run_row("pre_attn", 1, 1), [1], "pre_attn", [1], "replace")
    rank.step((rank.admit(Request(1, 6, 7, (), [elsewhere, here])), 0, 6))
    assert rank.left["pre_attn", 1][1].tolist() == values("pre_attn", 1, [1])[0].tolist()
    with pytest.raises(
        LookupError, match="no rows of pre_attn of layer 3, which is not on this rank"
    ):
        rank.table.acquire(
            steering_rows([steering(run_row("pre_attn", 3, 1), [1], "pre_attn", [1], "replace")])[0]
        )


# field case 31
def test_a_row_of_a_run_that_is_gone_is_refused_and_takes_nothing(tmp_path: Path) -> None:
    rank = Rank(runs_root=tmp_path)
    run = source_run(tmp_path, RUN_SITES, range(6))
    rank.runs.put(run)
    edits = [
        steering(rank.vector(V), [0], "pre_attn"),
        steering(run_row("pre_attn", 0, 1), [0], "pre_attn", [1], "replace"),
    ]
    held = rank.admit(Request(1, 6, 7, (), edits))
    rank.runs.drop([run.key])
    rank.step((held, 0, 6))
    assert rank.left["pre_attn", 0][1].tolist() == (values("pre_attn", 0, [1])[0] + V).tolist(), (
        "whoever has its row keeps it"
    )
    before = rank.table.used, rank.table.entries_used
    with pytest.raises(LookupError, match=r"source run job_s\.0\.tag is not on this rank"):
        rank.table.acquire(
            steering_rows([steering(run_row("pre_attn", 0, 2), [0], "pre_attn", [1], "replace")])[0]
        )
    assert (rank.table.used, rank.table.entries_used) == before


@pytest.mark.parametrize(
    ("written", "rows"),
    [
        (
            [("ablate", "all", 0), ("add", "all", 0), ("ablate", "all", 1)],
            [["ablate", "add", "ablate"]],
        ),
        ([("ablate", "all", 0), ("ablate", "all", 0)], [["ablate"], ["ablate"]]),
        (
            [("ablate", "all", 0), ("ablate", [1], 0), ("add", "all", 0)],
            [["ablate", "add"], ["ablate"]],
        ),
        (
            [("clamp", "all", 0), ("clamp", "all", 0), ("ablate", "all", 0)],
            [["clamp"], ["clamp", "ablate"]],
        ),
        (
            [("replace", "all", 0), ("replace", "all", 0), ("replace", [1], 0)],
            [["replace", "replace"], ["replace"]],
        ),
        (
            [("replace", "all", 0), ("replace", [1], 0), ("replace", "all", 0)],
            [["replace"], ["replace"], ["replace"]],
        ),
        ([("add", "all", 0), ("add", [1], 0), ("add", "all", 0)], [["add", "add"], ["add"]]),
    ],
)
def test_entries_take_a_row_of_their_own_only_where_order_needs_it(
    written: list[tuple[OpFamily, Any, int]], rows: list[list[OpFamily]]
) -> None:
    edits = [
        steering("v", [layer], "pre_attn", positions, family)
        for family, positions, layer in written
    ]
    assert [[e.family for e in row.entries] for row in steering_rows(edits)] == rows


def test_a_row_counts_the_entries_that_the_table_gives_it() -> None:
    rank = Rank()
    edits = [
        entry(rank, "lowrank", layers=[0, 1]),
        entry(rank, "add", layers=[0, 1]),
        entry(rank, "add", layers=[1]),
        entry(rank, "clamp", hook="mlp_out"),
    ]
    (row,) = rank.rows(rank.admit(Request(1, 2, 3, (), edits)))
    assert rank.table.entries_used == row.num_vectors == 4 + 2 + 1


def test_entries_that_meet_at_many_sites_are_joined_once() -> None:  # field case 44
    rank = Rank(layers=8)
    edits = [
        entry(rank, "add", layers=range(8)),
        entry(rank, "add", layers=range(8)),
        entry(rank, "add", layers=range(2, 8)),
        entry(rank, "add", layers=[1]),
    ]
    (row,) = steering_rows(edits)
    content = rank.table.content(row)
    assert len({id(held) for held in content.values()}) == 3, "layer 0, layer 1, the others"
    rank.table.acquire(row)
    assert rank.table.entries_used == row.num_vectors == 3, "and written once"
    found = [vectors[0].numpy() for _, (vectors, _) in sorted(content.items())]
    assert np.allclose(found, [2 * V] + [3 * V] * 7)


def test_row_keys_and_digests_cover_what_affects_the_result() -> None:
    base = steering(["v"], [0], "pre_attn", "all", "clamp", [1.0, 0.0, 1.0])
    others = [
        steering(["v"], [0], "pre_attn", "all", "clamp", [1.0, 0.0, 2.0]),
        steering(["u"], [0], "pre_attn", "all", "clamp", [1.0, 0.0, 1.0]),
        steering(["v"], [0], "pre_attn", "all", "replace", [1.0]),
        steering(["v"], [0], "pre_attn", "all", "ablate", [1.0]),
        steering(["v"], [0], "pre_attn", "all", "replace", [1.0], scale=2.0),
        steering(["v"], [1], "pre_attn", "all", "clamp", [1.0, 0.0, 1.0]),
        steering(["v"], [0], "post_attn", "all", "clamp", [1.0, 0.0, 1.0]),
    ]
    assert len({steering_rows([each])[0].key for each in (base, *others)}) == 8
    assert len({steering_digest([each]) for each in (base, *others)}) == 8
    elsewhere = steering(["v"], [0], "pre_attn", [1], "clamp", [1.0, 0.0, 1.0])
    assert steering_rows([elsewhere])[0].key == steering_rows([base])[0].key, (
        "where it is applied is not the row's"
    )
    assert steering_digest([elsewhere]) != steering_digest([base])


@pytest.mark.parametrize(
    ("family", "tensors", "words"),
    [
        ("add", [V[:3]], r"its shape is \[3\]; \[5\] is needed"),
        ("lowrank", [R, M[:1], B], r"its shape is \[1, 5\]; \[2, 5\] is needed"),
        ("lowrank", [R, M, B[:1]], r"its shape is \[1\]; \[2\] is needed"),
        ("ablate", [0 * V], "must have a finite norm"),
        ("add", [np.full(HIDDEN, 3e38)], "exceeds the range"),
    ],
)
def test_unapplicable_configurations_are_refused_and_take_no_row(
    family: OpFamily, tensors: list[np.ndarray], words: str
) -> None:
    rank = Rank()
    names = [rank.vector(values) for values in tensors]
    rank_of = 2 if family == "lowrank" else 0
    with pytest.raises(ValueError, match=words):
        rank.admit(
            Request(
                1,
                2,
                3,
                (),
                [steering(names, [0, 1], "pre_attn", "all", family, scale=2.0, rank=rank_of)],
            )
        )
    assert rank.table.used == 0
    assert rank.table.entries_used == 0
    assert not rank.buffers.site_rows.any()


def test_a_full_table_refuses_and_changes_nothing() -> None:
    rank = Rank()
    rank.admit(
        Request(
            1,
            2,
            3,
            (),
            [
                entry(rank, "lowrank", hook=hook, layers=[0, 1])
                for hook in ("pre_attn", "mlp_in", "mlp_out")
            ],
        )
    )
    before = [
        tensor.clone()
        for tensor in (rank.buffers.pool, rank.buffers.scalars, rank.buffers.site_rows)
    ]
    wide = rank.vector(RNG.normal(size=(27, HIDDEN)))
    with pytest.raises(RuntimeError, match="54 steering entries needed, 52 of 64 free"):
        rank.admit(
            Request(
                2,
                2,
                3,
                (),
                [
                    steering(
                        [wide, wide, rank.vector(np.ones(27))],
                        [0, 1],
                        "post_block",
                        "all",
                        "lowrank",
                        rank=27,
                    )
                ],
            )
        )
    assert rank.table.used == 1
    for tensor, was in zip(
        (rank.buffers.pool, rank.buffers.scalars, rank.buffers.site_rows), before, strict=True
    ):
        assert torch.equal(tensor, was)


# -- the pool
# --------------------------------------------------------------------------------------------------

CAPACITY = 24
ROWS = 6
SITES = 3
#: A row: its runs' lengths, by (site, family).
A_ROW = st.dictionaries(
    st.tuples(st.integers(0, SITES - 1), st.integers(0, len(FAMILIES) - 1)),
    st.integers(1, 8),
    max_size=5,
)
#: What happens: that row is written, or (None) erased.
HISTORY = st.lists(st.tuples(st.integers(1, ROWS), st.one_of(st.none(), A_ROW)), max_size=40)


@settings(max_examples=80, deadline=None)
@given(HISTORY)
def test_rows_added_and_removed_in_any_order_fit_and_keep_their_content(history: list[Any]) -> None:
    buffers = make_buffers(SITES, capacity=1, configurations=ROWS, entries=CAPACITY)
    pool = EntryPool(buffers)
    held: dict[int, Any] = {}
    for number, (row, shape) in enumerate(history):
        if row in held:
            pool.erase(row)
            del held[row]
        if shape is None:
            continue
        content: dict[tuple[int, int], Any] = {}
        shared: dict[int, Any] = {}  # places that hold an even number of entries hold the same ones
        for place, count in shape.items():
            alone = (
                torch.full((count, HIDDEN), 1.0 + number)
                + torch.arange(count)[:, None] / 16
                + place[0] / 4,
                torch.full((count, SCALARS), 100.0 * number + place[1]),
            )
            content[place] = alone if count % 2 else shared.setdefault(count, alone)
        free = CAPACITY - sum(map(entries_of, held.values()))
        if entries_of(content) > free:
            with pytest.raises(RuntimeError, match=f"{free} of {CAPACITY} free"):
                pool.write(row, joined(content, HIDDEN, torch.float32, pinned=False))
        else:
            pool.write(row, joined(content, HIDDEN, torch.float32, pinned=False))
            held[row] = content
        check(pool, buffers, held)
    for row in list(held):
        pool.erase(row)
        del held[row]
        check(pool, buffers, held)
    assert not any(tensor.any() for tensor in (buffers.pool, buffers.scalars, buffers.site_rows))


def entries_of(content: dict[tuple[int, int], Any]) -> int:
    return sum(
        len(vectors) for vectors, _ in {id(what): what for what in content.values()}.values()
    )


def check(pool: EntryPool, buffers: Any, held: dict[int, Any]) -> None:
    """Each row's runs are where its sites are told, only places of a row that hold the same share
    entries, everything else is zero.
    """
    mine = torch.zeros(1 + CAPACITY, dtype=torch.bool)
    named = torch.zeros_like(buffers.site_rows, dtype=torch.bool)
    for row, content in held.items():
        lies: dict[int, int] = {}
        for (site, family), what in content.items():
            vectors, scalars = what
            first = int(buffers.site_rows[site, family, row])
            run = slice(first, first + len(vectors))
            assert first > 0
            assert lies.setdefault(id(what), first) == first
            named[site, family, row] = True
        for what in {id(what): what for what in content.values()}.values():
            vectors, scalars = what
            run = slice(lies[id(what)], lies[id(what)] + len(vectors))
            assert not mine[run].any()
            mine[run] = True
            assert torch.equal(buffers.pool[run], vectors)
            assert torch.equal(buffers.scalars[run], scalars)
    assert pool.used == int(mine.sum())
    assert not buffers.pool[~mine].any()
    assert not buffers.scalars[~mine].any()
    assert not buffers.site_rows[~named].any()


def run_of(number: int, entries: int) -> JoinedRow:
    """A row with one run of entries, each of which has this number."""
    vectors = torch.full((entries, HIDDEN), float(number))
    scalars = torch.zeros(entries, SCALARS)
    content = {(0, PLACE["lowrank"]): (vectors, scalars)}
    return joined(content, HIDDEN, torch.float32, pinned=False)


def begins_at(buffers: Any, row: int) -> int:
    return int(buffers.site_rows[0, PLACE["lowrank"], row])


def test_a_gap_is_filled_and_closed_only_when_a_row_fits_nowhere() -> None:
    buffers = make_buffers(SITES, capacity=1, configurations=ROWS, entries=CAPACITY)
    pool = EntryPool(buffers)
    third = CAPACITY // 3
    for row in (1, 2, 3):
        pool.write(row, run_of(row, third))
    pool.erase(2)
    pool.write(4, run_of(4, 1))
    assert begins_at(buffers, 4) == 1 + third, "in the gap"
    assert begins_at(buffers, 3) == 1 + 2 * third, "not moved"
    pool.erase(1)
    pool.write(5, run_of(5, third + 1))
    assert [begins_at(buffers, row) for row in (3, 4, 5)] == [1, 1 + third, 2 + third]


class Operations(TorchDispatchMode):
    """Counts the operations on tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("entries", [3, 2], ids=["a gap fits", "no gap fits"])
def test_a_row_is_written_to_a_full_pool_in_as_few_operations_as_to_an_empty_one(
    entries: int,
) -> None:
    """On an accelerator each is a launch, for which all requests wait."""
    counts = []
    for rows in (4, 200):
        buffers = make_buffers(SITES, capacity=1, configurations=rows + 2, entries=entries * rows)
        pool = EntryPool(buffers)
        for row in range(1, rows + 1):
            pool.write(row, run_of(row, entries))
        for row in range(1, rows, 2):
            pool.erase(row)
        with Operations() as operations:
            pool.write(rows + 1, run_of(0, 3))
        counts.append(operations.count)
    assert counts[0] == counts[1]


NUMBERS = torch.arange(24, dtype=torch.int32).view(2, 3, 4)
HALVES = NUMBERS.to(torch.bfloat16)


@pytest.mark.parametrize(
    ("tensors", "content"),
    [
        ([NUMBERS[:, :, 1]], NUMBERS[:, :, 1].numpy().tobytes()),
        ([NUMBERS[:1, :1, 1]], NUMBERS[:1, :1, 1].numpy().tobytes()),
        ([NUMBERS[:0, :, 1]], b""),  # of a stage without a layer
        ([HALVES[0], HALVES[1]], HALVES.view(torch.int16).numpy().tobytes()),
    ],
)
def test_fingerprints_cover_any_dtype_and_strides(
    tensors: list[torch.Tensor], content: bytes
) -> None:
    assert crc32_of(*tensors) == zlib.crc32(content)

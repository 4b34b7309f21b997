"""Do a sweep's records become the grids that were asked for, quickly, and with a reason for every
hole?
"""

import time

import pytest
from wait_kit import warn_if_late

from midstream.schemas.base.records import to_json
from midstream_lab.records.sweep_units import Units
from midstream_lab.records.sweeps import Column, StoredPair, StoredSweep, UnitRecord
from midstream_lab.results.sweep_result import sweep_result, sweep_start, sweep_summary

SKIPPED = Column(label="x", places=[], reason="it stands alone")


def pair(columns: int = 3) -> StoredPair:
    places = [
        Column(label=f"t{place}", places=[(place, place + 1)]) for place in range(columns - 1)
    ]
    return StoredPair(
        base=[1] * 9,
        source=[2] * 9,
        columns=[*places, SKIPPED],
        answer=[5],
        foil=[6],
        notes=["shifted by one"],
    )


def sweep(pairs: int = 2, **changes: object) -> StoredSweep:
    fields: dict[str, object] = {
        "pairs": [pair()] * pairs,
        "hooks": ["post_block", "attn_out"],
        "layers": [3, 5],
        "metric": "recovered",
        "direction": "denoise",
        "noise": 2,
    }
    return StoredSweep(**(fields | changes))  # type: ignore[arg-type]


def records(
    asked: StoredSweep, values: dict[tuple[int, int, int, int], float | str]
) -> dict[int, UnitRecord]:
    """`values`: (pair, hook, layer, column), as indices → its value, or why it has none."""
    units = Units(asked)
    found = {}
    for number in range(len(asked.pairs)):
        for unit in units.cells(number):
            value = values.get((unit.pair, unit.hook, unit.layer, unit.column))
            if value is not None:
                known = {"reason": value} if isinstance(value, str) else {"value": value}
                found[unit.number] = UnitRecord(unit=unit.number, **known)  # type: ignore[arg-type]
    return found


def test_grids_hold_values_in_place_and_null_elsewhere() -> None:
    asked = sweep()
    result = sweep_result(asked, records(asked, {(0, 0, 1, 0): 0.5, (1, 1, 0, 1): -2.0}), None)
    assert result.pairs[0].grids == {
        "post_block": [[None] * 3, [0.5, None, None]],
        "attn_out": [[None] * 3, [None] * 3],
    }
    assert result.pairs[1].grids["attn_out"] == [[None, -2.0, None], [None] * 3]
    assert result.pairs[0].labels == ["t0", "t1", "x"]
    assert result.pairs[0].positions == [[0], [1], []]
    assert result.pairs[0].notes == ["shifted by one"]


@pytest.mark.parametrize(
    ("direction", "base", "source", "down"),
    [
        ("denoise", -5.97, -7.28, True),
        ("denoise", -7.28, -5.97, False),
        ("noise", -7.28, -5.97, True),
        ("noise", -5.97, -7.28, False),
    ],
)
def test_shares_of_a_way_down_have_a_note(
    direction: str, base: float, source: float, down: bool
) -> None:
    asked = sweep(pairs=1, direction=direction)
    units = Units(asked)
    known = {
        unit.number: UnitRecord(unit=unit.number, value=value)
        for unit, value in ((units.base(0), base), (units.source(0), source))
    }
    note = (
        "the clean prompt favours the answer less than the corrupt one: a share of 1 is as "
        "unlikely an answer as after the clean prompt"
    )
    noted = sweep_result(asked, known, None).pairs[0].notes
    assert noted == (["shifted by one", note] if down else ["shifted by one"])


def test_mean_and_spread_are_over_the_pairs_that_have_a_value_there() -> None:
    asked = sweep(pairs=3)
    found = records(
        asked, {(0, 0, 0, 0): 1.0, (1, 0, 0, 0): 2.0, (2, 0, 0, 0): 6.0, (1, 0, 0, 1): 4.0}
    )
    result = sweep_result(asked, found, None)
    assert result.mean["post_block"][0] == [3.0, 4.0, None]
    assert result.spread["post_block"][0] == [pytest.approx(7**0.5), None, None]


def test_missing_cells_are_grouped_by_reason() -> None:
    asked = sweep(pairs=1)
    found = records(
        asked,
        {
            (0, 0, 0, 2): "alone",
            (0, 0, 1, 2): "alone",
            (0, 1, 0, 2): "alone",
            (0, 1, 1, 2): "lost",
            (0, 0, 0, 0): 1.0,
        },
    )
    skipped = [
        (hole.hook, hole.layers, hole.column, hole.reason)
        for hole in sweep_result(asked, found, None).skipped
    ]
    assert skipped == [
        ("post_block", [3, 5], 2, "alone"),
        ("attn_out", [3], 2, "alone"),
        ("attn_out", [5], 2, "lost"),
    ]


def test_the_summary_counts_cells_and_tells_baselines_and_noise() -> None:
    asked = sweep(pairs=1)
    units = Units(asked)
    found = records(asked, {(0, 0, 0, 2): "alone", (0, 0, 0, 0): 1.0})
    base = UnitRecord(unit=units.base(0).number, value=-4.0, logprob=-5.0, foil_logprob=-1.0)
    noise = {
        unit.number: UnitRecord(unit=unit.number, value=value)
        for unit, value in zip(units.noise(0), (0.01, -0.02), strict=True)
    }
    found |= {base.unit: base} | noise
    summary = sweep_summary(asked, found, 2.5)
    assert summary.cells == 1
    assert summary.skipped == 1
    assert summary.total == 12
    assert summary.seconds == 2.5
    assert summary.base == [-4.0]
    assert summary.source == [None]
    assert summary.noise_floor == [0.02]
    result = sweep_result(asked, found, 2.5)
    assert result.pairs[0].base.logprob == -5.0
    assert result.pairs[0].source is None


def test_cells_skipped_in_advance_are_in_the_start_event() -> None:
    start = sweep_start(sweep(pairs=1))
    assert start.total == 12
    assert [(hole.hook, hole.layers, hole.column, hole.reason) for hole in start.skipped] == [
        ("post_block", [3, 5], 2, "it stands alone"),
        ("attn_out", [3, 5], 2, "it stands alone"),
    ]


def test_twenty_thousand_cells_are_assembled_in_one_pass() -> None:
    asked = sweep(pairs=2, layers=list(range(50)))
    asked = StoredSweep(
        **{name: getattr(asked, name) for name in asked.__struct_fields__}
        | {"pairs": [pair(100)] * 2}
    )
    assert asked.num_cells == 20_000
    first = Units(asked).first_cell
    found = {
        first + number: UnitRecord(unit=first + number, value=float(number))
        for number in range(asked.num_cells)
    }
    began = time.process_time()
    encoded = to_json(sweep_result(asked, found, 1.0))
    warn_if_late(time.process_time() - began, 3, "0.014 were measured")
    assert len(encoded) > 100_000

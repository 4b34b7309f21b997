"""Banks on ranks that hold columns of the rows: what they write, and what they account for."""

from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from rank_kit import make_buffers

from midstream.kernels.plan import COLUMNS
from midstream.schemas.base.tensors import content_hash, from_numpy
from midstream.schemas.model.banks import RowShape
from midstream.schemas.requests.interventions import PLACE
from midstream.schemas.requests.specs import (
    PROBED,
    StoredCapture,
    StoredSteering,
    columns_of,
    steering_rows,
)
from midstream.storage.store import open_store
from midstream.workers.runner.edits.source_runs import RunStore
from midstream.workers.runner.edits.steering_tables import RowTable, VectorStore
from midstream.workers.runner.files.finished_rows import BankColumns
from midstream.workers.runner.hooks.sites import RankSite
from midstream.workers.runner.rows.banks import Bank
from midstream.workers.runner.rows.capture import Ports, Recording

#: Two ranks, each with one head of five numbers: `make_buffers` has rows of five.
SHAPE = RowShape(heads=2, width=5)
RANKS = [BankColumns(SHAPE, 0, 5), BankColumns(SHAPE, 5, 10)]
SITES = [RankSite("z", layer, "single") for layer in range(2)]
VECTOR = np.arange(1, 11, dtype=np.float32)
SECOND = np.where(np.arange(10) < 5, 0, VECTOR).astype(np.float32)


def tables(*vectors: np.ndarray) -> tuple[list[RowTable], list[str]]:
    """One for each rank, with these vectors; and their names."""
    held = VectorStore()
    tensors = [from_numpy(vector) for vector in vectors]
    held.put({content_hash(tensor): tensor for tensor in tensors})
    made = []
    for columns in RANKS:
        buffers = make_buffers(len(SITES), capacity=8)
        assert buffers.plan.shape[1] == COLUMNS
        made.append(
            RowTable(
                SITES, buffers, held, RunStore(open_store("/nowhere"), SITES, 5), columns=columns
            )
        )
    return made, [content_hash(tensor) for tensor in tensors]


def entry(name: str, family: str = "add", hook: str = "z", **more: object) -> StoredSteering:
    return StoredSteering(
        layers=[1], hook=hook, positions="all", family=family, tensors=[name], **more
    )  # type: ignore[arg-type]


def pool(table: RowTable, row: int, family: str = "add") -> torch.Tensor:
    """What site 1 finds of the row."""
    buffers = table._buffers
    return buffers.pool[int(buffers.site_rows[1, PLACE[family], row])]


def test_ranks_write_their_columns_and_account_for_whole_rows() -> None:
    ranks, (name,) = tables(VECTOR)
    (row,) = steering_rows([entry(name, scale=2.0)])
    written = [table.acquire(row) for table in ranks]
    assert written[0] == written[1], "the same row, and the same checksum"
    assert [pool(table, written[0][0]).tolist() for table in ranks] == [
        (2 * VECTOR[:5]).tolist(), (2 * VECTOR[5:]).tolist(),
    ]  # fmt: skip
    assert ranks[0].fingerprint() == ranks[1].fingerprint()
    pool(ranks[1], written[0][0])[2] += 1
    assert ranks[0].fingerprint() != ranks[1].fingerprint(), (
        "what the device has is compared, not what was sent"
    )


def test_a_direction_of_one_rank_is_written_there_and_is_nothing_on_the_other() -> None:
    ranks, (name,) = tables(SECOND)
    (row,) = steering_rows([entry(name, "ablate", numbers=[1.0])])
    number, _ = [table.acquire(row)[0] for table in ranks]
    assert not pool(ranks[0], number, "ablate").any()
    assert np.allclose(
        pool(ranks[1], number, "ablate").numpy(), VECTOR[5:] / np.linalg.norm(VECTOR[5:])
    )


@pytest.mark.parametrize(
    ("family", "numbers"), [("ablate", [1.0]), ("clamp", [1.0, -1.0, 1.0]), ("add_matched", [0.5])]
)
def test_a_sum_over_columns_of_two_ranks_is_refused_on_both(
    family: str, numbers: list[float]
) -> None:
    ranks, (name,) = tables(VECTOR)
    (row,) = steering_rows([entry(name, family, numbers=numbers)])
    for table in ranks:
        with pytest.raises(ValueError, match="adds up columns of 2 tensor-parallel ranks"):
            table.acquire(row)


def test_rows_of_several_banks_have_places_of_their_own() -> None:
    steering = [
        entry("a"),
        entry("b", hook="k"),
        entry("c", hook="post_block"),
        entry("d", "ablate", numbers=[1.0]),
    ]
    rows = steering_rows(steering)
    assert [(row.bank, len(row.entries)) for row in rows] == [
        ("query", 2),
        ("key", 1),
        ("residual", 1),
    ]
    assert columns_of(rows) == [0, 0, 0]


@pytest.mark.parametrize(
    ("heads", "stored", "chosen"),
    [
        ([], [range(5), range(5, 10)], [[slice(None)], [slice(None)]]),
        ([0, 1], [range(5), range(5, 10)], [[slice(0, 5)], [slice(0, 5)]]),
        ([1], [range(0), range(5)], [[], [slice(0, 5)]]),
    ],
)
def test_each_rank_stores_its_part_of_the_chosen_heads(
    heads: list[int], stored: list[range], chosen: list[list[slice]]
) -> None:
    """Side by side, in the order of the columns, they are what was asked for."""
    assert [columns.stored(heads) for columns in RANKS] == stored
    assert [columns.chosen(heads) for columns in RANKS] == chosen
    assert all(
        first.stop == second.start for first, second in pairwise(part for part in stored if part)
    )
    capture = StoredCapture(sites={"z": [0]}, positions="all", tag="t", row=SHAPE, heads=heads)
    recorded = [Recording.of(capture, Ports(SITES, 5, "float32", columns), 1) for columns in RANKS]
    assert [each is not None for each in recorded] == [bool(part) for part in chosen]


def test_a_rank_records_columns_that_no_rank_before_it_holds() -> None:
    """Key heads that ranks share are recorded by the first, by all where each needs them; the
    stream by the first of a stage.
    """
    wanted = StoredCapture(sites={"k": [0]}, positions="all", tag="t", row=SHAPE)
    sites = [RankSite("k", 0, "single")]

    def recorded(columns: BankColumns | None, capture: StoredCapture, first: bool) -> bool:
        bank = Bank.__new__(Bank)
        bank.columns = columns
        bank.ports = Ports(
            [RankSite("post_block", 0, "single")] if columns is None else sites,
            5,
            "float32",
            columns,
        )
        return bank.recording(capture, 1, first) is not None

    for first in (True, False):
        assert recorded(BankColumns(SHAPE, 0, 5, records=True), wanted, first)
        assert not recorded(BankColumns(SHAPE, 0, 5, records=False), wanted, first)
        assert recorded(
            BankColumns(SHAPE, 0, 5, records=False),
            msgspec.structs.replace(wanted, consumers=[PROBED]),
            first,
        )
        assert (
            recorded(
                None, StoredCapture(sites={"post_block": [0]}, positions="all", tag="t"), first
            )
            == first
        )
    for columns, capture in (
        (BankColumns(RowShape(heads=4, width=5), 0, 5), wanted),
        (None, wanted),
        (RANKS[0], msgspec.structs.replace(wanted, row=None)),
    ):
        with pytest.raises(ValueError, match="its rows are"):
            recorded(columns, capture, first=True)

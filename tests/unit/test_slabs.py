"""Captured rows come out in position order, each position once; slab memory is reused only when nobody looks at it."""

import gc

import numpy as np
import torch

from midstream.schemas.specs import StoredCapture
from midstream.workers.runner.capture import Recording, Run, SlabPool

SPEC = StoredCapture(layers=[3, 5], hook="post_block", positions="all", tag="t")


def slab_of(first: int, rows: int, pool: SlabPool) -> torch.Tensor:
    """Row r of layer index l holds 1000·l + first + r everywhere."""
    slab = pool.new_slab(2, rows, 4, torch.float32)
    for layer in range(2):
        slab[layer] = (1000 * layer + first + torch.arange(rows)).unsqueeze(1)
    return slab


def rows_of(buffers: list[memoryview]) -> list[float]:
    return np.concatenate([np.frombuffer(buffer, dtype="<f4").reshape(-1, 4)[:, 0] for buffer in buffers]).tolist()


def test_runs_join_in_position_order_and_the_last_computed_row_wins() -> None:
    pool = SlabPool(1 << 20)
    recording, index = Recording(SPEC, [3, 5]), {3: 0, 5: 1}
    recording.runs = [
        Run(slab_of(0, 4, pool), index, first_row=0, first_position=0, count=4),
        Run(slab_of(100, 4, pool), index, first_row=1, first_position=2, count=3),  # positions 2–4 again: preempted, say
        Run(slab_of(200, 2, pool), index, first_row=0, first_position=5, count=2),
    ]
    positions, rows = recording.finish(before=6)
    assert positions == [0, 1, 2, 3, 4, 5]  # field case 6
    assert rows_of(rows[3]) == [0, 1, 101, 102, 103, 200]
    assert rows_of(rows[5]) == [1000, 1001, 1101, 1102, 1103, 1200]


def test_rows_beyond_the_last_fed_token_are_left_out() -> None:
    """A step scheduled ahead, or a rejected draft token, computes rows that are nobody's."""  # field case 7
    pool = SlabPool(1 << 20)
    recording = Recording(SPEC, [3], [Run(slab_of(0, 6, pool), {3: 0}, 0, 0, 6)])
    assert recording.finish(before=4)[0] == [0, 1, 2, 3]


def test_bfloat16_rows_keep_their_bits() -> None:
    slab = torch.tensor([[[1.5, -2.0], [3.25, 0.1]]], dtype=torch.bfloat16)
    recording = Recording(SPEC, [3], [Run(slab, {3: 0}, 0, 0, 2)])
    (buffer,) = recording.finish(before=2)[1][3]
    assert np.frombuffer(buffer, "<u2").tolist() == slab.view(torch.uint16).flatten().tolist()


def test_memory_is_reused_when_the_slab_is_gone_and_not_before() -> None:
    pool = SlabPool(1 << 20)
    first = pool.new_slab(2, 8, 4, torch.float32)
    address = first.data_ptr()
    second = pool.new_slab(2, 8, 4, torch.float32)
    assert second.data_ptr() != address
    del first
    gc.collect()
    assert pool.new_slab(2, 7, 4, torch.float32).data_ptr() == address
    del second


def test_a_step_waits_while_the_writers_are_behind_and_only_then() -> None:
    pool = SlabPool(limit_bytes=100)
    kept = pool.new_slab(2, 8, 4, torch.float32)
    asked: list[bool] = []

    def busy() -> bool:
        asked.append(True)
        return len(asked) < 3

    pool.wait(busy)
    assert len(asked) == 3
    del kept
    gc.collect()
    pool.wait(lambda: True)  # within the limit: returns at once although the writers are busy

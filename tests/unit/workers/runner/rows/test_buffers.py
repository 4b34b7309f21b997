"""How rows leave an accelerator that works late: what a step queues, when the host waits, and what
is uploaded.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from rank_kit import plane_config

from midstream.workers.runner.base.config import RankPlace
from midstream.workers.runner.base.shared_memory import VOID, HostMemoryError
from midstream.workers.runner.hooks.sites import Sizes, buffers_of
from midstream.workers.runner.plane import data_plane
from midstream.workers.runner.plane.data_plane import DataPlane
from midstream.workers.runner.rows import buffers
from midstream.workers.runner.rows.arena import Arena, BankRows
from midstream.workers.runner.rows.buffers import Staging, _Halves

sys.path.append(str(Path(__file__).parents[3] / "ordering"))
from late_device import KIND, Device, DeviceTensor, Stream

WIDTH = 4
RING_ROWS = 1 << 17
ROW_BYTES = WIDTH * 4
#: The first row behind those that nobody needs.
FIRST = VOID // ROW_BYTES


class Rig:
    """Halves of a ring on a device that does nothing before somebody waits for it."""

    def __init__(self, locked: int) -> None:
        self.device = Device(0, haste=0.0)
        self.locked = locked

    def make(self, patch: pytest.MonkeyPatch) -> None:
        self.device.install(patch)
        self.arena = Arena(0, locked=self.locked, room=64 << 20)
        self.memory = BankRows(self.arena, WIDTH, torch.float32)
        self.copies = Stream(self.device)
        self.ring = self.device.full((2 * RING_ROWS, WIDTH), 0.0, torch.float32)
        self.halves = self.new_halves()

    def new_halves(self) -> _Halves:
        with self.device.calls():
            return _Halves(self.ring, self.memory, self.copies)  # type: ignore[arg-type]

    def step(self, places: np.ndarray, number: int) -> Any:
        """Have a forward fill the half with a number, and its rows go to their places."""
        first = self.halves.next(len(places))
        with self.device.calls():
            self.ring[first : first + RING_ROWS].fill_(number)
            return self.halves.take(np.arange(len(places)), places)

    def found(self, places: np.ndarray) -> set[float]:
        return set(self.memory.all[torch.from_numpy(places)].flatten().tolist())


@pytest.fixture
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    made = Rig(getattr(request, "param", 32 << 20))
    made.make(monkeypatch)
    yield made
    assert made.device.errors == []


def blocks(tokens: int, ports: int) -> np.ndarray:
    """Places of a prompt in blocks of 16 tokens, each of which has its rows by port."""
    token = np.arange(tokens)
    port = np.arange(ports)[:, None]
    return (FIRST + (token // 16 * ports + port) * 16 + token % 16).reshape(-1)


@pytest.mark.parametrize("ports", [1, 32])
def test_a_prompt_leaves_by_as_much_work_as_a_single_row(rig: Rig, ports: int) -> None:
    work = []
    for places in (blocks(1, 1), blocks(2048, ports)):
        before = rig.copies.issued
        rig.step(places, 7).wait()
        assert rig.found(places) == {7.0}
        work.append(rig.copies.issued - before)
    assert work[0] == work[1]


@pytest.mark.parametrize("rig", [VOID], indirect=True)
def test_no_step_waits_for_its_own_forward_although_its_memory_is_not_locked(rig: Rig) -> None:
    first = blocks(2048, 1)
    second = blocks(2048, 2)[2048:]
    one = rig.step(first, 1)
    assert rig.device.first.done < rig.device.first.issued, "the forward has not begun"
    two = rig.step(second, 2)
    assert rig.found(first) == {1.0}, "the host copied them once their forward was over"
    assert rig.arena.memory.landed[0] == one.number
    assert not two.done()
    two.wait()
    assert rig.found(second) == {2.0}
    assert rig.arena.memory.landed[0] == two.number


@pytest.mark.parametrize("rig", [VOID], indirect=True)
def test_landings_are_numbered_in_order_although_another_bank_needs_no_host(rig: Rig) -> None:
    other = rig.new_halves()
    late = rig.step(blocks(16, 1), 1)
    other.next(1)
    with rig.device.calls():
        direct = other.take(np.arange(1), np.array([1]))
    rig.copies.synchronize()
    assert rig.arena.memory.landed[0] < late.number, "the first has not been copied yet"
    direct.wait()
    assert rig.arena.memory.landed[0] == direct.number
    assert rig.found(blocks(16, 1)) == {1.0}


@pytest.mark.parametrize("rig", [VOID], indirect=True)
def test_rows_around_locked_memory_take_few_bytes_at_a_time(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[int]()
    original = buffers.locked_like

    def noted(values: torch.Tensor) -> torch.Tensor:
        sizes.append(values.nbytes)
        return original(values)

    monkeypatch.setattr(buffers, "locked_like", noted)
    assert buffers._PART_BYTES <= 64 << 20
    monkeypatch.setattr(buffers, "_PART_BYTES", 100 * ROW_BYTES)
    rig.halves = rig.new_halves()
    places = blocks(2048, 1)
    rig.step(places, 3).wait()
    assert rig.found(places) == {3.0}
    assert max(sizes) == 100 * ROW_BYTES


def test_a_view_that_is_a_copy_is_an_error_when_the_rank_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(32 << 20)
    rig.make(monkeypatch)
    monkeypatch.setattr(buffers, "on_device", lambda values: DeviceTensor(values.clone()))
    with pytest.raises(HostMemoryError, match="is a copy of it"):
        rig.new_halves()


def test_slots_are_uploaded_for_the_tokens_of_the_step_alone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity = 8192
    sizes = Sizes(
        ring_rows=16, capacity=capacity, lists=16, patterns=8, configurations=2, entries=2
    )
    with rig.device.calls():
        of_bank = buffers_of(1, sizes, WIDTH, torch.float32, KIND)
        staging = Staging(of_bank, rig.memory, rig.copies)  # type: ignore[arg-type]
    uploaded = list[int]()
    original = buffers.locked_copy

    def noted(values: torch.Tensor) -> torch.Tensor:
        uploaded.append(values.nbytes)
        return original(values)

    monkeypatch.setattr(buffers, "locked_copy", noted)
    plan = np.zeros(tuple(of_bank.plan.shape), dtype=np.int64)
    bytes_of = list[int]()
    held = of_bank.capture_slots
    for tokens in (capacity, 5, 5):
        wanted = np.full((2, capacity), -1)
        staging.set_slots([np.arange(pattern, tokens) for pattern in range(2)])
        for pattern in range(2):
            wanted[pattern, pattern:tokens] = np.arange(tokens - pattern)
        uploaded.clear()
        with rig.device.calls():
            staging.commit(plan, [])
        rig.device.first.synchronize()
        assert isinstance(held, DeviceTensor)
        np.testing.assert_array_equal(held.content[:2].numpy(), wanted)
        bytes_of.append(uploaded[-1])
    # the second step clears what the first has left
    assert bytes_of == [2 * 4 * capacity, 2 * 4 * capacity, 2 * 4 * 5]


@pytest.mark.parametrize(("tp", "locked_mib"), [(0, 64 + 2), (1, 2)])
def test_a_rank_that_records_nothing_locks_no_memory_for_the_queue(
    tp: int, locked_mib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unused = dict.fromkeys(("steering_rows", "steering_entries", "step_tokens"), 0)
    config = plane_config(tmp_path, capture_queue_mib=64, row_store_mib=2, **unused)
    place = RankPlace(rank=tp, world=2, tp=tp, pp=0, stages=1)
    of_bank: Any = SimpleNamespace(pool=torch.zeros(1, 4), ring=torch.zeros(0, device=KIND))
    made = Mock(side_effect=HostMemoryError)
    monkeypatch.setattr(data_plane, "Arena", made)
    with pytest.raises(HostMemoryError):
        DataPlane(config, place, [], of_bank, num_layers=1, traced=False)
    assert made.call_args.kwargs["locked"] == locked_mib << 20

"""The scheduler promises exactly those rows that the ranks keep, and a capture served by them
equals one that was computed.
"""

import msgspec
import numpy as np
import pytest
from rank_kit import Rank, Request, rows_of, wanted_rows

from midstream.schemas.model.banks import RowShape
from midstream.schemas.requests.specs import RankSpec, StoredCapture
from midstream.workers.runner.base import row_index
from midstream.workers.runner.base.row_index import PIECES, RequestCaptures, RowIndex
from midstream.workers.runner.rows.row_store import RowStore

BLOCK = 4
HASHES = [b"a", b"b", b"c", b"d"]
ROW = 10  # bytes


def capture(positions="all_prompt", at="before", **sites: list[int]) -> StoredCapture:
    return StoredCapture(sites=sites or {"post_block": [0, 1]}, positions=positions, tag="t", at=at)  # type: ignore[arg-type]


def spec_of(
    *captures: StoredCapture, prompt: int = 14, tensor_parallel: bool = False
) -> RequestCaptures:
    spec = RankSpec(version="v", job="j", request=0, attempt=1, prompt_tokens=prompt)
    spec.captures.extend(captures)
    return RequestCaptures(spec, tensor_parallel=tensor_parallel)


def test_a_hit_reaches_as_far_as_the_kept_rows_and_no_further() -> None:
    index = RowIndex(1 << 20, ROW, BLOCK)
    spec = spec_of(capture())
    assert index.reach(spec, HASHES) == 0
    kept = index.keep("r", spec, HASHES, 0, 9)
    # the third block is not full yet
    assert [(block.first, block.stop) for block in kept] == [(0, 4), (4, 8)]
    assert index.reach(spec, HASHES) == 8
    assert [block.first for block in index.keep("r", spec, HASHES, 9, 14)] == [8]
    assert index.reach(spec, HASHES) == 12  # of the last, unfinished block nothing is kept
    served = index.serve("s", spec, HASHES, 8)
    assert [(block.request_id, block.first, block.stop, block.number) for block in served] == [
        ("s", 0, 4, kept[0].number),
        ("s", 4, 8, kept[1].number),
    ]


def test_ranks_without_a_head_that_was_asked_for_have_kept_nothing_of_it() -> None:
    """One rank keeps its whole rows, and serves any heads of them; of several, only those with one
    of the heads keep theirs.
    """
    wanted = {
        heads: msgspec.structs.replace(
            capture(z=[0]), row=RowShape(heads=4, width=2), heads=list(heads)
        )
        for heads in ((), (0, 1), (2,))
    }
    for parallel, reaches in ((False, (8, 8, 8)), (True, (0, 8, 0))):
        index = RowIndex(1 << 20, ROW, BLOCK)
        index.keep("r", spec_of(wanted[0, 1], tensor_parallel=parallel), HASHES, 0, 8)
        assert (
            tuple(
                index.reach(spec_of(each, tensor_parallel=parallel), HASHES)
                for each in wanted.values()
            )
            == reaches
        )


@pytest.mark.parametrize(
    ("asked", "reach"),
    [
        (capture(post_block=[1]), 8),  # fewer layers
        (capture(post_block=[0, 1, 2]), 0),  # one layer more
        (capture(pre_attn=[0]), 0),
        (capture(at="after"), 0),  # the site's other side
        (capture([1, 6]), 14),  # positions 1 and 6 are kept, and nothing above them is asked for
        (capture([6, 9]), 9),
        (capture("last_prompt"), 13),
        (capture("all_generated"), 14),
    ],
)
def test_only_rows_of_the_same_port_and_position_count(asked: StoredCapture, reach: int) -> None:
    index = RowIndex(1 << 20, ROW, BLOCK)
    index.keep("r", spec_of(capture()), HASHES, 0, 8)
    assert index.reach(spec_of(asked), HASHES) == reach


def test_another_prefix_has_other_hashes_and_finds_nothing() -> None:
    index = RowIndex(1 << 20, ROW, BLOCK)
    index.keep("r", spec_of(capture()), HASHES, 0, 8)
    assert index.reach(spec_of(capture()), [b"x", b"b", b"c"]) == 0


def test_the_oldest_rows_go_first_and_the_ranks_are_told() -> None:
    block_bytes = 2 * BLOCK * ROW
    index = RowIndex(2 * block_bytes, ROW, BLOCK)
    spec = spec_of(capture())
    first = index.keep("r", spec, HASHES, 0, 4)
    second = index.keep("r", spec, HASHES, 4, 8)
    index.serve("s", spec, HASHES, 4)  # the first block was used since
    third = index.keep("r", spec, HASHES, 8, 12)
    assert index.dropped() == [second[0].number]
    assert index.dropped() == []
    assert index.reach(spec, HASHES) == 4
    assert index.serve("s", spec, HASHES, 4)[0].number == first[0].number
    index.clear()
    assert sorted(index.dropped()) == sorted([first[0].number, third[0].number])
    assert index.reach(spec, HASHES) == 0


def test_rows_that_alone_exceed_the_limit_are_not_kept() -> None:
    index = RowIndex(2 * BLOCK * ROW - 1, ROW, BLOCK)
    assert index.keep("r", spec_of(capture()), HASHES, 0, 8) == []
    assert RowIndex(0, ROW, BLOCK).keep("r", spec_of(capture()), HASHES, 0, 8) == []


def test_wider_kept_rows_replace_narrower_ones() -> None:
    index = RowIndex(1 << 20, ROW, BLOCK)
    narrow = index.keep("r", spec_of(capture(post_block=[0])), HASHES, 0, 4)
    index.keep("r", spec_of(capture(post_block=[0, 1])), HASHES, 0, 4)
    assert index.dropped() == [narrow[0].number]
    for layer in range(2, 2 + PIECES):
        index.keep("r", spec_of(capture(post_block=[layer])), HASHES, 0, 4)
    assert len(index.dropped()) == 1


def test_ports_are_made_once_per_request_and_decode_steps_cost_no_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """480 sites take 0.1 ms, and a step has many requests."""
    made = []
    monkeypatch.setattr(
        row_index, "_ports", lambda capture, tensor_parallel: made.append(capture) or frozenset()
    )
    monkeypatch.setattr(StoredCapture, "select", lambda *window: made.append(window) or range(0))
    index, spec = RowIndex(1 << 20, ROW, BLOCK), spec_of(capture("all"))
    for start in range(14, 40):
        assert index.keep("r", spec, HASHES * 3, start, start + 1) == []
    assert len(made) == 1
    index.keep("r", spec, HASHES, 0, 8)
    index.keep("r", spec, HASHES, 8, 14)
    index.reach(spec, HASHES)
    assert [each for each in made if isinstance(each, StoredCapture)] == made[:1]


@pytest.mark.parametrize("seed", range(6))
def test_captures_served_by_kept_rows_equal_computed_ones(seed: int) -> None:
    # field case 14
    """Random captures of one prompt, one after the other, each cached as far as the index
    promises.
    """
    rng = np.random.default_rng(seed)
    rank = Rank()
    store = RowStore(rank.mover)
    index = RowIndex(40 * rank.buffers.ring.shape[1] * 4, rank.buffers.ring.shape[1] * 4, BLOCK)
    reused = 0
    for turn in range(30):
        prompt = int(rng.integers(5, 17))
        sites = {
            hook: [0, 1] if rng.random() < 0.5 else [1]
            for hook in ("post_block", "mlp_in")
            if rng.random() < 0.7
        }
        positions = (
            "all" if rng.random() < 0.6 else sorted({int(p) for p in rng.integers(0, prompt, 3)})
        )
        request = Request(0, prompt, prompt + 2, [capture(positions, **sites)])
        rank.admit(request)
        spec, hashes, recording = (
            RequestCaptures(request.tracked.spec),
            HASHES[: prompt // BLOCK],
            request.tracked.recordings[0],
        )
        cached = min(index.reach(spec, hashes), prompt - 1) // BLOCK * BLOCK
        for block in index.serve(str(turn), spec, hashes, cached):
            store.serve(block.number, recording, block.first, block.stop)
        at = cached
        while at < prompt + 1:
            count = min(int(rng.integers(1, 9)), prompt - at) if at < prompt else 1
            rank.step((request, at, count))
            for block in index.keep(str(turn), spec, hashes, at, at + count):
                store.keep(block.number, recording, block.first, block.stop)
            store.drop(index.dropped())
            at += count
        finished = rank.finish(request)
        assert finished.positions == list(request.captures[0].select(0, prompt + 1, prompt))
        for hook, layers in request.captures[0].sites.items():
            for layer in layers:
                assert (
                    rows_of(finished, hook, layer) == wanted_rows(request, finished, hook, layer)
                ).all()
        below = [position for position in finished.positions if position < cached]
        assert finished.reused == len(below) * request.captures[0].num_sites
        reused += finished.reused
        assert store.held <= 40 * rank.buffers.ring.shape[1] * 4
    assert reused > 0


def test_evicted_rows_are_a_typed_error() -> None:
    rank = Rank()
    request = rank.admit(Request(0, 6, 8, [capture()]))
    with pytest.raises(
        LookupError, match="positions 0 to 3, served by the prefix cache, are not available"
    ):
        RowStore(rank.mover).serve(7, request.tracked.recordings[0], 0, 4)

"""A step never captures more rows than the ring holds, and every request proceeds in every step;
while rows wait for the writers, captures wait too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import ANY

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from midstream.schemas.base.ring import MOST_BYTES, plan_ring
from midstream.schemas.prompts.selectors import PositionWindow
from midstream.schemas.requests.specs import PROBED, StoredCapture, WriterWork
from midstream.workers.runner.base.backlog import Backlog
from midstream.workers.runner.rows.overload import Overloads, overloads
from midstream.workers.runner.vllm.ring_budget import CapturedRows, RingBudget, stage_sites

ONE_STAGE = [range(4)]
STAGES = [range(1), range(1, 4)]


def capture(positions="all", every_n=1, **sites: list[int]) -> StoredCapture:
    return StoredCapture(
        sites=sites or {"post_block": [0, 1, 2, 3]}, positions=positions, tag="t", every_n=every_n
    )  # type: ignore[arg-type]


def budget(
    room: int,
    drafts: int = 0,
    stages: list[range] = ONE_STAGE,
    queues: list[Overloads] | None = None,
    **requests: Any,
) -> RingBudget:
    """`requests`: the prompt's length, what is captured, and the kind of work if not `writer`."""
    made = RingBudget(room, stages, drafts, lambda capture: len(capture.tag), queues or [])
    for name, (prompt, captures, *work) in requests.items():
        made.join(name, captures, prompt, 100, *work)
    return made


def begin(
    ring: RingBudget, running: Sequence[tuple[str, int]], waiting: Sequence[str], slots: int
) -> None:
    """`running`: requests, each with its computed tokens."""
    ring.begin([name for name, _ in running], [done for _, done in running], waiting, slots)


def test_a_prompt_whose_rows_exceed_the_ring_is_split_over_steps() -> None:
    ring = budget(80, a=(205, [capture()]))
    done = 0
    chunks = []
    while done < 205:
        begin(ring, [("a", done)] if done else [], [] if done else ["a"], 1)
        chunks.append(ring.take("a", done, 205 - done))
        done += chunks[-1]
    assert chunks == [20] * 10 + [5]


def test_only_captured_positions_cost_rows() -> None:
    ring = budget(
        8, few=(100, [capture([3, 50, 51])]), last=(100, [capture("last_prompt")]), none=(100, [])
    )
    begin(ring, [], ["few", "last", "none", "plain"], 9)
    assert ring.take("few", 0, 100) == 50, "4 rows are left for the other request's last token"
    assert [ring.take(name, 0, 100) for name in ("last", "none", "plain")] == [100, 100, 100]


def test_what_is_over_needs_no_room_any_more() -> None:
    ring = budget(8, prompt=(10, [capture("all_prompt")]), other=(10, [capture()]))
    begin(ring, [("prompt", 10), ("other", 2)], [], 0)
    assert ring.take("prompt", 10, 1) == 1
    assert ring.take("other", 2, 8) == 2
    ring.leave("other")
    begin(ring, [("prompt", 0)], [], 0)
    assert ring.take("prompt", 0, 10) == 2


def test_each_stage_holds_the_rows_of_its_own_layers() -> None:
    assert stage_sites(capture(pre_attn=[0, 1], post_block=[3]), STAGES) == [1, 2]


def test_without_a_ring_nothing_is_split() -> None:
    ring = budget(0, a=(10_000, [capture()]))
    begin(ring, [("a", 0)], [], 0)
    assert ring.take("a", 0, 10_000) == 10_000


def of_writers(*sizes: int, limit: int = 100, work: WriterWork = "writer") -> list[Overloads]:
    """Of each rank, queues of which one has that many bytes."""
    backlogs = [Backlog() for _ in sizes]
    for backlog, size in zip(backlogs, sizes, strict=True):
        backlog.send(size, work)
    return [overloads("block", limit, backlog) for backlog in backlogs]


@pytest.mark.parametrize("full", ["reading", "placed", "writer"])
def test_only_requests_of_the_kind_of_work_whose_queue_is_full_wait(full: WriterWork) -> None:
    kinds = ("reading", "placed", "writer")
    ring = budget(
        0, queues=of_writers(101, work=full), **{kind: (40, [capture()], kind) for kind in kinds}
    )
    assert ring.look() == {full}
    begin(ring, [], kinds, 9)
    # 4 rows of a byte at a position, of 100 that each of the others may have
    taken = {kind: ring.take(kind, 0, 40) for kind in kinds}
    assert taken == dict.fromkeys(kinds, 25) | {full: 0}


def test_while_a_rank_has_too_many_rows_to_write_captures_wait_and_others_run() -> None:
    scored = msgspec.structs.replace(capture(), consumers=[PROBED])
    asked = {"a": (9, [capture()]), "b": (9, [scored]), "c": (9, [capture("last_prompt")])}
    ring = budget(0, queues=of_writers(100, 101), **asked)
    assert ring.look() == {"a", "c"}
    begin(ring, [("a", 9), ("b", 0)], ["c"], 9)
    taken = [ring.take("a", 9, 1), ring.take("b", 0, 9), ring.take("c", 0, 9)]
    assert taken == [0, 9, 0]
    assert ring.take("plain", 0, 9) == 9
    ring.leave("a")
    assert ring.look() == {"c"}
    assert not budget(0, queues=of_writers(100, 99), **asked).look()


@pytest.mark.parametrize(
    ("waiting", "stages", "chunks"),
    [
        # 100 bytes for positions of 4 rows of 1 byte
        (0, ONE_STAGE, [25, 15]),
        (90, ONE_STAGE, [2] * 20),
        (99, ONE_STAGE, [1] * 40),  # less than a position: it proceeds all the same
        (90, STAGES, [3] * 13 + [1]),  # the second stage has 3 of the rows
    ],
)
def test_a_prompt_is_split_by_the_bytes_that_are_free(
    waiting: int, stages: list[range], chunks: list[int]
) -> None:
    ring = budget(0, 0, stages, of_writers(waiting), a=(40, [capture()]))
    done = 0
    for tokens in chunks:
        assert not ring.look()
        begin(ring, [("a", done)], [], 0)
        assert ring.take("a", done, 40 - done) == tokens
        done += tokens
    assert done == 40


@dataclass
class Running:
    name: str
    prompt: int
    total: int  # tokens that are computed in the end
    captures: list[StoredCapture]
    computed: int = 0
    windows: list[tuple[int, int]] = field(default_factory=list)


POSITIONS = st.one_of(
    st.sampled_from(
        [
            "all",
            "all_prompt",
            "last_prompt",
            "all_generated",
            PositionWindow(start=2),
            PositionWindow(start=1, stop=9),
        ]
    ),
    st.lists(st.integers(0, 4), min_size=1, unique=True).map(sorted),
)
CAPTURES = st.lists(
    st.builds(
        lambda layers, positions, every: StoredCapture(
            sites={"post_block": sorted(layers)}, positions=positions, tag="t", every_n=every
        ),
        st.sets(st.integers(0, 3), min_size=1),
        POSITIONS,
        st.sampled_from([1, 1, 3]),
    ),
    max_size=2,
)


@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(
        st.tuples(st.integers(5, 40), st.integers(1, 6), CAPTURES), min_size=1, max_size=7
    ),
    stages=st.sampled_from([ONE_STAGE, STAGES]),
    drafts=st.sampled_from([0, 2]),
    spare=st.integers(0, 40),
    queued=st.integers(0, 100),
    slots=st.integers(1, 4),
    step_tokens=st.integers(8, 32),
    preempted=st.sets(st.integers(1, 40), max_size=5),
)
def test_simulated_steps_fit_the_ring_and_no_request_starves(
    asked, stages, drafts, spare, queued, slots, step_tokens, preempted
) -> None:
    """Requests join as vLLM and the worker's admission let them, some are preempted, and drafts
    come and are rejected.
    """
    tokens = 1 + drafts
    requests = [
        Running(str(n), prompt, prompt + most - 1, captures)
        for n, (prompt, most, captures) in enumerate(asked)
    ]
    shares = {
        r.name: max(
            CapturedRows(r.captures, r.prompt, stages).most(
                tokens, r.total - r.prompt + 1 + drafts
            ),
            default=0,
        )
        for r in requests
    }
    room = max(1, *shares.values()) + spare
    ring = budget(room, drafts, stages, of_writers(queued))
    outside = list(requests)
    waiting = []
    running = []
    for number in range(1000):
        while (
            outside
            and sum(shares[r.name] for r in waiting + running) + shares[outside[0].name] <= room
        ):
            # the worker's admission
            joining = outside.pop(0)
            waiting.append(joining)
            ring.join(
                joining.name, joining.captures, joining.prompt, joining.total - joining.prompt + 1
            )
        if not waiting and not running:
            return
        if running and number in preempted:
            victim = running.pop()
            victim.computed = 0
            waiting.insert(0, victim)
        ring.look()
        begin(
            ring,
            [(r.name, r.computed) for r in running],
            [r.name for r in waiting],
            slots - len(running),
        )
        left = step_tokens
        rows = [0] * len(stages)
        step = []
        for request in [*running, *waiting[: slots - len(running)]]:
            decodes = request.computed >= request.prompt - 1
            wanted = min(left, tokens if decodes else request.total - request.computed)
            if not wanted:
                break
            given_tokens = ring.take(request.name, request.computed, wanted)
            assert given_tokens >= min(wanted, tokens), (
                "every request proceeds, and drafts are never cut"
            )
            assert request.captures or given_tokens == wanted
            window = request.computed, request.computed + given_tokens
            for each in request.captures:
                positions = len(each.select(*window, request.prompt))
                rows = [
                    total + positions * sites
                    for total, sites in zip(rows, stage_sites(each, stages), strict=True)
                ]
            left -= given_tokens
            step.append((request, 1 if decodes else given_tokens))
        assert all(count <= room for count in rows)
        for request, accepted in step:
            if request in waiting:
                waiting.remove(request)
                running.append(request)
            request.computed += accepted
            if request.computed >= request.total:
                running.remove(request)
                ring.leave(request.name)
    pytest.fail("requests did not end")


BF16_4096 = 8192  # bytes of a row


@pytest.mark.parametrize(
    ("shape", "fields", "ring"),
    [
        # all layers of one hook, a whole step
        ((BF16_4096, 6, 32), {"step_tokens": 2048, "memory_bytes": 80 << 30}, (32 * 2048, 1 << 30)),
        # every site of 64 requests
        ((BF16_4096, 6, 32), {"step_tokens": 64}, (6 * 32 * 64, ANY)),
        ((BF16_4096, 6, 32), {"step_tokens": 64, "drafts": 3}, (4 * 6 * 32 * 64, ANY)),
        ((16384, 6, 80), {"step_tokens": 8192, "memory_bytes": 80 << 30}, (ANY, MOST_BYTES)),
        ((16384, 6, 80), {"step_tokens": 8192, "memory_bytes": 24 << 30}, (ANY, 768 << 20)),
        ((1 << 22, 6, 80), {"step_tokens": 64}, (480, ANY)),  # one token at least
        ((BF16_4096, 6, 32), {"step_tokens": 64, "size_mib": 16}, (1024, 16 << 20)),
    ],
)
def test_the_automatic_ring_follows_the_models_shape(
    shape: tuple[int, int, int], fields: dict[str, Any], ring: tuple[int, int]
) -> None:
    assert plan_ring(*shape, requests=64, **fields) == ring


def test_the_largest_ring_has_room_for_every_site_of_all_requests() -> None:
    large = plan_ring(16384, 6, 80, step_tokens=8192, requests=64, memory_bytes=80 << 30)
    assert large.rows >= 6 * 80 * 64

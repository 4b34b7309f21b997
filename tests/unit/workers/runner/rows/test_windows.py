"""A capture with a window stores what slicing a whole one gives, and holds no more than it must."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plane_kit import Rig
from rank_kit import Request, stream_of

from midstream.schemas.prompts.selectors import Span
from midstream.schemas.prompts.windows import Around, HeadAndTail, When
from midstream.schemas.requests.specs import StoredCapture
from midstream.workers.runner.rows import streams

SITES = {"post_block": [0, 1]}
TOTAL = 360  # of which the last token has no row
PROMPT = 40
WINDOWS = {
    "last": Span(last=10),
    "more than there are": Span(last=5000),
    "head and tail": Span(head_and_tail=HeadAndTail(head=70, tail=3)),
    "head": Span(head_and_tail=HeadAndTail(head=5, tail=0)),
    "around": Span(around=Around(token_ids=[[1007], [1300, 1301], [1359]], before=2, after=3)),
    "nowhere": Span(around=Around(token_ids=[[7]])),
}


def wanted(window: Span) -> list[int]:
    """Written by hand: the request's token ids are 1000 + position."""
    rows = list(range(TOTAL - 1))
    around = window.around
    if around is None:
        head, tail = window.ends
        return [at for at in rows if at < head or at >= len(rows) - tail]
    hits = [token - 1000 for found in around.token_ids or () for token in found if token >= 1000]
    return [at for at in rows if any(-around.before <= at - hit <= around.after for hit in hits)]


def captured(window: Span, number: int = 1, **options: Any) -> Request:
    capture = StoredCapture(
        **{"sites": SITES, "positions": "all", "tag": "t", "window": window} | options
    )
    return Request(number, PROMPT, TOTAL, [capture], max_tokens=TOTAL)


def run(rig: Rig, request: Request, drafts: int = 0) -> int:
    """Return the most rows that the recording held. `drafts`: tokens of each step, of which the
    first alone is accepted.
    """
    most = 0
    rig.step((request, 0, PROMPT), new=[request])
    for at in range(PROMPT, TOTAL - 1):
        rig.step((request, at, min(1 + drafts, TOTAL - 1 - at)))
        recordings = rig.plane._tracked[str(request.number)].recordings
        rig.plane._mover.submit(lambda: None).result()  # the rows of this step have arrived
        most = max(most, recordings[0].num_rows if recordings else 0)
    return most


def check(rig: Rig, request: Request, positions: list[int]) -> None:
    rig.step(finished=[request])
    (receipt,) = rig.receipts()
    assert receipt.status == "ok", receipt
    reader = rig.reader(request)
    assert reader.positions() == positions
    assert reader.token_ids() == [1000 + at for at in positions]
    for layer in SITES["post_block"]:
        rows = stream_of(request.number, "post_block", layer, 0, TOTAL)[positions]
        np.testing.assert_array_equal(reader.array(layer), rows)


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("streamed", [False, True])
def test_window_stores_what_slicing_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, streamed: bool
) -> None:
    rig, window = Rig(tmp_path), WINDOWS[name]
    if streamed:
        monkeypatch.setattr(rig.plane._streams, "_window", 4096)
    request = captured(window)
    run(rig, request)
    check(rig, request, wanted(window))


def test_rows_outside_of_the_ends_are_not_held(tmp_path: Path) -> None:
    rig, window = Rig(tmp_path), Span(head_and_tail=HeadAndTail(head=3, tail=10))
    request = captured(window)
    assert window.held < TOTAL
    assert run(rig, request) <= window.held * 2
    check(rig, request, wanted(window))


def test_rejected_drafts_do_not_push_rows_out(tmp_path: Path) -> None:
    rig, request = Rig(tmp_path), captured(Span(last=10))
    run(rig, request, drafts=8)
    check(rig, request, wanted(Span(last=10)))


def test_preempted_request_has_its_window(tmp_path: Path) -> None:
    rig, request = Rig(tmp_path), captured(Span(head_and_tail=HeadAndTail(head=2, tail=100)))
    rig.step((request, 0, PROMPT), new=[request])
    for at in range(PROMPT, 250):
        rig.step((request, at, 1))
    rig.step((request, 0, 200), new=[request])  # preempted, and computed again
    rig.step((request, 200, TOTAL - 1 - 200))
    check(rig, request, wanted(Span(head_and_tail=HeadAndTail(head=2, tail=100))))


def test_window_of_a_probe_has_the_rows_where_it_is_high() -> None:
    window = Span(when=When(probe="p", at_least=0.5, before=1, after=2))
    high = [False] * 10
    high[0] = high[6] = True
    assert sorted(window.keep(range(9), [0] * 10, high)) == [0, 1, 2, 5, 6, 7, 8]
    assert sorted(window.keep([0, 2, 7], [0] * 10, high)) == [0, 2, 7]


@pytest.mark.timeout(30)
def test_surroundings_that_overlap_are_joined_before_they_are_listed() -> None:
    """Thousands of occurrences with the widest surroundings: listing each takes minutes."""
    window = Span(around=Around(token_ids=[[7]], before=1 << 16, after=1 << 16))
    assert window.keep(range(8192), [7] * 8192) == {*range(8192)}


def test_pieces_are_smaller_than_the_slack() -> None:
    assert Span(last=1).held > streams.SPAN * 3

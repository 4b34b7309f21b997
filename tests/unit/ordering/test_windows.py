"""Windows in the simulation of a rank: under drafts, preemption, stop strings found late and the
prefix cache they hold what slicing whole captures gives, although most rows left early.
"""

import random
from pathlib import Path

import msgspec
import pytest
from drawn_requests import SOURCE, Asked
from simulated_rank import simulate

from midstream.schemas.prompts.selectors import Span
from midstream.schemas.prompts.windows import HeadAndTail
from midstream.schemas.requests.specs import StoredCapture
from midstream.workers.runner.rows import capture, streams


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 positions, two steps of up to 3 drafts under way, and a window for most captures
    of the requests that follow.
    """
    monkeypatch.setattr(streams, "SPAN", 4)
    monkeypatch.setattr(capture, "LATE", 8)
    complete = Asked.complete
    positions = Asked.positions

    def windowed(asked: Asked) -> Asked:
        draws = random.Random(100 * asked.total + asked.number)
        if asked.number != SOURCE:
            asked.captures = [
                msgspec.structs.replace(
                    each,
                    positions=draws.choice(["all", "all", "all", each.positions]),
                    every_n=draws.choice([1, 1, 2, 3]),
                    window=draws.choice(
                        [
                            None,
                            Span(last=draws.randint(1, 8)),
                            Span(
                                head_and_tail=HeadAndTail(
                                    head=draws.randint(0, 5), tail=draws.randint(1, 6)
                                )
                            ),
                        ]
                    ),
                )
                for each in asked.captures
            ]
        return complete(asked)

    def kept(asked: Asked, of: StoredCapture) -> list[int]:
        found = positions(asked, of)
        return found if of.window is None else sorted(of.window.keep(found, asked.tokens))

    monkeypatch.setattr(Asked, "complete", windowed)
    monkeypatch.setattr(Asked, "positions", kept)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed < 4 else [pytest.mark.long]) for seed in range(60)]
)
def test_windows_are_slices_of_whole_captures(seed: int, windows: None, tmp_path: Path) -> None:
    assert simulate(seed, tmp_path).findings == []

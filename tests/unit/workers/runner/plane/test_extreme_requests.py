"""Does a request at a limit cost the others on the model's thread what a small one costs them?

Each request is at one limit of what reaches a rank, beside small ones that stay. Counted are lines
of the product's Python: when it is admitted, in a step of all, and when it ends.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from line_kit import python_lines
from msgspec.structs import replace
from plane_kit import VECTOR, WEIGHT, Adapters, Request, Rig, spec_of
from rank_kit import capture, steering

from midstream.schemas.artifacts.probes import ProbeContent, StoredProbe
from midstream.schemas.base import limits
from midstream.schemas.base.records import to_msgpack
from midstream.schemas.base.tensors import content_hash, from_numpy
from midstream.schemas.prompts.selectors import HOOKS, Span
from midstream.schemas.prompts.windows import Trigger
from midstream.schemas.requests.specs import StoredCapture, StoredSteering, probe_captures

#: Requests that stay, and the tokens that the extreme one has in a step.
SMALL = 56
TOKENS = 8
PROMPT = 1000
NAME = content_hash(VECTOR)


@dataclass
class Cost:
    """Lines of Python of the three parts."""

    admission: int
    step: int
    end: int


def edit(**changes: Any) -> StoredSteering:
    return replace(steering(NAME, [0], "pre_attn"), **changes)


def small(number: int) -> Request:
    captures = [capture(pre_attn=[0])] if number % 2 else []
    return Request(number, 6, 40, captures, [edit(scale=float(number))])


def captured(*captures: StoredCapture) -> Callable[[Rig], Request]:
    return lambda rig: Request(0, PROMPT, PROMPT + 8, captures)


def steered(*entries: StoredSteering) -> Callable[[Rig], Request]:
    return lambda rig: Request(0, PROMPT, PROMPT + 8, (), entries)


def probed(rig: Rig) -> Request:
    labels = limits.MAX_PROBE_LABELS
    weight = np.repeat(WEIGHT, labels, axis=0)
    tensors = [from_numpy(weight), from_numpy(np.zeros(labels, dtype=np.float32))]
    rig.plane.rank_state.vectors.put({content_hash(tensor): tensor for tensor in tensors})
    content = ProbeContent(
        hook="post_block",
        layer=1,
        tensors=[content_hash(tensor) for tensor in tensors],
        labels=[str(at) for at in range(labels)],
        thresholds=[1e9] * labels,
    )
    probes = [
        StoredProbe(name=f"p{at}", digest=content.digest, content=content, tokens=True)
        for at in range(limits.MAX_REQUEST_PROBES)
    ]
    request = Request(0, PROMPT, PROMPT + 8, probe_captures(probes))
    request.tracked.spec.probes.extend(probes)
    return request


def masked(rig: Rig) -> Request:
    """As many masks as a request may have, each at a position of its own."""
    return steered(
        *(
            edit(
                family="replace_masked",
                tensors=[NAME, rig.vector(float(at + 1))],
                numbers=[0.5],
                positions=[at],
            )
            for at in range(limits.MAX_MASKS)
        )
    )(rig)


EVERYWHERE = {hook: [0, 1] for hook in HOOKS}
LONG = list(range(PROMPT))
SEQUENCES = [[at + 1] * limits.MAX_AROUND for at in range(limits.MAX_SEQUENCES)]
TRIGGERS = [Trigger(token_ids=SEQUENCES, after=at) for at in range(limits.MAX_TRIGGERS)]
#: What is at its limit → the request.
EXTREMES: dict[str, Callable[[Rig], Request]] = {
    "captures": captured(
        *(capture(**EVERYWHERE) for _ in range(limits.MAX_FEATURE_SPECS))  # one for each reading
    ),
    "sites": captured(capture(**EVERYWHERE)),
    "positions": captured(capture(LONG, **EVERYWHERE)),
    "window": captured(
        replace(capture(), window=Span(around={"token_ids": SEQUENCES}))  # type: ignore[arg-type]
    ),
    "entries": steered(*[edit(layers=[0, 1])] * limits.MAX_ENTRIES),
    "replacements": steered(*[edit(family="replace", numbers=[0.5])] * limits.MAX_ENTRIES),
    "positions of entries": steered(*(edit(positions=[at]) for at in LONG)),
    "lists of positions": steered(*(edit(positions=LONG[at:]) for at in range(4))),
    "limits": steered(*[edit(limit=0.5)] * limits.MAX_ENTRIES),
    "triggers": steered(*(edit(trigger=trigger) for trigger in TRIGGERS)),
    "masks": masked,
    "probes": probed,
}


class Counted:
    """Lines that a rank's plane runs, without the forward."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._lines = 0
        for name in ("begin", "choose", "plan", "drain"):
            setattr(rig.plane, name, self._counted(getattr(rig.plane, name)))

    def _counted(self, action: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            found: list[Any] = []
            self._lines += python_lines(lambda: found.append(action(*arguments)))
            return found[0]

        return run

    def step(self, *windows: tuple[Request, int, int], **changes: Any) -> int:
        """Take a step; return its lines."""
        self._lines = 0
        self._rig.step(*windows, **changes)
        return self._lines


#: What is at its limit → lines in which a request is admitted, once: some for each of its rows of
#: the steering table, or its recordings, and none for each of their entries.
ADMISSION = dict.fromkeys(("captures", "positions of entries", "masks"), 60_000)


def cost_of(make: Callable[[Rig], Request], folder: Path) -> Cost:
    rig = Rig(
        folder,
        loras=Adapters(),
        steering_rows=SMALL + PROMPT + 8,
        steering_entries=2 * (SMALL + PROMPT) + 16,
        capture_queue_mib=64,
    )
    rig.tokens[0] = [1] * (PROMPT + 8)
    others = [small(number) for number in range(1, SMALL + 1)]
    for first in range(0, SMALL, 8):
        now = others[first : first + 8]
        rig.step(*((each, 0, 6) for each in now), new=now)
    request = make(rig)
    stay = [(each, 6, 1) for each in others]
    laid_out = threading.Event()
    rig.plane.begin([], {}, 0, waiting=[to_msgpack(spec_of(request, rig.tokens[0]))])
    rig.plane._table.prepared.expect(lambda: laid_out.set() or [])  # type: ignore[func-returns-value]
    assert laid_out.wait(60)
    counted = Counted(rig)
    admission = counted.step(*stay, (request, 0, TOKENS), new=[request])
    stay = [(each, 7, 1) for each in others]
    step = counted.step(*stay, (request, TOKENS, TOKENS))
    stay = [(each, 8, 1) for each in others]
    assert not rig.plane._requests.tracked["0"].failure
    end = counted.step(*stay, aborted=[request])
    rig.receipts()
    return Cost(admission, step, end)


@pytest.mark.parametrize("limit", EXTREMES)
def test_a_request_at_a_limit_takes_few_lines_on_the_models_thread(
    limit: str, tmp_path: Path
) -> None:
    found = cost_of(EXTREMES[limit], tmp_path)
    assert found.admission < ADMISSION.get(limit, 25_000)
    assert found.step < 4_000, "as long as others are in the step with it"
    assert found.end < 30_000

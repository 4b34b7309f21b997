"""Every field of a sweep, attribution, dose or fit has an effect, or is refused by its name.

How that is found: `field_kit.py`. A new field fails until it is listed here.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
from edge import HIDDEN, MODEL, Api, Hand
from field_kit import HANDLING, VECTOR, Submission, With, cases, check, check_same, job_of
from ledger_kit import IDENTITY

from midstream.schemas.jobs.models import GradientInfo
from midstream.schemas.jobs.queues import GRADIENTS
from midstream_lab.records.attributions import AttributionRequest
from midstream_lab.records.doses import DoseRequest
from midstream_lab.records.fits import FitRequest, LensFitRequest
from midstream_lab.records.sweeps import SweepRequest

PAIR = {"clean": "hello world a", "corrupt": "hello there a", "answer": " b", "foil": " c"}
SWEEP: dict[str, Any] = HANDLING | {
    "model": "nobody",
    "lora": "nobody",
    "pairs": [PAIR | {"answer": " d"}],
    "hooks": ["attn_out"],
    "layers": "1-2",
    "positions": [1],
    "axis": "together",
    "heads": [0],
    "neurons": {"top": [1]},
    "path": {"receivers": {"layers": [3]}},
    "window": {"layers": 2},
    "metric": "logprob",
    "direction": "noise",
    "ablation": With(
        "zeros", {"pairs": [{"clean": "hello a", "answer": " b"}], "metric": "logprob"}
    ),
    "alignment": With("right", {"pairs": [PAIR | {"clean": "world a"}]}),
    "alpha": 0.5,
    "mask": "0-3",
    "noise": 3,
    "metadata": {"who": "me"},
}
FIT: dict[str, Any] = HANDLING | {
    "model": "nobody",
    "name": "other",
    "layers": 1,
    "seed": 3,
    "rank": 2,
    "description": "what it is",
    "metadata": {"who": "me"},
}
SUBMISSIONS: dict[type[msgspec.Struct], Submission] = {
    SweepRequest: Submission("/v1/sweeps", {"model": MODEL, "pairs": [PAIR]}, SWEEP),
    AttributionRequest: Submission(
        "/v1/attributions",
        {"model": MODEL, "pairs": [PAIR], "seed": 1},
        SWEEP
        | {
            "method": "integrated",
            "steps": With(3, {"method": "integrated"}),
            "verify": {"top": 3},
            "seed": 3,
            "sae": "nobody",
            "keep": 3,
        },
    ),
    DoseRequest: Submission(
        "/v1/doses",
        {
            "model": MODEL,
            "prompts": ["hello world a"],
            "steering": [{"vector": VECTOR}],
            "layers": "1-2",
            "scales": [2.0, -1.0],
            "effect": {"target": " b"},
            "held_out": ["a b c"],
            "max_tokens": 4,
        },
        HANDLING
        | {
            "model": "nobody",
            "prompts": ["hello"],
            "steering": [{"vector": [2.0] * HIDDEN}],
            "scales": [3.0],
            "effect": {"words": ["a"]},
            "held_out": ["a b"],
            "layers": 1,
            "max_tokens": 5,
            "max_loss": 0.5,
            "max_repetition": 0.5,
            "metadata": {"who": "me"},
        },
    ),
    FitRequest: Submission(
        "/v1/modules/fit",
        {
            "model": MODEL,
            "name": "polite",
            "method": "reft",
            "layers": "1-2",
            "examples": [{"prompt": "hello world a", "target": " b"}] * 8,
        },
        FIT
        | {
            "method": "vector",
            "hook": "attn_out",
            "positive": ["hello"],
            "negative": ["hello"],
            "examples": [{"prompt": "hello", "target": " b"}] * 8,
            "read": "all_prompt",
            "positions": [0],
            "held_out": 0.5,
            "steps": 3,
            "batch": 3,
            "learning_rate": 0.5,
            "register": "always",
        },
    ),
    LensFitRequest: Submission(
        "/v1/jacobians/fit",
        {"model": MODEL, "name": "lens", "prompts": ["hello world a b"] * 8, "skip_first": 0},
        FIT | {"prompts": ["hello world"] * 8, "folder": "other", "skip_first": 1, "max_tokens": 3},
    ),
}


@pytest.fixture
def hand(api: Api) -> Iterator[Hand]:
    """A worker by hand that grades, beside one for gradients."""
    with Hand(api.settings, grades=True) as worker:
        facts = {"model": MODEL, "identity": IDENTITY, "dtype": "float32", "device": "cpu"}
        sign = worker.sign(worker="by hand, gradients", queue=GRADIENTS)
        worker.do(worker.ledger.publish_model(GradientInfo(**facts), sign))
        yield worker


@pytest.mark.parametrize("kind", SUBMISSIONS, ids=lambda kind: kind.__name__)
def test_every_field_of_a_submission_is_sent(kind: type[msgspec.Struct]) -> None:
    assert SUBMISSIONS[kind].values.keys() == set(kind.__struct_fields__)


@pytest.mark.parametrize(("kind", "field"), cases(SUBMISSIONS))
def test_a_field_has_an_effect_or_is_refused(
    api: Api, hand: Hand, kind: type[msgspec.Struct], field: str
) -> None:
    check(SUBMISSIONS[kind], field, partial(job_of, api, hand))


@pytest.mark.parametrize("kind", SUBMISSIONS, ids=lambda kind: kind.__name__)
def test_the_same_submission_has_the_same_outcome(
    api: Api, hand: Hand, kind: type[msgspec.Struct]
) -> None:
    check_same(SUBMISSIONS[kind], partial(job_of, api, hand))

"""Every field of a harvest has an effect, or is refused by its name.

How that is found: `field_kit.py`. A new field fails until it is listed here.
"""

from typing import Any

import pytest
from edge import MODEL, Api, Hand
from field_kit import STEERING, Outcome, Submission, check, check_same, named, plain

from midstream_harvest.ledger.harvests import LedgerHarvests
from midstream_harvest.records.harvests import HarvestRequest

SUBMISSION = Submission(
    "/v1/harvests",
    {"model": MODEL, "source": {"lines": ["hello there"]}},
    {
        "model": "nobody",
        "layers": 2,
        "hook": "attn_out",
        "hooks": {"attn_out": 1},
        "source": {"lines": ["hello"]},
        "cut": {"max_length": 3},
        "positions": {"skip_first": 1},
        "at": "after",
        "generate": {"max_tokens": 3},
        "dtype": "float16",
        "shards": {"mib": 3},
        "to": "stream",
        "store": "nowhere",
        "max_tokens": 100,
        "priority": "high",
        "metadata": {"who": "me"},
        "steering": STEERING,
        "lora": "nobody",
    },
)


def test_every_field_of_a_harvest_is_sent() -> None:
    assert SUBMISSION.values.keys() == set(HarvestRequest.__struct_fields__)


@pytest.fixture
def outcome(api: Api, hand: Hand) -> Outcome:
    """Returns the field that a refusal names; else the harvest that is stored."""

    def found(path: str, body: dict[str, Any]) -> Any:
        answer = api.http.post(path, json=body)
        harvests = LedgerHarvests(hand.ledger)
        return named(answer) or plain(hand.do(harvests.stored(answer.json()["id"])))

    return found


@pytest.mark.parametrize("field", SUBMISSION.values)
def test_a_field_has_an_effect_or_is_refused(outcome: Outcome, field: str) -> None:
    check(SUBMISSION, field, outcome)


def test_the_same_submission_has_the_same_outcome(outcome: Outcome) -> None:
    check_same(SUBMISSION, outcome)

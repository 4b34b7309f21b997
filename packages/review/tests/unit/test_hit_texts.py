"""Which tokens does a hit keep, and what is it of?"""

import msgspec
import numpy as np
import pytest

from midstream.schemas.artifacts.conditions import Condition, Decision, StoredPolicy
from midstream.schemas.artifacts.hits import hit_of, text_of, with_text
from midstream.schemas.artifacts.probes import ProbeScore
from midstream.schemas.base.limits import MAX_HIT_AFTER, MAX_HIT_TOKENS
from midstream.schemas.base.records import from_msgpack, to_msgpack
from midstream.schemas.jobs.receipts import Receipt

POLICY = StoredPolicy(
    name="guard",
    version=3,
    digest="d",
    condition=Condition(at_least=1.5),
    actions=["flag", "stop"],
    mode="active",
    acts=True,
    column=1,
    keep_texts=True,
)


def score(position: int, *before: Decision, **policy: object) -> ProbeScore:
    return ProbeScore(
        name="policy:guard",
        digest="d",
        labels=["a", "b"],
        score=[0.0, 2.0],
        positions=9,
        crossed=[None, position],
        policy=msgspec.structs.replace(POLICY, **policy),
        decisions=[*before, Decision(position=position, event="trigger", score=2.0)],
        triggers=1,
    )


def test_a_hit_is_the_first_token_at_which_the_policy_turned_on() -> None:
    released = Decision(position=0, event="release", score=0.5)  # of a latch before
    hit = hit_of(4, score(6, released), POLICY)
    assert hit is not None
    assert hit.request == 4
    assert hit.position == 6
    assert hit.score == 2.0
    assert hit.label == "b"
    assert hit.version == 3
    assert hit.threshold == 1.5
    assert hit.acted
    latched = msgspec.structs.replace(score(6), decisions=[released], triggers=0)
    assert hit_of(4, latched, POLICY) is None
    assert text_of(with_text(latched, range(9), 5)) is None


@pytest.mark.parametrize(("position", "tokens"), [(2, 3), (2, 40), (4000, 5000), (4999, 5000)])
def test_a_text_has_the_tokens_up_to_the_hit_and_a_few_after(position: int, tokens: int) -> None:
    text = text_of(with_text(score(position), range(tokens), prompt_tokens=3))
    assert text is not None
    kept = np.frombuffer(text.token_ids, "<i4").tolist()
    first = max(0, position + 1 - MAX_HIT_TOKENS)
    assert kept == list(range(tokens))[first : position + 1 + MAX_HIT_AFTER]
    assert text.first == first
    assert text.prompt_tokens == 3
    assert kept[position - text.first] == position


def test_a_policy_without_keep_texts_sends_no_token() -> None:
    quiet = score(2, keep_texts=False)
    assert with_text(quiet, range(9), 3) is quiet


def test_an_older_part_of_the_service_reads_a_policy_without_the_field() -> None:
    """What no policy asks for is in no message."""
    packed = to_msgpack(msgspec.structs.replace(POLICY, keep_texts=False))
    assert b"keep_texts" not in packed
    assert from_msgpack(packed, StoredPolicy).keep_texts is False
    assert Receipt.__struct_config__.array_like

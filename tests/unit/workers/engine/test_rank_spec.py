"""Do the ranks hear of everyone's steering and the request's own, and does the prefix cache tell
apart what differs?
"""

from typing import Any

import msgspec
import pytest

from midstream.schemas.jobs.jobs import Job, Sampling, StoredPrompt
from midstream.schemas.prompts.selectors import PositionWindow, RequestedPositions, Span
from midstream.schemas.requests.specs import RankSpec, StoredCapture, StoredSteering
from midstream.schemas.requests.steering import GlobalSteering, SteeringTemplate
from midstream.workers.engine.ranks.rank_spec import rank_spec
from midstream.workers.engine.requests import prompt_request


def template(vector: str, positions: RequestedPositions = "all") -> SteeringTemplate:
    return SteeringTemplate(
        layers=[1], hook="post_block", positions=positions, family="add", tensors=[vector]
    )


def global_steering(*entries: SteeringTemplate) -> GlobalSteering:
    return GlobalSteering(version=7, entries=list(entries))


def job(
    tokens: int, everyones: GlobalSteering, *own: StoredSteering, captures: bool = False
) -> Job:
    capture = StoredCapture(sites={"post_block": [0]}, positions="last_prompt", tag="t")
    return Job(
        id="job",
        tenant="a",
        kind="generate",
        model="m",
        prompts=[StoredPrompt(token_ids=[1] * tokens)],
        sampling=Sampling(),
        created=0.0,
        steering=[list(own)] if own else [],
        captures=[[capture]] if captures else [],
        global_steering=everyones,
    )


def told(tokens: int, everyones: GlobalSteering, *own: StoredSteering) -> RankSpec:
    spec = rank_spec(prompt_request(job(tokens, everyones, *own), 0, 1))
    assert spec is not None
    return spec


def test_plain_requests_have_no_rank_spec() -> None:
    assert rank_spec(prompt_request(job(4, global_steering()), 0, 1)) is None
    captured = rank_spec(prompt_request(job(4, global_steering(), captures=True), 0, 1))
    assert captured.digest == ""
    assert captured.first_affected == -1
    assert captured.global_version == 7
    assert captured.work == "writer"
    assert captured.tenant == "a"


def test_global_entries_are_resolved_per_prompt_without_absent_positions() -> None:
    entries = [
        template("a"),
        template("b", [0, 2, 9]),
        template("c", [9]),
        template("d", Span(start=2)),
        template("e", Span(start=5, stop=8)),
    ]
    spec = told(4, global_steering(*entries))
    placed = {entry.tensors[0]: entry.positions for entry in spec.steering}
    assert placed == {
        "a": "all",
        "b": [0, 2],
        "d": PositionWindow(start=2),
        "e": PositionWindow(start=5, stop=8),
    }
    assert {entry.owner for entry in spec.steering} == {"operator"}


def test_rows_that_may_share_a_token_have_columns_of_their_own() -> None:
    own = [template(name).stored(positions) for name, positions in (("b", [0]), ("c", [1]))]
    spec = told(4, global_steering(template("a")), *own)
    assert [row.column for row in spec.rows] == [0, 1, 1]


def test_requests_untouched_by_global_steering_are_reported() -> None:
    spec = told(4, global_steering(template("a", [9])))
    assert spec.rows == []
    assert spec.digest == ""
    assert spec.first_affected == -1
    assert spec.global_version == 7


@pytest.mark.parametrize(
    ("globally", "own", "first"), [([5], [[3]], 3), ([2], [[3]], 2), ("all_generated", [], 9)]
)
def test_first_touched_position_covers_global_and_own_entries(
    globally: RequestedPositions, own: list[list[int]], first: int
) -> None:
    entries = [template("b").stored(positions) for positions in own]
    assert told(9, global_steering(template("a", globally)), *entries).first_affected == first


@pytest.mark.parametrize(
    ("positions", "by_prompt"),
    [("all", False), ("all_prompt", True), ("all_generated", True), ([1], False)],
)
def test_the_prompt_end_is_in_the_digest_of_global_entries(
    positions: RequestedPositions, by_prompt: bool
) -> None:
    assert told(9, global_steering(template("a", positions))).by_prompt is by_prompt


def test_equal_entries_share_a_cache_digest() -> None:
    own = template("a").stored("all")
    alone = told(4, global_steering(template("a"))).digest
    assert alone == told(4, global_steering(), own).digest
    digests = {
        alone,
        told(4, global_steering(template("b"))).digest,
        told(4, global_steering(template("a"), template("b"))).digest,
        told(4, global_steering(template("b")), own).digest,
        told(4, global_steering(template("a")), template("b").stored("all")).digest,
        told(4, global_steering(template("a", [1]))).digest,
    }
    assert len(digests) == 6


def test_entries_beyond_a_short_prompt_do_not_keep_it_from_sharing_the_cache() -> None:
    # field case 16
    assert (
        told(4, global_steering(template("a"), template("b", [9]))).digest
        == told(4, global_steering(template("a"))).digest
    )


@pytest.mark.parametrize(
    ("positions", "depth"),
    [("all", 7), ("last_prompt", 7), ("all_generated", 1), (PositionWindow(start=4), 1)],
)
def test_captures_without_a_row_make_no_request_deeper(positions: Any, depth: int) -> None:
    capture = StoredCapture(sites={"post_block": [6]}, positions=positions, tag="t")
    asked = job(4, global_steering(), captures=True)
    asked = msgspec.structs.replace(
        asked, sampling=Sampling(max_tokens=0), captures=[[*asked.captures[0], capture]]
    )
    spec = rank_spec(prompt_request(asked, 0, 1), exits=True)
    assert spec is not None
    assert spec.depth == depth
    alone = msgspec.structs.replace(asked, captures=[[capture]])
    assert rank_spec(prompt_request(alone, 0, 1), exits=True).depth == depth

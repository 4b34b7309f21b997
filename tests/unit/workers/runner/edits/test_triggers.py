"""Triggers: whatever steps compute a request's tokens, an edit is where they let it be applied."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from line_kit import python_lines
from msgspec.structs import replace
from plane_kit import VECTOR, Adapters, Rig, probed, steered
from rank_kit import HIDDEN, Request, steering, stream_of, view_of
from trigger_kit import open_of

from midstream.schemas.base.tensors import content_hash
from midstream.schemas.prompts.windows import Trigger
from midstream.schemas.requests.specs import (
    StoredSteering,
    occurrences,
    steering_digest,
    steering_rows,
)
from midstream.workers.runner.edits.triggers import (
    Search,
    SearchTable,
    SharedSearches,
    TriggeredGate,
)

PROMPT = 6
TOTAL = 12


def any_trigger(rng: random.Random) -> Trigger:
    return Trigger(
        token_ids=[[rng.randrange(3) for _ in range(rng.randint(1, 3))] for _ in range(2)],
        after=rng.choice([0, 1, 3, "end"]),
        skip=rng.random() < 0.5,
    )


def search_of(trigger: Trigger, prompt: list[int], table: SearchTable | None = None) -> Search:
    entry = edits(trigger)[0]
    (ends,) = occurrences([entry], prompt).values()
    return Search(table or SearchTable(), trigger, prompt, ends)


def read(*steps: tuple[Search, int, list[int]]) -> list[list[bool]]:
    """At which tokens each is open in a step that computes (search, first position, tokens)."""
    windows = [(str(at), first, len(tokens)) for at, (_, first, tokens) in enumerate(steps)]
    inputs = torch.tensor([token for *_, tokens in steps for token in tokens], dtype=torch.int32)
    view = view_of(*windows, inputs=inputs)
    gates = [TriggeredGate(at, search, 0, 1) for at, (search, _, _) in enumerate(steps)]
    starts = np.cumsum(view.counts) - view.counts
    closed = np.zeros((view.num_rows, 2), dtype=bool)
    SharedSearches(gates, starts, view).decide(view, closed, lambda *_: pytest.fail("unknown"))
    return [part.tolist() for part in np.split(~closed[:, 1], starts[1:])]


@dataclass
class Reader:
    """A request whose tokens a trigger reads."""

    rng: random.Random
    table: SearchTable

    def __post_init__(self) -> None:
        self.trigger = any_trigger(self.rng)
        self.counted = 0
        self.tokens = [self.rng.randrange(3) for _ in range(60)]
        self.search = search_of(self.trigger, self.tokens[:30], self.table)
        self.right = open_of(self.trigger, self.tokens)
        self.cached = self.rng.choice([0, 7])
        self.first = self.cached
        self.reached = self.cached

    def window(self) -> tuple[Search, int, list[int]]:
        self.stop = min(self.first + self.rng.choice([1, 1, 1, 9]), len(self.tokens))
        drafts = self.rng.choice([0, 0, 2]) if self.stop > 30 else 0  # of generated tokens
        self.drafts = [self.rng.randrange(3) for _ in range(drafts)]
        return self.search, self.first, self.tokens[self.first : self.stop] + self.drafts

    def check(self, opened: list[bool]) -> bool:
        """Whether the request goes on."""
        first = self.first
        stop = self.stop
        assert opened[: stop - first] == self.right[first:stop]
        self.counted += sum(opened[max(self.reached - first, 0) :])
        self.reached = max(self.reached, stop + len(self.drafts))
        preempted = self.rng.random() < 0.1
        self.first = self.rng.randrange(stop + 1) if preempted else stop
        return self.first < len(self.tokens)


@pytest.mark.parametrize("seed", range(20))
def test_chunks_drafts_preemptions_and_cached_tokens_open_the_same_positions(seed: int) -> None:
    rng = random.Random(seed)
    table = SearchTable()
    waiting = [Reader(rng, table) for _ in range(6)]
    live = list[Reader]()
    while live or waiting:
        while waiting and len(live) < 3:  # those that follow have the slots of those before
            live.append(waiting.pop())
        left = list[Reader]()
        opened = read(*(each.window() for each in live))
        for each, found in zip(live, opened, strict=True):
            if each.check(found):
                left.append(each)
                continue
            miscounted = each.search.miscounted(range(each.reached), len(each.tokens))
            assert each.counted - miscounted == sum(each.right[each.cached :]), "what was applied"
        live = left


def test_a_slot_tells_the_next_request_nothing_of_the_one_before() -> None:
    table = SearchTable()
    trigger = Trigger(token_ids=[[1, 1]], after="end")
    read((search_of(trigger, [1, 1], table), 0, [1, 1, 1, 1]))
    assert read((search_of(trigger, [0, 1], table), 0, [0, 1, 0, 1])) == [[False] * 4]


def test_a_step_of_many_triggers_takes_as_many_lines_of_python_as_one_of_few() -> None:
    def lines(requests: int, sequences: list[list[int]]) -> int:
        table = SearchTable()
        trigger = Trigger(token_ids=sequences)
        view = view_of(*((str(at), 300, 1) for at in range(requests)), inputs=torch.ones(requests))
        gates = [
            TriggeredGate(at, search_of(trigger, [1] * 300, table), 0, 1) for at in range(requests)
        ]
        searches = SharedSearches(gates, np.arange(requests), view)
        closed = np.zeros((requests, 2), dtype=bool)
        found = python_lines(lambda: searches.decide(view, closed, lambda *_: None))
        assert not closed[:, 1].any()
        return found

    assert lines(64, [[1] * length for length in range(240, 256)]) == lines(1, [[1]])


def test_a_trigger_begins_without_a_search_of_its_prompt_on_the_models_thread() -> None:
    """The process that sends a request has searched its prompt."""

    def lines(length: int, tokens: int) -> int:
        trigger = Trigger(token_ids=[[1] * length])
        prompt = [1] * tokens
        table = SearchTable()
        (ends,) = occurrences(edits(trigger), prompt).values()
        return python_lines(lambda: Search(table, trigger, prompt, ends))

    assert lines(256, 3000) < 2 * lines(1, 30)  # its table may have to grow


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, loras=Adapters())


def edits(*triggers: Trigger | None, **changes: Any) -> list[StoredSteering]:
    """An edit by 2 · 10ⁿ for the n-th."""
    plain = steering(content_hash(VECTOR), [0], "pre_attn")
    return [
        replace(plain, scale=10.0**number, **({"trigger": trigger} if trigger else {}), **changes)
        for number, trigger in enumerate(triggers)
    ]


def run(rig: Rig, *requests: Request, step: int = 2) -> dict[int, list[float]]:
    """Request → what was added to its stream at each position, in steps of `step` tokens each."""
    added: dict[int, list[float]] = {request.number: [] for request in requests}
    for first in range(0, TOTAL, step):
        rig.step(*((each, first, step) for each in requests), new=() if first else requests)
        left = rig.left("pre_attn", 0)[:, 0].reshape(len(requests), step)
        for request, row in zip(requests, left, strict=True):
            plain = stream_of(request.number, "pre_attn", 0, first, step)[:, 0]
            added[request.number] += (row - plain).tolist()
    rig.step(finished=requests)
    return added


TOKENS = [0, 1, 2, 2, 1, 0, 2, 3, 1, 0, 2, 3]
AT_1 = Trigger(token_ids=[[1]])
FROM_23 = Trigger(token_ids=[[2, 3]], after="end")


@pytest.mark.parametrize("step", [1, 2, 4])
def test_each_request_of_a_step_has_its_own_triggers(rig: Rig, step: int) -> None:
    until_1 = Trigger(token_ids=[[1]], after="end", skip=True)
    entries = {1: edits(AT_1, FROM_23), 2: edits(until_1, None), 3: edits(None)}
    rig.tokens |= {1: TOKENS, 2: [0, 0, 0, *TOKENS], 3: TOKENS}
    requests = [Request(number, PROMPT, TOTAL, (), own) for number, own in entries.items()]
    added = run(rig, *requests, step=step)
    for request in requests:
        tokens = rig.tokens[request.number][:TOTAL]
        wanted = [0.0] * TOTAL
        for number, entry in enumerate(request.steering):
            opened = open_of(entry.trigger, tokens) if entry.trigger else [True] * TOTAL
            wanted = [
                each + 2 * 10**number * here for each, here in zip(wanted, opened, strict=True)
            ]
        assert added[request.number] == wanted
    counts = {job: receipt.applied for job, receipt in rig.told().items()}
    assert counts == {"j1": 3 + 4, "j2": 4 + 11, "j3": 11}, "the last token has no row"


def test_lists_of_positions_in_one_column_keep_their_triggers(rig: Rig) -> None:
    lists = [[0, 1, 2], [3, 4, 5]]
    own = [edits(trigger, positions=at) for trigger, at in zip((AT_1, None), lists, strict=True)]
    request = Request(1, PROMPT, TOTAL, (), [entry for each in own for entry in each])
    rig.tokens[1] = TOKENS
    assert run(rig, request)[1] == [0.0, 2.0, 0.0, 2.0, 2.0, 2.0] + [0.0] * 6


def test_an_edit_with_a_gate_and_a_trigger_needs_both(rig: Rig) -> None:
    first = float(stream_of(1, "post_block", 1, 0, 1)[0, 0])  # at position p it is larger by p
    weight = np.full((1, HIDDEN), 1 / HIDDEN, dtype=np.float32)
    request = probed(rig, "steer", weight=weight, threshold=first + 8, total=TOTAL)
    request.steer(*edits(AT_1, gate=request.tracked.spec.probes[0].name))
    rig.tokens[1] = [0, 1, 0, 1, 0, 1, 0, 1, 0, 0, 1, 1]
    assert run(rig, request, step=1)[1] == [0.0] * 10 + [2.0, 2.0]
    assert rig.told()["j1"].applied == 1, "the last token has no row"


def test_a_step_whose_tokens_are_unknown_fails_no_request_without_a_trigger(rig: Rig) -> None:
    request = Request(1, PROMPT, TOTAL, (), edits(AT_1))
    other = steered(2)
    rig.tokens |= {1: TOKENS, 2: TOKENS}
    rig.step((request, 0, 6), (other, 0, 6), new=[request, other])
    rig.step((request, 8, 1), (other, 6, 1))  # what it has at 6 and 7 was never computed
    rig.step(finished=[request, other])
    receipts = rig.told()
    assert receipts["j1"].kind == "intervention_failed"
    assert "before position 8 are unknown" in receipts["j1"].message
    assert receipts["j2"].status == "ok"


def test_a_search_that_cannot_be_made_fails_its_request_alone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(1, PROMPT, TOTAL, (), edits(AT_1, None))
    other = steered(2)
    with monkeypatch.context() as patch:
        patch.setattr(SearchTable, "take", Mock(side_effect=MemoryError("no room")))
        rig.step((request, 0, 6), (other, 0, 6), new=[request, other])
    rig.step((request, 6, 1), (other, 6, 1))
    rig.step(finished=[request, other])
    told = rig.told()
    assert told["j1"].status == "error"
    assert told["j1"].kind == "intervention_failed"
    assert told["j2"].status == "ok"


@pytest.mark.parametrize("limit", [0.0, -1e-6], ids=["no limit", "a limit that fails"])
def test_an_edit_that_only_a_rejected_draft_opened_leaves_nothing(rig: Rig, limit: float) -> None:
    on_9 = replace(edits(Trigger(token_ids=[[9]]))[0], limit=limit)
    request = Request(1, PROMPT, TOTAL, (), [on_9])
    rig.tokens[1] = [0] * 7 + [9] + [0] * 4
    rig.step((request, 0, 6), new=[request])
    rig.step((request, 6, 2))  # the second one is a draft
    rig.tokens[1] = [0] * TOTAL
    for first in range(7, TOTAL - 1):
        rig.step((request, first, 1))
    receipt = rig.ended(request)
    assert receipt.status == "ok"
    assert receipt.applied == 0
    assert receipt.sizes == []


def test_a_trigger_is_part_of_a_digest_and_of_a_row() -> None:
    each = [*edits(None), *edits(AT_1), *edits(replace(AT_1, skip=True)), *edits(FROM_23)]
    assert len({steering_digest([entry]) for entry in each}) == len(each)
    assert [row.entries[0].trigger for row in steering_rows([*each, *each])] == [
        entry.trigger for entry in each
    ]

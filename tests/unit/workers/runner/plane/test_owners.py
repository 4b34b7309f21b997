"""Does nothing that a request wishes change what the operator's edits and policies do to it?"""

import itertools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from plane_kit import WEIGHT, Adapters, Rig, for_everyone, probed
from rank_kit import HIDDEN, Request, capture, steering, stream_of

from midstream.api.resolve.admission.admission import under_limit
from midstream.api.resolve.admission.fits import expanded
from midstream.schemas.artifacts.loras import LoraUse
from midstream.schemas.artifacts.probes import Condition, Schedule, StoredPolicy
from midstream.schemas.base import EditLimit
from midstream.schemas.jobs.doses import DoseRequest
from midstream.schemas.jobs.jobs import Job, Sampling, StoredPrompt
from midstream.schemas.jobs.receipts import Receipt
from midstream.schemas.prompts.selectors import select
from midstream.schemas.requests.harvest_work import HARVEST, HarvestPlace
from midstream.schemas.requests.specs import StoredSteering, probe_captures
from midstream.schemas.requests.steering import SteeringTemplate

PROMPT, TOTAL = 4, 7
SITES = [("pre_attn", 0), ("mlp_out", 0), ("post_block", 1)]
#: Scores grow or fall with the position.
SLOPE = float(WEIGHT.sum())


class Asked:
    """A request: what the operator adds to it, and what it wishes itself."""

    def __init__(self, rig: Rig, rng: random.Random, job: str) -> None:
        self.rig, self.rng, self.job = rig, rng, job
        self.everyone: list[SteeringTemplate] = []
        self.policies: list[StoredPolicy] = []
        self.entries: list[StoredSteering] = []  # its own, and those of policies
        self.captures: list[Any] = []
        self.fields: dict[str, Any] = {}  # of its spec
        self.together = 1  # requests in each step

    def add(self, entry: StoredSteering, **changes: Any) -> None:
        self.entries.append(msgspec.structs.replace(entry, **changes))

    def own(self, family: str = "add", limit: float = 0.0) -> None:
        hook, layer = self.rng.choice(SITES)
        positions = self.rng.choice(["all", "all_generated", "all_prompt", [0, 2]])
        vector = self.rig.vector(self.rng.choice([-9.0, 0.5, 4000.0]))
        self.add(steering(vector, [layer], hook, positions, family), limit=limit)

    def through(self, change: Callable[[Job], Job]) -> None:
        """Apply what admission does to the steering of a job."""
        job = Job(
            id="j",
            kind="generate",
            model="m",
            prompts=[StoredPrompt(token_ids=list(range(PROMPT)))],
            sampling=Sampling(max_tokens=TOTAL - PROMPT),
            created=0.0,
            steering=[self.entries],
        )
        self.entries = self.rng.choice(change(job).steering)


def globally(asked: Asked) -> None:
    hook, layer = asked.rng.choice(SITES)
    asked.everyone.append(
        SteeringTemplate(
            layers=[layer],
            hook=hook,
            positions="all",
            family="add",
            tensors=[asked.rig.vector(asked.rng.choice([3.0, 250.0]))],
            limit=asked.rng.choice([0.0, 0.01]),
        )
    )


def policy(asked: Asked) -> None:
    name, row = f"p{len(asked.policies)}", stream_of(1, "post_block", 1, 0, TOTAL)[:, 0]
    asked.policies.append(
        StoredPolicy(
            name=name,
            version=1,
            digest=name,
            condition=Condition(
                at_least=SLOPE * (float(asked.rng.choice(row)) - 0.5),
                schedule=Schedule(tokens=asked.rng.choice(["all", "generated"])),
            ),
            actions=["flag", asked.rng.choice(["stop", "steer", "webhook"])],
            mode="active",
            acts=True,
        )
    )
    if "steer" in asked.policies[-1].actions:
        hook, layer = asked.rng.choice(SITES)
        made = steering(asked.rig.vector(70.0), [layer], hook, "all_generated")
        asked.add(made, gate=f"policy:{name}", owner="operator")


def limited(relative: float, then: Any) -> Callable[[Asked], None]:
    return lambda asked: asked.through(
        lambda job: under_limit(job, EditLimit(relative=relative, then=then))
    )


def dosed(asked: Asked) -> None:
    body: dict[str, Any] = {"model": "m", "prompts": ["x"], "steering": [{}], "held_out": ["z"]}
    body |= {"scales": [-1.0, 0.5, 3.0], "effect": {"words": ["y"]}}
    asked.own()
    asked.through(lambda job: expanded(job, msgspec.convert(body, DoseRequest), [None]))


def harvested(asked: Asked) -> None:
    place = HarvestPlace(
        uri=f"file://{asked.rig.directory}/harvest",
        key=f"s{asked.rng.random()}",
        index=0,
        sequences=1,
        spans=[(0, 0, 0, TOTAL - 1)],
    )
    asked.captures.append(
        msgspec.structs.replace(capture(), tag=HARVEST, consumers=[HARVEST], harvest=place)
    )


#: What a request may wish.
WISHES: dict[str, Callable[[Asked], None]] = {
    "edit": Asked.own,
    "patch": lambda asked: asked.own("replace"),
    "scaled": lambda asked: asked.own(limit=asked.rng.choice([1e-6, 1e-3, 0.3])),
    "failing": lambda asked: asked.own(limit=-asked.rng.choice([1e-6, 1e-3, 0.3])),
    "tenant's limit": limited(1e-4, "scale"),
    "tenant's failing limit": limited(1e-4, "fail"),
    "dose": dosed,
    "capture": lambda asked: asked.captures.append(capture()),
    "capture in memory": lambda asked: asked.captures.append(
        msgspec.structs.replace(capture(), consumers=["memory"])
    ),
    "harvest": harvested,
    "stream": lambda asked: asked.fields.update(stream_scores=True),
    "adapter": lambda asked: asked.fields.update(lora=LoraUse("a", "d")),
    "more requests": lambda asked: setattr(asked, "together", 3),
}


def ran(asked: Asked) -> dict[tuple[str, int], np.ndarray]:
    """Run the request to its end; return what left each site: float32 `[tokens, HIDDEN]`."""
    requests = []
    for number in range(1, 1 + asked.together):
        (probe,) = probed(asked.rig, "none", number).tracked.spec.probes
        watching = [
            msgspec.structs.replace(probe, name=f"policy:{each.name}", policy=each)
            for each in asked.policies
        ]
        captures = [*asked.captures, *probe_captures(watching)]
        request = Request(
            number, PROMPT, TOTAL, captures, asked.entries, for_everyone(1, *asked.everyone)
        )
        request.tracked.spec = msgspec.structs.replace(
            request.tracked.spec, job=f"{asked.job}.{number}", probes=watching, **asked.fields
        )
        requests.append(request)
    parts: dict[tuple[str, int], list[np.ndarray]] = {site: [] for site in SITES}
    for first, count in ((0, PROMPT), *((at, 1) for at in range(PROMPT, TOTAL - 1))):
        windows = [(request, first, count) for request in requests]
        asked.rig.step(*windows, new=requests if not first else [])
        for site, rows in parts.items():
            rows.append(asked.rig.left(*site)[:count].copy())
    asked.rig.step(finished=requests)
    return {site: np.concatenate(rows) for site, rows in parts.items()}


def beside(
    asked: Asked, left: dict[tuple[str, int], np.ndarray]
) -> tuple[dict[tuple[str, int], np.ndarray], int]:
    """Return `left`, of the operator's edits alone, with the request's own edits; and the first
    position at which these fail it.
    """
    result, failing = {site: rows.astype(np.float64) for site, rows in left.items()}, TOTAL
    for (hook, layer), rows in result.items():
        here = [entry for entry in asked.entries if (entry.hook, entry.layers) == (hook, [layer])]
        for position, before in enumerate(stream_of(1, hook, layer, 0, len(rows))[:, 0].tolist()):
            mine = [
                entry
                for entry in here
                if entry.owner == "request"
                and position in select(entry.positions, 0, TOTAL, PROMPT)
            ]
            edit = 0.0
            for entry in sorted(mine, key=lambda entry: entry.family == "add"):
                (number, *_) = asked.rig.plane._table.vectors.get(entry.tensors[0], [HIDDEN])
                number = float(number) * entry.scale
                edit = edit + number if entry.family == "add" else number - before
            size = abs(edit / before)
            most = min((entry.limit for entry in mine if entry.limit > 0), default=math.inf)
            fails = min((-entry.limit for entry in mine if entry.limit < 0), default=math.inf)
            if size > fails and fails <= most:
                failing = min(failing, position)
            rows[position] += edit * min(1.0, most / size if size else 1.0)
    return result, failing


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, steering_rows=40, steering_entries=200, loras=Adapters())


#: Every pair of wishes; with six draws of the operator's features, 546.
PAIRS = list(itertools.combinations_with_replacement(WISHES, 2))


@pytest.mark.slow("546 pairs, in six parts")
@pytest.mark.parametrize("part", range(6))
def test_no_wish_of_a_request_changes_what_the_operator_does(rig: Rig, part: int) -> None:
    fails: list[int] = []
    for number, pair in enumerate(PAIRS):
        rng = random.Random(len(PAIRS) * part + number)
        alone, wishing = Asked(rig, rng, f"alone{number}"), Asked(rig, rng, f"wishing{number}")
        for _ in range(rng.randint(1, 2)):
            rng.choice((globally, policy))(alone)
        wishing.everyone, wishing.policies = alone.everyone, alone.policies
        wishing.entries = list(alone.entries)
        for wish in pair:
            WISHES[wish](wishing)
        wanted, failing = beside(wishing, ran(alone))
        found = ran(wishing)
        for site in SITES:
            assert np.allclose(found[site][:failing], wanted[site][:failing], rtol=2e-6), (
                f"{pair}, part {part}, {site}"
            )
        fails.append(failing)
    receipts = rig.told()
    for number, (pair, failing) in enumerate(zip(PAIRS, fails, strict=True)):
        theirs, mine = receipts[f"alone{number}.1"], receipts[f"wishing{number}.1"]
        where = f"{pair}, part {part}"
        assert (theirs.status, mine.status == "ok") == ("ok", failing == TOTAL), where
        assert decided(theirs, failing) == decided(mine, failing), where
    assert 0 < sum(failing < TOTAL for failing in fails) < len(PAIRS) / 2


def decided(receipt: Receipt, stop: int) -> list[Any]:
    """Return the decisions of each policy about tokens before `stop`."""
    return [
        (score.name, [decision for decision in score.decisions if decision.position < stop])
        for score in receipt.scores
    ]

"""Does nothing that a request wishes change what the operator's edits and policies do to it?

A request may wish for edits, whose effect is added to what is expected, or for edits without an
effect of every family, beside which the operator's do bit for bit what they do alone.
"""

import itertools
import math
import os
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
from midstream.schemas.artifacts.conditions import Condition, Schedule, StoredPolicy
from midstream.schemas.artifacts.loras import LoraUse
from midstream.schemas.artifacts.probes import StoredProbe
from midstream.schemas.base.edit_sizes import EditLimit
from midstream.schemas.base.records import to_msgpack
from midstream.schemas.base.tensors import content_hash, from_numpy
from midstream.schemas.jobs.jobs import Job, Sampling, StoredPrompt
from midstream.schemas.jobs.receipts import Receipt
from midstream.schemas.prompts.selectors import HOOKS, Span, select
from midstream.schemas.prompts.windows import Around, HeadAndTail, Trigger, When
from midstream.schemas.requests.interventions import FAMILIES, FAMILY, TENSORS
from midstream.schemas.requests.specs import StoredSteering, probe_captures
from midstream.schemas.requests.steering import SteeringTemplate
from midstream_harvest.names import HARVEST
from midstream_harvest.records.work import HarvestPlace
from midstream_lab.admit.doses import expanded
from midstream_lab.records.doses import DoseRequest

PROMPT = 4
TOTAL = 7
SITES = [("pre_attn", 0), ("mlp_out", 0), ("post_block", 1)]
#: Scores grow or fall with the position.
SLOPE = float(WEIGHT.sum())


class Asked:
    """A request: what the operator adds to it, and what it wishes itself."""

    def __init__(self, rig: Rig, rng: random.Random, job: str) -> None:
        self.rig = rig
        self.rng = rng
        self.job = job
        self.everyone: list[SteeringTemplate] = []
        self.policies: list[StoredPolicy] = []
        self.entries: list[StoredSteering] = []  # its own, and those of policies
        self.captures: list[Any] = []
        self.probes: list[StoredProbe] = []  # its own
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
    name = f"p{len(asked.policies)}"
    row = stream_of(1, "post_block", 1, 0, TOTAL)[:, 0]
    asked.policies.append(
        StoredPolicy(
            name=name,
            version=1,
            digest=f"{asked.job} {name}",  # ranks know a condition by it
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
        msgspec.structs.replace(
            capture(), tag=HARVEST, consumers=[HARVEST], place=to_msgpack(place)
        )
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
            *asked.probes,
            *(
                msgspec.structs.replace(
                    probe, name=f"policy:{each.name}", policy=each, actions=each.actions
                )
                for each in asked.policies
            ),
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
    result = {site: rows.astype(np.float64) for site, rows in left.items()}
    failing = TOTAL
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
                number, *_ = asked.rig.plane._table.vectors.get(entry.tensors[0], [HIDDEN])
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


@pytest.mark.slow("91 pairs in each part")
@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.long] if part > 1 else []) for part in range(6)]
)
def test_no_wish_of_a_request_changes_what_the_operator_does(rig: Rig, part: int) -> None:
    fails: list[int] = []
    for number, pair in enumerate(PAIRS):
        rng = random.Random(len(PAIRS) * part + number)
        alone = Asked(rig, rng, f"alone{number}")
        wishing = Asked(rig, rng, f"wishing{number}")
        for _ in range(rng.randint(1, 2)):
            rng.choice((globally, policy))(alone)
        wishing.everyone = alone.everyone
        wishing.policies = alone.policies
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
        theirs = receipts[f"alone{number}.1"]
        mine = receipts[f"wishing{number}.1"]
        where = f"{pair}, part {part}"
        assert theirs.status == "ok", where
        assert (mine.status == "ok") == (failing == TOTAL), where
        stop = min(failing, stopped(theirs))
        assert decided(theirs, stop) == decided(mine, stop), where
    assert 0 < sum(failing < TOTAL for failing in fails) < len(PAIRS) / 2


def stopped(receipt: Receipt) -> int:
    """Return how many tokens policies decide about before one ends the request, as an engine
    would: what fails later is reported up to there.
    """
    triggers = [score.crossed[0] for score in receipt.scores if "stop" in score.actions]
    return min((position + 1 for position in triggers if position is not None), default=TOTAL)


def decided(receipt: Receipt, stop: int) -> list[Any]:
    """Return the decisions of each policy about tokens before `stop`. (The last bit of a score
    may depend on how many rows are scored together.)
    """
    return [
        (
            score.name,
            [(each.position, each.event) for each in score.decisions if each.position < stop],
        )
        for score in receipt.scores
        if score.policy is not None
    ]


# --- Edits without an effect, beside everything that the operator may add

#: A number of a family → its value where it has an effect.
NUMBERS = {"strength": 0.5, "alpha": 0.5, "scale": 0.3, "low": -2.0, "high": 3.0, "target": 7.0}
#: Tokens of every request, and one of none.
TOKENS = range(1000, 1000 + TOTAL)
NEVER = [[5]]
MOST_POLICIES = 16


def edit(asked: Asked, family: str, **changes: Any) -> StoredSteering:
    """Return an edit of this family, with random tensors, somewhere."""
    made = FAMILY[family]
    rank = 2 if FAMILY[family].ranked else 0
    names = []
    for name, shape in zip(made.tensors, made.shapes(rank, HIDDEN), strict=True):
        values = np.array([asked.rng.uniform(-3, 3) for _ in range(math.prod(shape))], np.float32)
        values = (values > 0).astype(np.float32) if TENSORS[name].symbol == "m" else values
        tensor = from_numpy(values.reshape(shape))
        asked.rig.plane.rank_state.vectors.put({content_hash(tensor): tensor})
        names.append(content_hash(tensor))
    hook, layer = asked.rng.choice(SITES)
    positions = asked.rng.choice(["all", "all_generated"])
    numbers = [NUMBERS.get(number.name, 0.0) for number in made.numbers]
    entry = steering(names, [layer], hook, positions, family, numbers, rank=rank)
    return msgspec.structs.replace(entry, **changes)


def trigger(asked: Asked) -> Trigger:
    """Return one of four that open somewhere."""
    place = asked.rng.randrange(4)
    return Trigger(token_ids=[[TOKENS[place]]], after=("end", 0, 1, 2)[place], skip=place == 3)


def of_operator(asked: Asked, family: str) -> StoredSteering:
    """Return an edit of the operator's, with or without a limit and a trigger."""
    return edit(
        asked,
        family,
        owner="operator",
        limit=asked.rng.choice([0.0, 0.01, 0.2]),
        trigger=asked.rng.choice([msgspec.UNSET, trigger(asked)]),
    )


def everywhere(asked: Asked, family: str) -> None:
    entry = msgspec.structs.asdict(of_operator(asked, family))
    asked.everyone.append(
        SteeringTemplate(**{name: entry[name] for name in SteeringTemplate.__struct_fields__})
    )


def policies(asked: Asked, family: str, most: int = 1) -> None:
    """Add policies, of which at most eight steer: four of all traffic, and four that it names."""
    for _ in range(most):
        policy(asked)
        steers = [entry for entry in asked.entries if entry.gate]
        if len(steers) > 8:
            asked.entries.remove(steers[-1])
        elif steers and steers[-1].gate == f"policy:{asked.policies[-1].name}":
            made = of_operator(asked, family)
            asked.entries[-1] = msgspec.structs.replace(
                made, gate=steers[-1].gate, positions="all_generated"
            )


def sixteen(asked: Asked, family: str) -> None:
    policies(asked, family, MOST_POLICIES)


def without_effect(family: str) -> Callable[[Asked], None]:
    def wish(asked: Asked) -> None:
        entry = edit(asked, family)
        asked.add(msgspec.structs.replace(entry, scale=0.0, numbers=[0.0, *entry.numbers[1:]]))
        if not entry.numbers:
            asked.entries[-1] = msgspec.structs.replace(asked.entries[-1], numbers=[])

    return wish


def own_probe(asked: Asked, name: str = "p0", action: str = "flag") -> None:
    """Score the request with a probe of a policy's name."""
    if name not in (probe.name for probe in asked.probes):
        (probe,) = probed(asked.rig, "none").tracked.spec.probes
        asked.probes.append(msgspec.structs.replace(probe, name=name, actions=[action]))


def own_gate(asked: Asked) -> None:
    own_probe(asked, "gate", "steer")
    asked.add(edit(asked, "add", gate="gate", positions="all_generated", scale=0.0))


def full(asked: Asked) -> None:
    """Steer with all the rows and triggers that a request may have."""
    for number in range(4 - len({entry.positions for entry in asked.entries if not entry.gate})):
        never = Trigger(token_ids=[[5 + number]])
        asked.add(edit(asked, "ablate", trigger=never, limit=1e-9 * (1 + number)))


def windows(asked: Asked) -> None:
    own_probe(asked)
    for window in (
        Span(last=2),
        Span(head_and_tail=HeadAndTail(head=1, tail=2)),
        Span(around=Around(token_ids=[[TOKENS[2]]], before=1)),
        Span(when=When(probe="p0", at_least=0.0)),
    ):
        made = msgspec.structs.replace(capture(), window=window, tag=f"w{len(asked.captures)}")
        asked.captures.append(made)


def everything(asked: Asked) -> None:
    """Capture every site, before and after."""
    for at in ("before", "after"):
        made = capture(at=at, **{hook: [0, 1] for hook in HOOKS})
        asked.captures.append(msgspec.structs.replace(made, tag=f"{at}{len(asked.captures)}"))


#: Wishes that change no row.
NULLS: dict[str, Callable[[Asked], None]] = {
    **{f"no {family.name}": without_effect(family.name) for family in FAMILIES},
    "tiny": lambda asked: asked.add(edit(asked, asked.rng.choice(EDITS), limit=1e-9)),
    "closed": lambda asked: asked.add(
        edit(asked, asked.rng.choice(EDITS), trigger=Trigger(token_ids=NEVER))
    ),
    "full": full,
    "own probe": own_probe,
    "own gate": own_gate,
    "windows": windows,
    "every site": everything,
    **{name: WISHES[name] for name in ("capture in memory", "harvest", "stream", "adapter")},
    "more requests": WISHES["more requests"],
}
EDITS = [family.name for family in FAMILIES]
NULL_PAIRS = list(itertools.combinations_with_replacement(NULLS, 2))


# More parts draw other features of the operator's beside the same pairs: three are 630.
@pytest.mark.slow("210 pairs in each part")
@pytest.mark.parametrize("part", range(int(os.environ.get("MIDSTREAM_OWNERS_PARTS", "1"))))
def test_beside_edits_without_effect_the_operators_do_what_they_do_alone(
    tmp_path: Path, part: int
) -> None:
    rig = Rig(tmp_path, steering_rows=96, steering_entries=1600, loras=Adapters())
    for number, pair in enumerate(NULL_PAIRS):
        rng = random.Random(len(NULL_PAIRS) * part + number)
        alone = Asked(rig, rng, f"alone{number}")
        wishing = Asked(rig, rng, f"wishing{number}")
        for feature in rng.choices((everywhere, policies, sixteen), weights=(4, 4, 1), k=2):
            if len(alone.policies) < MOST_POLICIES - 1 or feature is everywhere:
                feature(alone, rng.choice(EDITS))
        wishing.everyone = alone.everyone
        wishing.policies = alone.policies
        for wish in pair:
            NULLS[wish](wishing)
        wishing.entries += alone.entries
        wanted = ran(alone)
        found = ran(wishing)
        for site in SITES:
            assert np.allclose(found[site], wanted[site], rtol=2e-6), f"{pair}, {part}, {site}"
    receipts = rig.told()
    for number, pair in enumerate(NULL_PAIRS):
        theirs = receipts[f"alone{number}.1"]
        mine = receipts[f"wishing{number}.1"]
        assert theirs.status == mine.status, f"{pair}, {part}"
        assert theirs.message == mine.message, f"{pair}, {part}"
        assert decided(theirs, TOTAL) == decided(mine, TOTAL), f"{pair}, {part}"

"""Requests drawn from a seed, what each token's row is at each site, and what each request's
captures must therefore hold.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
from trigger_kit import open_of

from midstream import __version__
from midstream.schemas.artifacts.probes import ProbeAction, ProbeContent, StoredProbe
from midstream.schemas.base.tensors import Tensor, content_hash, from_numpy
from midstream.schemas.model.banks import BANK, RESIDUAL, RowShape
from midstream.schemas.prompts.selectors import lowest_position, select
from midstream.schemas.prompts.windows import Trigger
from midstream.schemas.requests.source_runs import RunRow, row_name, run_key
from midstream.schemas.requests.specs import (
    RankSpec,
    StoredCapture,
    StoredSteering,
    occurrences,
    probe_captures,
    steering_digest,
    steering_rows,
    with_columns,
)

#: What may decide where a request's steering is applied, beside its positions.
Decides = Literal["nothing", "probes", "tokens"]
LAYERS = 2
#: Hooks of the residual bank, and of the second bank.
STREAM = ("pre_attn", "post_attn", "post_block")
INSIDE = ("q", "z")
SHAPE = RowShape(heads=2, width=3)
WIDTHS = {RESIDUAL: 8, "query": SHAPE.size}
#: Every site of the rank by bank, in the order of its plan.
SITES = {
    RESIDUAL: [(hook, layer) for layer in range(LAYERS) for hook in STREAM],
    "query": [(hook, layer) for layer in range(LAYERS) for hook in INSIDE],
}
_NUMBERS = {site: number for number, site in enumerate(SITES[RESIDUAL] + SITES["query"])}
#: Tokens of a block of the prefix cache.
BLOCK = 4
#: Contents of tokens: of shared prompts, of each request, and of what is computed and not kept.
_OWN = 2_000
_JUNK = 100_000
#: The site that probes read, the request whose capture becomes a source run, and its tag.
PROBED_SITE = ("post_block", 1)
SOURCE = 0
SOURCE_TAG = "source"
WEIGHT = np.arange(1, WIDTHS[RESIDUAL] + 1, dtype=np.float32)[None]


def rows_at(site: tuple[str, int], contents: np.ndarray) -> np.ndarray:
    """Return the rows of tokens at a site before its edits: float32 `[tokens, width]`, small
    integers, which every dtype holds, and which name the token and the site.
    """
    number = _NUMBERS[site]
    width = WIDTHS[BANK[site[0]]]  # type: ignore[index]
    columns = [
        contents % 64,
        contents // 64 % 64,
        contents // 4096,
        np.full_like(contents, number),
        *((contents * 31 + number * 17 + column * 7) % 61 for column in range(4, width)),
    ]
    return np.stack(columns, axis=1).astype(np.float32)


def vector(number: int, bank: str) -> Tensor:
    """Return the vector `[number, …]` of a bank's width."""
    return from_numpy(np.full(WIDTHS[bank], number, dtype=np.float32))


@dataclass
class Asked:
    """A request: what it asks for, and how its life goes."""

    number: int
    group: int  # requests of a group share the beginning of their prompt; −1: it is alone
    shared: int  # this many tokens
    prompt: int
    total: int  # prompt and generated
    spec: RankSpec = field(init=False)
    captures: list[StoredCapture] = field(default_factory=list)
    steering: list[StoredSteering] = field(default_factory=list)
    probed: bool = False
    gate: float | None = None  # the probe's threshold; None: it gates no steering
    max_tokens: int = 0
    ending: str = "length"  # length | stop: a stop string, found late | cancel
    kept: int = 0  # tokens up to the stop string
    cancelled_after: int = 0  # tokens computed when it is cancelled
    breaks_at: int = -1  # position at which the last layer's row is not finite; −1: none

    def __post_init__(self) -> None:
        self.kept = self.kept or self.total

    def complete(self) -> "Asked":
        """Make the spec."""
        probes = []
        if self.probed:
            content = ProbeContent(
                hook=PROBED_SITE[0],  # type: ignore[arg-type]
                layer=PROBED_SITE[1],
                tensors=[content_hash(tensor) for tensor in probe_tensors()],
                labels=["x"],
                thresholds=[1e9 if self.gate is None else self.gate],
            )
            action: ProbeAction = "flag" if self.gate is None else "steer"
            probes = [
                StoredProbe(
                    name="p", digest=content.digest, content=content, actions=[action], tokens=True
                )
            ]
        self.spec = RankSpec(
            version=__version__,
            job=f"j{self.number}",
            request=0,
            attempt=1,
            prompt_tokens=self.prompt,
            rows=with_columns(steering_rows(self.steering)),
            occurrences=occurrences(self.steering, self.tokens[: self.prompt]),
            captures=[*self.captures, *probe_captures(probes)],
            digest=steering_digest(self.steering),
            first_affected=min(
                (lowest_position(entry.positions, self.prompt) for entry in self.steering),
                default=-1,
            ),
            worker_reports_end=self.ending == "stop",
            probes=probes,
        )
        return self

    @property
    def id(self) -> str:
        return str(self.number)

    def content(self, position: int) -> int:
        """Return the token at a position."""
        if position < self.shared:
            return self.group * 64 + position
        return _OWN + self.number * 64 + position

    @property
    def tokens(self) -> list[int]:
        return [self.content(position) for position in range(self.total)]

    @property
    def hashes(self) -> list[bytes]:
        """Name the prompt's full blocks, each with everything before it."""
        names = []
        for place in range(self.prompt // BLOCK):
            shared = self.group >= 0 and (place + 1) * BLOCK <= self.shared
            names.append(f"{self.group if shared else self.id + '!'} {place}".encode())
        return names

    @property
    def stop(self) -> int:
        """Return the number of tokens that have rows: the last one was never fed back."""
        return self.kept - 1

    def row(self, site: tuple[str, int], position: int, at: str) -> np.ndarray:
        """Return the row of a position before or after the site's edits, float32 `[width]`."""
        row = rows_at(site, np.array([self.content(position)]))[0]
        if at == "before":
            return row
        edits = [
            entry
            for entry in self.steering
            if entry.hook == site[0]
            and site[1] in entry.layers
            and position in self.edited(entry, self.total)
        ]
        for entry in edits:
            if entry.family == "replace":
                place = int(entry.tensors[0].rpartition(":")[2])
                row = rows_at(site, np.array([source_content(place)]))[0]
        for entry in edits:
            if entry.family == "add":
                row = row + np.float32(entry.scale)
        return row

    def wanted(self, capture: StoredCapture) -> dict[tuple[str, int], np.ndarray]:
        """Return site → float32 `[positions, width]`, what the capture must hold."""
        heads = [slice(head * SHAPE.width, (head + 1) * SHAPE.width) for head in capture.heads]
        result = {}
        for hook, layers in capture.sites.items():
            for layer in layers:
                rows = [
                    self.row((hook, layer), position, capture.at)
                    for position in self.positions(capture)
                ]
                whole = np.array(rows, dtype=np.float32).reshape(len(rows), WIDTHS[capture.bank])
                result[hook, layer] = (
                    np.concatenate([whole[:, part] for part in heads], 1) if heads else whole
                )
        return result

    def sizes(self) -> dict[tuple[str, int, int], float]:
        """Return each edited site, with the number of its edited rows → the largest edit's size."""
        found: dict[tuple[str, int], dict[int, float]] = {}
        for entry in self.steering:
            for position in self.edited(entry, self.stop):
                for layer in entry.layers:
                    site = entry.hook, layer
                    before, after = (self.row(site, position, at) for at in ("before", "after"))
                    size = np.linalg.norm(after - before) / np.linalg.norm(before)
                    found.setdefault(site, {})[position] = float(size)
        return {(*site, len(sizes)): max(sizes.values()) for site, sizes in found.items()}

    def positions(self, capture: StoredCapture) -> list[int]:
        return list(capture.select(0, self.stop, self.prompt))

    def edited(self, entry: StoredSteering, stop: int) -> list[int]:
        """Return the positions below `stop` that an entry edits."""
        named = select(entry.positions, 0, stop, self.prompt)
        if entry.trigger:
            lets = open_of(entry.trigger, self.tokens[:stop])
            return [position for position in named if lets[position]]
        return [position for position in named if not entry.gate or position in self.open(stop)]

    def open(self, stop: int) -> list[int]:
        """Return the generated positions below `stop` at which the gate is open."""
        above = self.scores(stop) >= (np.inf if self.gate is None else self.gate)
        return [position for position in range(self.prompt, stop) if above[position - 1]]

    def scores(self, stop: int) -> np.ndarray:
        """Return the probe's score of each token below `stop`."""
        rows = [self.row(PROBED_SITE, position, "before") for position in range(stop)]
        return np.array(rows) @ WEIGHT[0] + np.float32(0.5)

    def gated(self, draws: random.Random) -> None:
        """Let a probe decide at which tokens its steering, or a part of it, is applied."""
        self.probed = True
        scores = self.scores(self.total - 1)
        self.gate = float(draws.choice(scores[self.prompt - 1 :]))
        self.steering = [
            entry
            if number and draws.random() < 0.3
            else msgspec.structs.replace(entry, positions="all_generated", gate="p")
            for number, entry in enumerate(self.steering)
        ]

    def triggered(self, draws: random.Random) -> None:
        """Let its tokens decide where its steering, or a part of it, is applied."""
        self.steering = [
            entry
            if number and draws.random() < 0.3
            else msgspec.structs.replace(
                entry,
                trigger=Trigger(
                    token_ids=[[token] for token in draws.choices(self.tokens, k=2)],
                    after=draws.choice([0, 1, "end"]),
                    skip=draws.random() < 0.3,
                ),
            )
            for number, entry in enumerate(self.steering)
        ]


def source_content(position: int) -> int:
    """Return the token of the source run at a position."""
    return _OWN + SOURCE * 64 + position


def junk(number: int) -> int:
    """Return a token that no request has: a rejected draft, or padding."""
    return _JUNK + number % 50_000


def probe_tensors() -> list[Tensor]:
    return [from_numpy(WEIGHT), from_numpy(np.full(1, 0.5, dtype=np.float32))]


def draw(
    draws: random.Random, count: int, *, shares: bool, calm: bool, decides: Decides
) -> list[Asked]:
    """Draw `count` requests, in the order of their arrival. `shares`: some share prompt blocks.
    `calm`: they generate many tokens. `decides`: what decides where some steering is applied.
    """
    asked = [_source(draws)]
    for number in range(1, count):
        prompt = draws.randint(3, 14)
        together = shares and draws.random() < 0.6
        request = Asked(
            number,
            group=draws.randrange(2) if together else -1,
            shared=0,
            prompt=prompt,
            total=prompt + draws.randint(*((20, 40) if calm else (1, 9))),
        )
        if together:
            request.shared = draws.randint(0, prompt)
        elif draws.random() < 0.7:
            request.steering = _steering(draws, request)
        request.captures = [
            capture
            for tag in ("a", "b")[: draws.choice([0, 1, 1, 2])]
            for capture in _captures(draws, request, tag)
        ]
        request.probed = draws.random() < 0.3
        request.max_tokens = request.total - request.prompt if draws.random() < 0.6 else 0
        request.ending = draws.choices(["length", "stop", "cancel"], [6, 2, 1])[0]
        if request.ending == "stop":
            request.kept = draws.randint(request.prompt + 1, request.total)
        request.cancelled_after = draws.randint(1, request.total - 1)
        if decides == "probes" and request.steering and draws.random() < 0.7:
            request.gated(draws)
        if decides == "tokens" and draws.random() < 0.8:
            request.triggered(draws)
        request.complete()
        if request.steering and request.ending == "length" and draws.random() < 0.2:
            first = request.spec.first_affected
            if 0 <= first < request.stop:
                request.breaks_at = draws.randrange(first, request.stop)
        asked.append(request)
    return asked


def _source(draws: random.Random) -> Asked:
    prompt = draws.randint(6, 10)
    source = Asked(SOURCE, -1, 0, prompt, prompt + 2)
    source.captures = [
        StoredCapture(
            sites={hook: list(range(LAYERS)) for hook in STREAM},  # type: ignore[misc]
            positions="all_prompt",
            tag=SOURCE_TAG,
        )
    ]
    return source.complete()


def _positions(draws: random.Random, request: Asked) -> Any:
    chosen = draws.sample(range(request.total - 1), draws.randint(1, min(4, request.total - 1)))
    kinds = ["all", "all", "all", "all_prompt", "all_generated", "last_prompt", sorted(chosen)]
    return draws.choice(kinds)


def _sites(draws: random.Random, hooks: Sequence[str]) -> dict[Any, list[int]]:
    chosen = draws.sample(hooks, draws.randint(1, len(hooks)))
    return {
        hook: sorted(draws.sample(range(LAYERS), draws.randint(1, LAYERS)))
        for hook in hooks
        if hook in chosen
    }


def _captures(draws: random.Random, request: Asked, tag: str) -> list[StoredCapture]:
    """Draw one capture of the user's, which is one or two captures of ranks."""
    residual = StoredCapture(
        sites=_sites(draws, STREAM),
        positions=_positions(draws, request),
        tag=tag,
        at=draws.choice(["before", "after"]),
        dtype=draws.choice(["model", "model", "bfloat16", "float16"]),
        layout=draws.choice(["auto", "packed", "per_file", "segment"]),
    )
    inside = msgspec.structs.replace(
        residual,
        sites=_sites(draws, INSIDE),
        row=SHAPE,
        heads=draws.choice([[], [], [0], [1]]),
        tag=f"{tag}-inside",
    )
    return draws.choice([[residual], [inside], [residual, inside]])


def _steering(draws: random.Random, request: Asked) -> list[StoredSteering]:
    entries = []
    for hooks in draws.choice([(STREAM,), (INSIDE,), (STREAM, INSIDE)]):
        hook = draws.choice(hooks)
        number = draws.randint(1, 9)
        entries.append(
            StoredSteering(
                layers=sorted(draws.sample(range(LAYERS), draws.randint(1, LAYERS))),
                hook=hook,  # type: ignore[arg-type]
                positions=_positions(draws, request),
                family="add",
                tensors=[content_hash(vector(1, BANK[hook]))],  # type: ignore[index]
                scale=float(number),
            )
        )
    if draws.random() < 0.5:
        site = draws.choice(SITES[RESIDUAL])
        place = draws.randrange(5)
        row = RunRow(run_key(f"j{SOURCE}", 0, SOURCE_TAG), site[0], site[1], place)  # type: ignore[arg-type]
        entries.append(
            StoredSteering(
                layers=[site[1]],
                hook=site[0],  # type: ignore[arg-type]
                positions=[draws.randrange(request.prompt)],
                family="replace",
                tensors=[row_name(row)],
                numbers=[1.0],
            )
        )
    return entries

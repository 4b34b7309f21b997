"""Requests that try to spoil the numbers of others, beside requests that must not notice.

A round runs attackers and victims in one schedule, twice: with numbers that overflow, and with
small ones in their place. The victims' rows must be equal bit for bit.
"""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from host import Host, capture_of, prompt_of, relative_error, steer
from patching_kit import patch
from tolerances import BF16_BATCH, FP16_BATCH, FP32_BATCH

from midstream.schemas.jobs.jobs import Job, Output
from midstream.schemas.requests.source_runs import RunRow, row_name
from midstream.schemas.requests.specs import StoredSteering

#: dtype → its largest number, nearly.
LARGE = {"float32": 3e38, "bfloat16": 3e38, "float16": 6e4}
#: dtype → how much the rows of a request may differ between batches, relative to their length.
BATCH = {"float32": FP32_BATCH, "bfloat16": BF16_BATCH, "float16": FP16_BATCH}
#: Every family, in the order of the kernels' table; then what a vector, and what a row of another
#: job, does as a patch.
ATTACKS = (
    "replace",
    "replace_masked",
    "lowrank",
    "add",
    "add_matched",
    "ablate",
    "clamp",
    "patch",
    "patch from a run",
)
#: So few that the blocks of one round are used again in the next. Of 128 tokens each.
BLOCKS = 24
ATTACKERS = 4
VICTIMS = 4
LAYERS = [0, 1, 2]
#: Pairs of runs until two are composed alike.
TRIES = 5


def edits(host: Host, attack: str, large: float) -> list[StoredSteering]:
    """One attack; its numbers overflow where `large` is nearly the dtype's largest, and do not
    where it is 1.
    """
    width = host.info["hidden_size"]
    one = host.vector(np.ones(width))
    vector = host.vector(np.full(width, large))
    common: dict[str, Any] = {
        "layers": LAYERS,
        "hook": "post_block",
        "positions": "all",
        "family": attack,
    }
    strength = 0.5 if large == 1 else 3e38
    match attack:
        case "patch":  # the row is finite, and no longer when as much is added to it
            return [patch(vector, "post_block", LAYERS, "all"), steer(vector, LAYERS)]
        case "patch from a run":
            written = [patch(vector, "post_block", LAYERS, "all")]
            source = host.job(
                prompt_of(9),
                max_tokens=1,
                steering=written,
                capture=capture_of(LAYERS, "all_prompt", at="after"),
            )
            host.run(source)
            row = row_name(RunRow(host.keep(source), "post_block", LAYERS[0], 2))
            return [patch(row, "post_block", LAYERS[:1], "all"), steer(vector, LAYERS[:1])]
        case "replace":
            # an alpha that only a rank takes: no other replacement of finite numbers overflows
            return [
                StoredSteering(**common, tensors=[vector], numbers=[0.5 if large == 1 else 5.0])
            ]
        case "replace_masked":
            return [
                StoredSteering(
                    **common, tensors=[vector, one], numbers=[0.5 if large == 1 else 5.0]
                )
            ]
        case "lowrank":
            # R and W: what is left of the formula is strength · b · R, added at each layer
            ones = host.vector(np.ones((1, width)))
            return [
                StoredSteering(
                    **common,
                    tensors=[ones, ones, host.vector(np.ones(1))],
                    numbers=[strength],
                    rank=1,
                )
            ]
        case "add":
            return [StoredSteering(**common, tensors=[vector])]
        case "clamp":
            return [
                StoredSteering(
                    **common,
                    tensors=[one],
                    numbers=[strength, 1e6 if large > 1 else 0.5, 2e6 if large > 1 else 1.0],
                )
            ]
        case _:
            return [StoredSteering(**common, tensors=[one], numbers=[strength])]


@dataclass
class Seen:
    """What the rounds of one engine showed."""

    rounds: int = 0
    failed: int = 0  # attacks that failed as they should
    rows: int = 0  # of victims that were compared
    # of them against an undisturbed run, relative to a row's length, and where
    worst: tuple[float, str] = (0.0, "")
    texts: int = 0
    rounded: int = 0  # victims with other tokens than undisturbed, where another batch rounds so
    by_attack: dict[str, int] = field(default_factory=dict)  # attacks that failed


def rounds(host: Host, dtype: str, seconds: float, first: int = 0) -> Iterator[Seen]:
    """Rounds with every attack in turn, all of them at least once.

    Raises AssertionError where a victim could notice.
    """
    seen = Seen()
    end = time.monotonic() + seconds
    for number in itertools.count(first):
        if number - first >= len(ATTACKS) and time.monotonic() > end:
            return
        _round(host, dtype, number, seen)
        yield seen


def _round(host: Host, dtype: str, number: int, seen: Seen) -> None:
    attack = ATTACKS[number % len(ATTACKS)]
    undisturbed = _victims(host, number)
    host.run_together(*undisturbed)
    for _ in range(TRIES):
        attackers, victims, outputs, schedule = _together(host, attack, LARGE[dtype], number)
        _, siblings, theirs, their_schedule = _together(host, attack, 1.0, number)
        if schedule == their_schedule:
            break
    assert schedule == their_schedule, f"of {TRIES} pairs of runs none was composed alike"
    for attacker in attackers:
        (receipt,) = host.receipts(attacker)
        assert receipt.status == "ok" or receipt.kind == "intervention_failed", receipt
        failed = 1 if receipt.status == "error" else 0
        seen.failed += failed
        seen.by_attack[attack] = seen.by_attack.get(attack, 0) + failed
    after = _victims(host, number)
    plain = host.run_together(*after)
    for same in (victims, siblings, undisturbed, after):
        for victim in same:
            _check(host, victim, seen)
    for victim, sibling, alone, later in zip(victims, siblings, undisturbed, after, strict=True):
        text = outputs[victim.id][0].token_ids
        assert text == theirs[sibling.id][0].token_ids, (number, attack)
        rounded = text != plain[later.id][0].token_ids  # in the other batch
        seen.rounded += rounded
        seen.texts += 2
        for layer in range(host.info["num_layers"]):
            mine, twin, before, behind = (
                host.capture(job).array(layer) for job in (victim, sibling, alone, later)
            )
            assert np.array_equal(mine, twin), (
                f"round {number}, {attack}: another number at the victim"
            )
            assert np.array_equal(before, behind), (
                f"round {number}, {attack}: another number after the attack"
            )
            seen.rows += 2 * len(mine)
            if rounded:  # its later rows are of other tokens
                continue
            error = relative_error(mine.astype(np.float64), before.astype(np.float64))
            seen.worst = max(seen.worst, (error, f"round {number}, {attack}"))
    seen.rounds += 1


def _together(
    host: Host, attack: str, large: float, number: int
) -> tuple[list[Job], list[Job], dict[str, list[Output]], str]:
    """Attackers, victims, what all of them generated, and the schedule's checksum."""
    steering = edits(host, attack, large)
    attackers = [
        host.job(prompt_of(14 + 3 * n, seed=1000 * number + n), max_tokens=12, steering=steering)
        for n in range(ATTACKERS)
    ]
    victims = _victims(host, number)
    # Victims first: they wait for no vector, so the order in which requests reach the engine is
    # always the same.
    outputs = host.run_together(*victims, *attackers)
    return attackers, victims, outputs, host.call("midstream_status")[0]["schedule"]


def _victims(host: Host, number: int) -> list[Job]:
    layers = list(range(host.info["num_layers"]))
    return [
        host.job(
            prompt_of(10 + 5 * n, seed=77 * number + n),
            max_tokens=10,
            capture=capture_of(layers, "all"),
        )
        for n in range(VICTIMS)
    ]


def _check(host: Host, job: Job, seen: Seen) -> None:
    for receipt in host.receipts(job):
        assert receipt.status == "ok", receipt
        assert all(not file.non_finite for file in receipt.files), receipt
    reader = host.capture(job)
    assert all(
        np.isfinite(reader.array(layer).astype(np.float32)).all()
        for layer in range(host.info["num_layers"])
    )


def options(dtype: str, **others: Any) -> dict[str, Any]:
    """Settings of an engine for the rounds."""
    return {
        "engine.dtype": dtype,
        "engine.num_gpu_blocks_override": BLOCKS,
        "engine.enable_prefix_caching": False,
        **others,
    }

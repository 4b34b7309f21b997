"""Resolves modules that probes apply: those that a request's `probes` name with the action `steer`,
and those of policies.

Their entries join the prompts' steering, like those of modules in `steering`, with the probe as
their gate. Prompt tokens are never edited: no score precedes the first of them, and a prompt may be
computed in steps of any size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ....schemas.artifacts.probes import ProbeUse
from ....schemas.base.errors import invalid
from ....schemas.jobs.models import ModelInfo
from ....schemas.prompts.selectors import PositionSelector, Window
from ....schemas.requests.specs import Owner, SteeringSpec, StoredSteering
from .captures import Bounds


class Gated(NamedTuple):
    """A module that a probe of the request, or a policy, applies."""

    at: str  # field of the request
    spec: SteeringSpec  # names the module
    probe: str  # `StoredProbe.name`
    owner: Owner = "request"  # of a policy: the operator


def gated_by(request: Sequence[str | ProbeUse]) -> list[Gated]:
    """Return the modules that the request's probes apply."""
    return [
        Gated(f"probes[{index}]", SteeringSpec(module=use.module, scale=use.scale), use.probe)
        for index, use in enumerate(request)
        if isinstance(use, ProbeUse) and use.action == "steer" and use.module is not None
    ]


def check_use(use: ProbeUse, at: str, model: ModelInfo) -> None:
    """Raises a 400 if `steer` lacks its module or is not served, or another action has fields of
    `steer`.
    """
    if use.action != "steer":
        for name in ("module", "scale"):
            if getattr(use, name) is not None:
                raise invalid(
                    f"{at}.{name}",
                    f"is not valid for action {use.action!r}",
                    allowed="null, or the action steer",
                )
        return
    rest = "none, flag" if model.pp > 1 else "none, flag, stop"
    if model.pp > 1:
        detail = (
            "'steer' is not served with pipeline parallelism: a stage does not have the "
            "scores of another"
        )
        raise invalid(f"{at}.action", detail, allowed=rest)
    if model.speculative_tokens:
        detail = (
            "'steer' is not served with speculative decoding: a step computes tokens "
            "before the scores of the preceding tokens are known"
        )
        raise invalid(f"{at}.action", detail, allowed=rest)
    if use.module is None:
        raise invalid(
            f"{at}.module",
            "is required for action 'steer'",
            allowed="the name of a steering module",
        )


def gated_entries(
    gated: Gated,
    entries: Sequence[tuple[StoredSteering, Sequence[PositionSelector]]],
    bounds: Bounds,
) -> list[list[StoredSteering]]:
    """Return the module's gated entries for each prompt.

    `entries`: each with its positions in each prompt. Raises a 400 naming the module.
    """
    per_prompt: list[list[StoredSteering]] = [[] for _ in bounds.prompts]
    for number, (entry, positions) in enumerate(entries):
        for index, (prompt, selector) in enumerate(zip(bounds.prompts, positions, strict=True)):
            result = generated(selector, prompt.tokens)
            if result is None:
                raise invalid(
                    f"{gated.at}.module",
                    (
                        f"entry {number} of {gated.spec.module!r} edits no "
                        "generated token after prompt "
                        f"{index}, and probes steer no others"
                    ),
                    allowed=(
                        "a module whose entries are at `all`, `all_generated`, "
                        "or one range that goes "
                        "beyond the prompt"
                    ),
                )
            per_prompt[index].append(
                msgspec.structs.replace(
                    entry, positions=result, gate=gated.probe, owner=gated.owner
                )
            )
    return per_prompt


def generated(positions: PositionSelector, prompt_tokens: int) -> PositionSelector | None:
    """Return the part of `positions` after the prompt; None if there is none, or for a list."""
    if isinstance(positions, Window):
        skipped = -(-max(prompt_tokens - positions.start, 0) // positions.step)
        start = positions.start + skipped * positions.step
        return (
            Window(start=start, stop=positions.stop, step=positions.step)
            if positions.stop is None or start < positions.stop
            else None
        )
    return "all_generated" if positions in ("all", "all_generated") else None

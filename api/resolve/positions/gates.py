"""Resolves modules that probes apply: those that a request's `probes` name with the action `steer`,
and those of policies.

Their entries join the prompts' steering, like those of modules in `steering`, with the probe as
their gate. Prompt tokens are never edited: no score precedes the first of them, and a prompt may be
computed in steps of any size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ....schemas.artifacts.probes import Probe, ProbeUse
from ....schemas.base.errors import invalid
from ....schemas.jobs.models import ModelInfo
from ....schemas.prompts.selectors import PositionSelector, PositionWindow
from ....schemas.requests.specs import PromptEdits, SteeringSpec, StoredSteering
from ....schemas.requests.steering import Module
from ..prompts.request_parsing import ParsedRequest
from .captures import Bounds


class Gated(NamedTuple):
    """A module that a probe of the request, or a policy, applies."""

    at: str  # field of the request
    spec: SteeringSpec  # names the module
    probe: str  # `StoredProbe.name`
    # a policy's own copy, which no name in a request refers to; null: a module that the request
    # names
    module: Module | None = None


def gated_by(request: Sequence[str | ProbeUse]) -> list[Gated]:
    """Return the modules that the request's probes apply."""
    return [
        Gated(f"probes[{index}]", SteeringSpec(module=use.module, scale=use.scale), use.probe)
        for index, use in enumerate(request)
        if isinstance(use, ProbeUse) and use.action == "steer" and use.module is not None
    ]


def all_steering(parsed: ParsedRequest) -> dict[str, SteeringSpec]:
    """Return field → spec of the request's steering and of the modules that its probes apply."""
    own = {f"steering[{index}]": spec for index, spec in enumerate(parsed.steering)}
    return own | {gated.at: gated.spec for gated in gated_by(parsed.probes)}


def check_use(use: ProbeUse, probe: Probe, at: str, model: ModelInfo) -> None:
    """Raises a 400 for an action that cannot be taken, or lacks or has fields of `steer`."""
    action = use.action
    steers = use.action == "steer"
    staged = model.pp > 1
    crossable = any(threshold is not None for threshold in probe.content.thresholds)
    late = "'stop' is not served with pipeline parallelism: scores of earlier stages come too late"
    elsewhere = (
        "'steer' is not served with pipeline parallelism: a stage does not have the scores of "
        "another"
    )
    drafts = (
        "'steer' is not served with speculative decoding: a step computes tokens before the scores "
        "of the preceding tokens are known"
    )
    lacks = f"{action!r} needs a threshold, and {probe.name!r} has none"
    foreign = f"is not valid for action {action!r}"
    null = "null, or the action steer"
    for field, why, applies, allowed in (
        ("action", late, action == "stop" and staged, "none, flag"),
        (
            "action",
            lacks,
            action != "none" and not crossable,
            "none, or a probe with thresholds",
        ),
        ("module", foreign, not steers and use.module is not None, null),
        ("scale", foreign, not steers and use.scale is not None, null),
        ("action", elsewhere, steers and staged, "none, flag"),
        ("action", drafts, steers and model.speculative_tokens > 0, "none, flag, stop"),
        (
            "module",
            "is required for action 'steer'",
            steers and use.module is None,
            "the name of a steering module",
        ),
    ):
        if applies:
            raise invalid(f"{at}.{field}", why, allowed=allowed)


def gated_entries(
    gated: Gated,
    entries: Sequence[tuple[StoredSteering, Sequence[PositionSelector]]],
    bounds: Bounds,
) -> PromptEdits:
    """Return the module's gated entries for each prompt.

    `entries`: each with its positions in each prompt. Raises a 400 naming the module.
    """
    per_prompt: PromptEdits = [[] for _ in bounds.prompts]
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
                    entry,
                    positions=result,
                    gate=gated.probe,
                    owner="request" if gated.module is None else "operator",
                )
            )
    return per_prompt


def generated(positions: PositionSelector, prompt_tokens: int) -> PositionSelector | None:
    """Return the part of `positions` after the prompt; None if there is none, or for a list."""
    if isinstance(positions, PositionWindow):
        start = positions.first_from(prompt_tokens)
        return (
            PositionWindow(start=start, stop=positions.stop, step=positions.step)
            if positions.stop is None or start < positions.stop
            else None
        )
    return "all_generated" if positions in ("all", "all_generated") else None

"""Global capture: converts the settings `global_capture…` to capture specs.

`post_block:all;pre_attn:0-17` names hooks (by Midstream's or TransformerLens' names) with their
layers; a hook without layers means all layers. Options of the command line have the same syntax,
which `parse_hooks` implements.
"""

import re
from collections.abc import Sequence
from typing import cast, get_args

import msgspec

from ..base.errors import MidstreamError, Translated, suggestion
from ..jobs.models import ModelInfo
from ..prompts.selectors import (
    EVERY,
    HOOKS,
    Alias,
    Hook,
    HookName,
    LayerSelector,
    RequestedName,
    SelectorError,
    Span,
    cut_positions,
    resolve_positions,
    resolve_sites,
    written_span,
)
from ..requests.specs import CaptureSpec, StoredCapture
from ..settings.settings import Settings, SettingsError

#: Names of hooks, aliases included.
HOOK_NAMES = (*EVERY, *get_args(Alias))
#: A separator between hooks: a comma that is followed by a name, or `;`. Other commas separate
#: layers.
_BEFORE_HOOK = re.compile(r"[;,]\s*(?=[A-Za-z_])|;")
_IMAGE = re.compile(r"image:(-?[0-9]{1,4})")
_NUMBER = re.compile(r"-?[0-9]{1,9}")


def from_settings(
    settings: Settings,
    num_layers: int | None = None,
    hooks: Sequence[str] = HOOKS,
    row_limit: int = 0,
) -> list[CaptureSpec]:
    """Return the captures in the settings; if `num_layers` is given, check them against the model's
    layers and hooks.

    `row_limit`: rows that one engine step may capture; 0: any number. A capture with more sites is
    rejected, because even a single position would not fit. Raises SettingsError with the reason and
    the valid values.
    """
    with Translated(ValueError, lambda error: SettingsError(f"global_capture: {error}")):
        specs = parse(
            settings.global_capture.sites,
            settings.global_capture.positions,
            settings.global_capture.tag,
        )
        if num_layers is not None:
            for spec in specs:
                sites = sum(map(len, resolve_sites(spec.wanted, num_layers, hooks).values()))
                if row_limit and sites > row_limit:
                    raise ValueError(
                        f"it has {sites} sites, but one step has room for {row_limit} rows "
                        "(setting tuning.capture_buffer_mib)"
                    )
    return specs


def captures_of(
    spec: CaptureSpec, model: ModelInfo, lengths: Sequence[int]
) -> list[StoredCapture | None]:
    """Return the global capture of each prompt, given the prompts' lengths; None for a prompt
    without any of the positions.

    Raises MidstreamError("internal") for a spec that does not fit the model: the worker checked it
    when it started.
    """
    stored_captures: list[StoredCapture | None] = []
    with Translated(
        SelectorError,
        lambda error: MidstreamError("internal", f"global capture does not fit the model: {error}"),
    ):
        sites = resolve_sites(spec.wanted, model.num_layers, model.hooks, model.absent)
        for tokens in lengths:
            ends = isinstance(spec.positions, Span) and spec.positions.last is not None
            positions = "all" if ends else cut_positions(spec.positions, tokens)
            if positions == []:
                stored_captures.append(None)
                continue
            window = cast(Span, spec.positions) if ends else None
            chosen = resolve_positions(positions, tokens)
            stored_captures.append(spec.stored(sites, chosen, window=window))
    return stored_captures


def step_rows(
    captures: Sequence[StoredCapture], model: ModelInfo, prompt_tokens: int, max_tokens: int
) -> int:
    """Return the fewest rows that a request must capture in one engine step: those of one token and
    its drafts, which the engine cannot split over steps.
    """
    tokens = 1 + model.speculative_tokens
    return sum(
        capture.num_sites * min(tokens, capture.count_positions(prompt_tokens, max_tokens))
        for capture in captures
    )


def parse(text: str, positions: str = "last_prompt", tag: str = "global") -> list[CaptureSpec]:
    """Return the captures in the settings: none if `text` is empty, otherwise one.

    `positions`: in the syntax of `parse_positions`.

    Raises ValueError with the reason and the valid values.
    """
    if not text.strip():
        return []
    fields = {"hooks": parse_hooks(text), "positions": parse_positions(positions), "tag": tag}
    if positions.strip().partition(":")[0] == "image":
        raise ValueError("positions of images are not valid here: few prompts have one")
    with Translated(
        msgspec.ValidationError,
        lambda error: ValueError(f"{error}: a tag is one folder name of letters, digits, - and _"),
    ):
        return [msgspec.convert(fields, CaptureSpec)]


def parse_hooks(text: str, layers: LayerSelector = "all") -> dict[HookName, LayerSelector]:
    """Parse `post_block:all;pre_attn:0-3,7` or `resid_pre,mlp_out` as hook → layers. Raises
    ValueError.

    Hooks are separated by `;` or `,`. `layers`: for hooks without layers of their own.
    """
    hooks: dict[HookName, LayerSelector] = {}
    for part in _BEFORE_HOOK.split(text.strip()):
        hook, _, own = (word.strip() for word in part.partition(":"))
        if hook not in HOOK_NAMES:
            suggested = suggestion(hook, HOOK_NAMES)
            known = f"write hook:layers;hook:layers, with hooks {', '.join(EVERY)}"
            raise ValueError(
                f"{hook[:40]!r} is not a hook: {known}" + (f"; {suggested}" if suggested else "")
            )
        if hook in hooks:
            raise ValueError(
                f"{hook} is listed twice: write its layers together, such as {hook}:0-3,7"
            )
        hooks[cast(Hook | Alias, hook)] = own or layers
    return hooks


def parse_positions(text: str) -> RequestedName | dict[str, int] | list[int | dict[str, int]]:
    """Parse a name, `image:0`, `last:64`, `0,5,-1`, or a range such as `5:9` or `5:`. Raises
    ValueError.
    """
    text = text.strip()
    if text in get_args(RequestedName):
        return cast(RequestedName, text)
    if image := _IMAGE.fullmatch(text):
        return {"image": int(image[1])}
    if whole := written_span(text):
        return whole
    parts = [part.strip() for part in text.split(",")]
    if not all(written_span(part) or _NUMBER.fullmatch(part) for part in parts):
        names = ", ".join(get_args(RequestedName))
        raise ValueError(
            f"{text[:40]!r} is not a position selector: use {names}, numbers such as "
            "0,5,-1, a range such as 5:9 or 5:, or last:64"
        )
    return [written_span(part) or int(part) for part in parts]

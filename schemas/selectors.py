"""Which layers, which positions, which hook point? Selectors as users write them, resolved to plain names and numbers."""

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal, Protocol, cast, get_args

import msgspec

from .base import Record


class SelectorError(ValueError):
    """A selector that cannot be resolved; `at` is the place inside it, such as `[1].text`."""

    def __init__(self, detail: str, at: str = ""):
        super().__init__(detail)
        self.at = at


#: The hook points in the order in which a layer's forward meets them. For layer L with residual stream s:
#: `pre_attn`: s entering the layer, before its input norm (an edit reaches this layer's attention);
#: `attn_out`: the attention branch just before it is added;
#: `post_attn`: s after attention was added, before the MLP's norm (an edit reaches this layer's MLP);
#: `mlp_in`: the normed MLP input;
#: `mlp_out`: the MLP branch just before it is added, after any post-norm;
#: `post_block`: s leaving the layer (HF `hidden_states[L+1]`).
Hook = Literal["pre_attn", "attn_out", "post_attn", "mlp_in", "mlp_out", "post_block"]
HOOKS: tuple[Hook, ...] = get_args(Hook)
#: Hooks that are the residual stream itself; the others are branches beside it.
STREAM_HOOKS: frozenset[Hook] = frozenset({"pre_attn", "post_attn", "post_block"})

#: TransformerLens' names, with and without `hook_`.
Alias = Literal[
    "resid_pre", "resid_mid", "resid_post",
    "hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out", "hook_mlp_out",
]  # fmt: skip
ALIASES: dict[str, Hook] = {
    "resid_pre": "pre_attn",
    "resid_mid": "post_attn",
    "resid_post": "post_block",
    "hook_resid_pre": "pre_attn",
    "hook_resid_mid": "post_attn",
    "hook_resid_post": "post_block",
    "hook_attn_out": "attn_out",
    "hook_mlp_out": "mlp_out",
}
#: What a user may write for a hook.
HookName = Hook | Alias


def resolve_hook(name: HookName) -> Hook:
    """Our name of a hook point, of which `name` may be TransformerLens' one."""
    return ALIASES.get(name) or cast(Hook, name)


#: `all`; one layer; a list; or text such as `0-3,7,-1` (ranges are inclusive). Negative numbers count from the last layer.
LayerSelector = str | int | list[int]
_LAYERS = re.compile(r"(-?[0-9]{1,6})(?:-(-?[0-9]{1,6}))?")

#: Named position sets; anything else is a list of absolute token positions, negative from the prompt's end.
PositionName = Literal["last_prompt", "all_prompt", "all_generated", "all"]
#: As stored and as the ranks read it: a name, or ascending absolute positions.
PositionSelector = PositionName | list[int]


class Span(Record):
    """Every prompt token that overlaps an occurrence of `text` in the prompt's text.

    `occurrence`: 0 the first, 1 the second, …, negative from the last; null: all of them.
    """

    text: str
    occurrence: int | None = 0

    def __post_init__(self) -> None:
        if not self.text:
            raise ValueError("text is empty: name a part of the prompt")


#: As users write it: a name, positions and spans in any mixture, or one span.
PositionWish = PositionName | Annotated[list[int | Span], msgspec.Meta(max_length=65_536)] | Span


def resolve_layers(selector: LayerSelector, num_layers: int) -> list[int]:
    """Sorted unique layer numbers in `[0, num_layers)`.

    Raises SelectorError saying what is wrong and what would be right.
    """
    if selector == "all":
        return list(range(num_layers))
    if isinstance(selector, str):
        return sorted({layer for part in selector.split(",") for layer in _layer_range(part.strip(), num_layers)})
    wanted = [selector] if isinstance(selector, int) else selector
    if not wanted:
        raise SelectorError("no layer named: give at least one")
    return sorted({_layer(layer, num_layers) for layer in wanted})


def _layer_range(text: str, num_layers: int) -> range:
    match = _LAYERS.fullmatch(text)
    if match is None:
        raise SelectorError(f'{text[:40]!r} is not a layer selector: use "all", "a-b", a number or a list of numbers')
    first = _layer(int(match[1]), num_layers)
    last = first if match[2] is None else _layer(int(match[2]), num_layers)
    if first > last:
        raise SelectorError(f"range {text!r} is empty: the first layer is above the last")
    return range(first, last + 1)


def _layer(layer: int, num_layers: int) -> int:
    if not -num_layers <= layer < num_layers:
        raise SelectorError(f"layer {layer} is out of range: the model has layers 0 to {num_layers - 1}")
    return layer % num_layers


def resolve_sites(wanted: Mapping[HookName, LayerSelector], num_layers: int, hooks: Sequence[str] = HOOKS) -> dict[Hook, list[int]]:
    """Hook → ascending layers, in the order in which a forward meets the hooks. `hooks`: those that the model has.

    Raises SelectorError, whose `at` is the hook as the user named it.
    """
    named: dict[Hook, HookName] = {}
    sites: dict[Hook, list[int]] = {}
    for name, layers in wanted.items():
        hook = resolve_hook(name)
        if hook in named:
            raise SelectorError(f"{hook} is named twice: as {named[hook]!r} and as {name!r}", f".{name}")
        if hook not in hooks:
            raise SelectorError(f"the model has no hook {name!r}: it has {', '.join(hooks)}", f".{name}")
        try:
            sites[hook] = resolve_layers(layers, num_layers)
        except SelectorError as error:
            raise SelectorError(str(error), f".{name}") from error
        named[hook] = name
    return {hook: sites[hook] for hook in HOOKS if hook in sites}


class SpanFinder(Protocol):
    """Knows one prompt's text."""

    def __call__(self, span: Span) -> list[int]:
        """The positions of the prompt tokens that overlap the span. Raises SelectorError."""


def no_text(span: Span) -> list[int]:
    """The finder of a prompt that has no text."""
    raise SelectorError("a span needs a prompt whose text is known: give text instead of token ids")


def resolve_positions(wish: PositionWish, prompt_tokens: int, find: SpanFinder = no_text) -> PositionSelector:
    """A name is kept; positions and spans become sorted unique absolute positions, each inside the prompt.

    Raises SelectorError for a position outside `[-prompt_tokens, prompt_tokens)`, a span that is not there, or an empty list.
    """
    if isinstance(wish, str):
        return wish
    if isinstance(wish, Span):
        return sorted(_span(wish, find, ""))
    if not wish:
        raise SelectorError("no position named: give at least one")
    positions: set[int] = set()
    for index, item in enumerate(wish):
        if isinstance(item, Span):
            positions.update(_span(item, find, f"[{index}]"))
            continue
        if not -prompt_tokens <= item < prompt_tokens:
            detail = f"position {item} is beyond the prompt, which has {prompt_tokens} tokens (0 to {prompt_tokens - 1})"
            raise SelectorError(detail, f"[{index}]")
        positions.add(item % prompt_tokens)
    return sorted(positions)


def _span(span: Span, find: SpanFinder, at: str) -> list[int]:
    try:
        return find(span)
    except SelectorError as error:
        raise SelectorError(str(error), at + error.at) from error


def cut_positions(selector: PositionWish, prompt_tokens: int) -> PositionWish:
    """A position list without what is beyond the prompt: for what is taken of prompts of every length. It may be empty."""
    if not isinstance(selector, list):
        return selector
    return [item for item in selector if isinstance(item, Span) or -prompt_tokens <= item < prompt_tokens]


def lowest_position(selector: PositionSelector, prompt_tokens: int) -> int:
    """The first absolute position that a resolved selector names."""
    if isinstance(selector, str):
        return {"last_prompt": prompt_tokens - 1, "all_generated": prompt_tokens, "all_prompt": 0, "all": 0}[selector]
    return min(selector)


def select(selector: PositionSelector, start: int, stop: int, prompt_tokens: int) -> list[int] | range:
    """The absolute positions in the window `[start, stop)` that a resolved selector names, ascending."""
    if selector == "all":
        return range(start, stop)
    if selector == "all_prompt":
        return range(start, min(stop, prompt_tokens))
    if selector == "all_generated":
        return range(max(start, prompt_tokens), stop)
    if selector == "last_prompt":
        return range(prompt_tokens - 1, prompt_tokens) if start < prompt_tokens <= stop else range(0)
    return selector[bisect_left(selector, start) : bisect_left(selector, stop)]


def as_ranges(numbers: Iterable[int], most: int | None = None) -> str:
    """`[0, 1, 2, 5]` as `0-2, 5`; of more than `most` ranges the rest is only counted."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:most]]
    left = len(ranges) - len(shown)
    return ", ".join([*shown, f"and {left} more ranges"] if left else shown)

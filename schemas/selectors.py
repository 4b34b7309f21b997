"""Which layers, which positions, which hook point? Selectors as users write them, resolved to plain names and numbers."""

from typing import Literal, cast, get_args

from .base import Record

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


#: `all`, `a-b` (inclusive), one layer, or a list; negative numbers count from the last layer.
LayerSelector = str | int | list[int]

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
PositionWish = PositionName | list[int | Span] | Span


def resolve_layers(selector: LayerSelector, num_layers: int) -> list[int]:
    """Sorted unique layer numbers in `[0, num_layers)`.

    Raises ValueError saying what is wrong and what would be right.
    """
    if isinstance(selector, str):
        if selector == "all":
            return list(range(num_layers))
        first, dash, last = selector.partition("-")
        if not (dash and first.isdigit() and last.isdigit()):
            raise ValueError(f'{selector!r} is not a layer selector: use "all", "a-b", a number or a list of numbers')
        if int(first) > int(last):
            raise ValueError(f"range {selector!r} is empty: the first layer is above the last")
        wanted = [int(first), int(last)]
        _check_layers(wanted, num_layers)
        return list(range(wanted[0], wanted[1] + 1))
    wanted = [selector] if isinstance(selector, int) else list(selector)
    if not wanted:
        raise ValueError("no layer named: give at least one")
    _check_layers(wanted, num_layers)
    return sorted({layer % num_layers for layer in wanted})


def _check_layers(layers: list[int], num_layers: int) -> None:
    for layer in layers:
        if not -num_layers <= layer < num_layers:
            raise ValueError(f"layer {layer} is out of range: the model has layers 0 to {num_layers - 1}")


def resolve_positions(selector: PositionSelector, prompt_tokens: int) -> PositionSelector:
    """A name is kept; a list becomes sorted unique absolute positions, each inside the prompt.

    Raises ValueError for a position outside `[-prompt_tokens, prompt_tokens)` or an empty list.
    """
    if isinstance(selector, str):
        return selector
    if not selector:
        raise ValueError("no position named: give at least one")
    for position in selector:
        if not -prompt_tokens <= position < prompt_tokens:
            raise ValueError(f"position {position} is beyond the prompt, which has {prompt_tokens} tokens (0 to {prompt_tokens - 1})")
    return sorted({position % prompt_tokens for position in selector})


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
    return [position for position in selector if start <= position < stop]


def count_positions(selector: PositionSelector, prompt_tokens: int, max_tokens: int) -> int:
    """How many rows per layer a resolved selector may ask for, when up to `max_tokens` are generated."""
    if isinstance(selector, str):
        return len(select(selector, 0, prompt_tokens + max_tokens - 1, prompt_tokens))
    return len(selector)

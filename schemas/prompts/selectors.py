"""Selectors of layers, positions and hook points as users write them, and their resolution to names
and numbers.
"""

import re
import sys
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, cast, get_args

import msgspec

from ..base.limits import (
    MAX_DIMENSIONS,
    MAX_IMAGE,
    MAX_LAYER,
    MAX_LAYER_TEXT,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_SPAN_TEXT,
    Count,
)
from ..base.records import Record, T
from .chat import Role
from .images import MAX_IMAGE_TOKENS, ImageRef, inside
from .windows import WINDOWS, Windowed, joined


class SelectorError(ValueError):
    """A selector cannot be resolved; `at` is the path of the cause in it, such as `[1].text`."""

    def __init__(self, detail: str, at: str = ""):
        super().__init__(detail)
        self.at = at


#: The hook points. For layer L with residual stream s, in the order of the forward pass:
#: `pre_attn`: s entering the layer, before its input norm (an edit reaches this layer's attention);
#: `attn_out`: the attention branch just before it is added;
#: `post_attn`: s after attention was added, before the MLP's norm (an edit reaches this layer's
#: MLP);
#: `mlp_in`: the normed MLP input;
#: `mlp_out`: the MLP branch just before it is added, after any post-norm;
#: `post_block`: s leaving the layer (HF `hidden_states[L+1]`).
#: Inside attention and MLP, with rows of other widths (see `schemas.model.banks`), served only if
#: the setting `hooks` names them:
#: `q_proj`, `k_proj`: outputs of the projections, by head; `q`, `k`: as attention uses them, after
#: any norm and rotary embedding; `v`; `z`: input of the output projection, by head; `mlp_act`:
#: input of the down projection, by neuron; `router`: the router's logits, by expert.
Hook = Literal[
    "pre_attn", "attn_out", "post_attn", "mlp_in", "mlp_out", "post_block",
    "q_proj", "k_proj", "q", "k", "v", "z", "mlp_act", "router",
]  # fmt: skip
#: Hook points with rows of the residual stream's width.
HOOKS: tuple[Hook, ...] = get_args(Hook)[:6]
INSIDE: tuple[Hook, ...] = get_args(Hook)[6:]
#: Why a model does not serve a hook inside attention or the MLP, and how to change that.
NOT_SET = (
    "the worker's setting hooks must name it, or `inside` (`midstream up --set hooks=all,inside`)"
)
EVERY: tuple[Hook, ...] = get_args(Hook)
#: All hook points, in the order of a layer's forward pass.
FORWARD: tuple[Hook, ...] = (
    "pre_attn",
    "q_proj",
    "k_proj",
    "q",
    "k",
    "v",
    "z",
    "attn_out",
    "post_attn",
    "mlp_in",
    "router",
    "mlp_act",
    "mlp_out",
    "post_block",
)
#: Hooks on the residual stream itself; the others are on branches.
STREAM_HOOKS: frozenset[Hook] = frozenset({"pre_attn", "post_attn", "post_block"})

#: TransformerLens' names, with and without `hook_`.
Alias = Literal[
    "resid_pre",
    "resid_mid",
    "resid_post",
    "hook_resid_pre",
    "hook_resid_mid",
    "hook_resid_post",
    "hook_attn_out",
    "hook_mlp_out",
    "rot_q",
    "rot_k",
    "mlp_post",
    "hook_q",
    "hook_k",
    "hook_v",
    "hook_z",
    "hook_rot_q",
    "hook_rot_k",
    "attn.hook_q",
    "attn.hook_k",
    "attn.hook_v",
    "attn.hook_z",
    "attn.hook_rot_q",
    "attn.hook_rot_k",
    "mlp.hook_post",
]
ALIASES: dict[str, Hook] = {
    "resid_pre": "pre_attn",
    "resid_mid": "post_attn",
    "resid_post": "post_block",
    "hook_resid_pre": "pre_attn",
    "hook_resid_mid": "post_attn",
    "hook_resid_post": "post_block",
    "hook_attn_out": "attn_out",
    "hook_mlp_out": "mlp_out",
    "rot_q": "q",
    "rot_k": "k",
    "mlp_post": "mlp_act",
    "hook_q": "q_proj",
    "hook_k": "k_proj",
    "hook_v": "v",
    "hook_z": "z",
    "hook_rot_q": "q",
    "hook_rot_k": "k",
    "attn.hook_q": "q_proj",
    "attn.hook_k": "k_proj",
    "attn.hook_v": "v",
    "attn.hook_z": "z",
    "attn.hook_rot_q": "q",
    "attn.hook_rot_k": "k",
    "mlp.hook_post": "mlp_act",
}
#: Hook point → its name inside a block, as TransformerLens writes it: its last alias.
LENS_NAMES: dict[Hook, str] = {hook: name for name, hook in ALIASES.items()}
_FULL_NAME = re.compile(r"blocks\.(?P<layer>[0-9]{1,6})\.(?P<name>[a-z_.]+)")
#: A hook point's name in requests.
HookName = Hook | Alias
#: Hook point → ascending layers.
Sites = dict[Hook, list[int]]
#: The same in receipts and files, which may be of another version.
StoredSites = dict[str, list[int]]


def resolve_hook(name: HookName) -> Hook:
    """Return Midstream's name of a hook point; `name` may be TransformerLens' name."""
    return ALIASES.get(name) or cast(Hook, name)


class ByHook(dict[Hook, T]):
    """Hook point → value; a hook point may be named as Midstream or as TransformerLens names it,
    whichever the key is.
    """

    def __missing__(self, name: HookName) -> T:
        keys = {resolve_hook(key): key for key in self}
        return super().__getitem__(keys[resolve_hook(name)])

    get = Mapping.get  # type: ignore[assignment]
    __contains__ = Mapping.__contains__


class KeyedByHook:
    """A record whose mappings have hook points as keys."""

    __slots__ = ()

    def __post_init__(self: Any) -> None:
        for name in self.__struct_fields__:
            mapping = getattr(self, name)
            if isinstance(mapping, dict):
                msgspec.structs.force_setattr(self, name, ByHook(mapping))


def full_name(text: object) -> tuple[Hook, int] | None:
    """Return hook point and layer of a name such as `blocks.3.hook_resid_post`; None for any other
    value.
    """
    match = _FULL_NAME.fullmatch(text) if isinstance(text, str) else None
    hook = ALIASES.get(match["name"]) if match else None
    return (hook, int(match["layer"])) if match and hook else None


LayerNumber = Annotated[int, msgspec.Meta(ge=-MAX_LAYER, le=MAX_LAYER)]
#: `all`; one layer; a list; or text such as `0-3,7,-1` (ranges are inclusive). Negative numbers
#: count from the last layer.
LayerSelector = (
    Annotated[str, msgspec.Meta(max_length=MAX_LAYER_TEXT)]
    | LayerNumber
    | Annotated[list[LayerNumber], msgspec.Meta(max_length=MAX_LAYERS)]
)
#: Dimensions of the residual stream, written as layers are.
DimensionSelector = (
    Annotated[str, msgspec.Meta(max_length=MAX_DIMENSIONS)]
    | LayerNumber
    | Annotated[list[LayerNumber], msgspec.Meta(max_length=MAX_DIMENSIONS)]
)
#: Heads of a hook whose rows have heads, written as layers are.
HeadSelector = LayerSelector
_LAYERS = re.compile(r"(-?[0-9]{1,6})(?:-(-?[0-9]{1,6}))?")

#: Names of sets of positions.
PositionName = Literal["last_prompt", "all_prompt", "all_generated", "all"]
#: Names in requests; `image`: the tokens of all images of the prompt.
RequestedName = Literal["last_prompt", "all_prompt", "all_generated", "all", "image"]
#: The range of valid positions.
PositionNumber = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=1 << 31)]


class PositionWindow(Record, omit_defaults=True):
    """Absolute positions `[start, stop)`; without `stop`, to the last generated token. `step`: only
    every step-th of them, from the first.
    """

    start: int
    stop: int | None = None
    step: int = 1

    def first_from(self, position: int) -> int:
        """Return the first of its positions that is not before `position`."""
        skipped = -(-max(position - self.start, 0) // self.step)
        return self.start + skipped * self.step


#: The resolved form, stored and sent to ranks: a name, ascending absolute positions, or a window.
PositionSelector = PositionName | list[int] | PositionWindow


#: Parts of a conversation, as the chat template renders them: `tools`: the definitions of tools;
#: `header`: of a message, the template's own text before its content; `all`: a message with the
#: template's text around it.
Part = Literal["content", "reasoning", "tool_calls", "tools", "header", "all"]
_KINDS = ("text", "image", "turn", *WINDOWS)


# `omit_defaults`: servers without the newer fields accept spans that do not use them
class Span(Windowed, omit_defaults=True):
    """Consecutive tokens: by their text, by their positions, those of an image, or those of a
    message; or positions that are known only when the request ends.

    By `text`: every prompt token that overlaps an occurrence of the text in the prompt.
    `occurrence`: 0 for the first, 1 for the second, …, negative from the last; null: all. By
    position: from `start` (null: the first) up to but not including `stop` (null: to the last
    generated token). Negative positions count from the prompt's end; positions of generated tokens
    follow those of the prompt. By `image`: the tokens of an image of the prompt, by its number
    (negative from the last), or of `all` images; with both `start` and `stop`, only the tokens
    `[start, stop)` of each image, counted from the image's first token. By `turn`, `role` and
    `part` of a conversation: the tokens that overlap a part (null: the content) of the message with
    this index among those with the role (null: among all; negative from the last), or of all of
    them (null). `every`: of a range, only every n-th position, from the first.

    Windows are for captures alone.
    """

    text: Annotated[str, msgspec.Meta(max_length=MAX_SPAN_TEXT)] | None = None
    occurrence: PositionNumber | None = 0
    start: PositionNumber | None = None
    stop: PositionNumber | None = None
    image: Annotated[int, msgspec.Meta(ge=-MAX_IMAGE - 1, le=MAX_IMAGE)] | Literal["all"] | None = (
        None
    )
    every: Count | None = None
    turn: PositionNumber | None = None
    role: Role | None = None
    part: Part | None = None

    def __post_init__(self) -> None:
        kinds = [
            name
            for name in _KINDS
            if getattr(self, name) is not None or (name == "turn" and self.is_turn)
        ]
        if len(kinds) > 1 and kinds != ["text", "image"]:  # see `_check_image`
            raise ValueError(f"give one of {', '.join(kinds)}")
        if self.is_window or self.is_turn:
            if (self.start, self.stop, self.every, self.occurrence) != (None, None, None, 0):
                raise ValueError(f"{kinds[0]} takes neither start, stop, every nor occurrence")
            if self.part == "tools" and (self.turn, self.role) != (None, None):
                raise ValueError("part 'tools' is of the whole conversation: omit turn and role")
            return
        if self.every is not None and kinds:
            raise ValueError(f"every is valid for a range of positions: omit {kinds[0]}")
        if self.image is not None:
            self._check_image()
            return
        if self.is_range == (self.text is not None) or (self.is_range and self.occurrence != 0):
            raise ValueError(
                "a span is either `text` (with `occurrence`) or a range of positions with "
                "`start`, `stop` or both"
            )
        if self.text == "":
            raise ValueError("text is empty: give a part of the prompt")
        first = self.start or 0
        stop = self.stop
        if stop is not None and first >= stop and (first < 0) == (stop < 0):
            raise ValueError(f"the range from {first} up to {stop} is empty: `stop` is exclusive")

    def _check_image(self) -> None:
        if (
            self.text is not None
            or self.occurrence != 0
            or (self.start is None) != (self.stop is None)
        ):
            raise ValueError(
                "a span of an image has `image`, and either both of `start` and `stop` or none"
            )
        if (
            self.start is not None
            and self.stop is not None
            and not 0 <= self.start < self.stop <= MAX_IMAGE_TOKENS
        ):
            raise ValueError(
                f"tokens {self.start} up to {self.stop} of an image: `start` is 0 or more, and "
                "less than `stop`"
            )

    @property
    def is_range(self) -> bool:
        return self.image is None and (self.start, self.stop, self.every) != (None, None, None)

    @property
    def is_turn(self) -> bool:
        return (self.turn, self.role, self.part) != (None, None, None)


_Places = Annotated[list[PositionNumber | Span], msgspec.Meta(max_length=MAX_POSITIONS)]
#: Positions in requests: a name, a list of positions and spans, or one span.
RequestedPositions = RequestedName | _Places | Span
#: The same where nothing is generated.
PromptPositions = Literal["all_prompt", "last_prompt"] | _Places | Span
_SPAN = re.compile(r"last:(?P<last>[0-9]{1,9})|(?P<start>-?[0-9]{1,9})?:(?P<stop>-?[0-9]{1,9})?")


def written_span(text: str) -> dict[str, int] | None:
    """Parse `5:`, `5:9`, `-4:`, `:9` or `last:64` as fields of a `Span`; None for other text."""
    match = _SPAN.fullmatch(text.strip())
    found = {} if match is None else match.groupdict()
    return {name: int(place) for name, place in found.items() if place is not None} or None


def resolve_layers(
    selector: LayerSelector | DimensionSelector, num_layers: int, thing: str = "layer"
) -> list[int]:
    """Return sorted unique layer numbers in `[0, num_layers)`. `thing`: the noun in errors, for
    selectors of dimensions or heads; `num_layers` is then the number of these.

    Raises SelectorError with the reason and the valid values.
    """
    if selector == "all":
        return list(range(num_layers))
    if isinstance(selector, str):
        return joined(_layer_range(part.strip(), num_layers, thing) for part in selector.split(","))
    layers = [selector] if isinstance(selector, int) else selector
    if not layers:
        raise SelectorError(f"no {thing} given: give at least one")
    return sorted({_layer(layer, num_layers, thing) for layer in layers})


def parts_of(selector: LayerSelector | DimensionSelector | None) -> int:
    """Return the number of a selector's parts: numbers and ranges."""
    if isinstance(selector, str):
        return selector.count(",") + 1
    return len(selector) if isinstance(selector, list) else 1


def _layer_range(text: str, num_layers: int, thing: str) -> range:
    match = _LAYERS.fullmatch(text)
    if match is None:
        raise SelectorError(
            f'{text[:40]!r} is not a {thing} selector: use "all", "a-b", a number or a list '
            "of numbers"
        )
    first = _layer(int(match[1]), num_layers, thing)
    last = first if match[2] is None else _layer(int(match[2]), num_layers, thing)
    if first > last:
        raise SelectorError(f"range {text!r} is empty: its first {thing} is greater than its last")
    return range(first, last + 1)


def _layer(layer: int, num_layers: int, thing: str) -> int:
    if not -num_layers <= layer < num_layers:
        raise SelectorError(
            f"{thing} {layer} is out of range: the model has {thing}s 0 to {num_layers - 1}"
        )
    return layer % num_layers


def served_hook(name: HookName, hooks: Sequence[str], absent: Mapping[str, str]) -> Hook:
    """Return the hook of this name. `hooks`, `absent`: see `resolve_sites`.

    Raises SelectorError for one that is not served.
    """
    hook = resolve_hook(name)
    if hook not in hooks:
        why = absent.get(hook, NOT_SET if hook in INSIDE else "")
        wrong = f"hook {name!r} is not served: {why};" if why else f"unknown hook {name!r}:"
        raise SelectorError(f"{wrong} the model has {', '.join(hooks)}")
    return hook


def resolve_sites(
    layer_selectors: Mapping[HookName, LayerSelector],
    num_layers: int,
    hooks: Sequence[str] = HOOKS,
    absent: Mapping[str, str] = {},
) -> Sites:
    """Return hook → ascending layers, with hooks in the order of the forward pass.

    `hooks`: the served hooks. `absent`: hook that is not served → the reason.

    Raises SelectorError, whose `at` is the hook as the user named it.
    """
    named: dict[Hook, HookName] = {}
    sites: Sites = {}
    for name, layers in layer_selectors.items():
        hook = resolve_hook(name)
        if hook in named:
            raise SelectorError(
                f"{hook} is given twice: as {named[hook]!r} and as {name!r}", f".{name}"
            )
        try:
            served_hook(name, hooks, absent)
            sites[hook] = resolve_layers(layers, num_layers)
        except SelectorError as error:
            raise SelectorError(str(error), f".{name}") from error
        named[hook] = name
    return {hook: sites[hook] for hook in FORWARD if hook in sites}


class SpanFinder(Protocol):
    """Finds spans in the text of one prompt."""

    def __call__(self, span: Span) -> list[int]:
        """Return the positions of the prompt tokens that overlap a span of the text, or of a
        message. Raises SelectorError.
        """


def no_text(span: Span) -> list[int]:
    """Reject a span of a text or a message for a prompt that has none."""
    if span.is_turn:
        raise SelectorError(
            "turn, role and part need a prompt given as `messages`: this one is text or token ids"
        )
    raise SelectorError(
        "a text span needs the prompt's text, and its token ids do not decode to a text that "
        "encodes to them: give positions"
    )


def resolve_positions(
    requested_positions: RequestedPositions,
    prompt_tokens: int,
    find: SpanFinder = no_text,
    images: Sequence[ImageRef] = (),
) -> PositionSelector:
    """Resolve positions in one prompt. A name is kept, a single range becomes a window, and
    anything else becomes sorted unique positions in the prompt.

    With `images`, positions are places in the prompt as written, see `schemas.prompts.images`.
    Raises SelectorError for a position outside `[-prompt_tokens, prompt_tokens)`, a span that does
    not occur, an empty list or range, a range in a list that extends beyond the prompt, or
    positions that are known only when the request ends.
    """
    if requested_positions == "image":
        return _of_images(Span(image="all"), images, "")
    if isinstance(requested_positions, str):
        return requested_positions
    if isinstance(requested_positions, Span):
        _check(requested_positions, images, "")
        if requested_positions.image is not None:
            return _of_images(requested_positions, images, ".image")
        return (
            _window(requested_positions, prompt_tokens, "")
            if requested_positions.is_range
            else sorted(_span(requested_positions, find, ""))
        )
    if not requested_positions:
        raise SelectorError("no position given: give at least one")
    positions: set[int] = set()
    ranges: list[range] = []  # without a step
    spans: set[Span] = set()  # in the text
    for index, item in enumerate(requested_positions):
        if isinstance(item, Span):
            at = f"[{index}]"
            _check(item, images, at)
            if item.image is not None:
                positions.update(_of_images(item, images, f"{at}.image"))
            elif item.is_range:
                part = _inside(_window(item, prompt_tokens, at), prompt_tokens, at)
                if part.step == 1:
                    ranges.append(part)
                else:
                    positions.update(part)
            elif item not in spans:
                spans.add(item)
                positions.update(_span(item, find, at))
            continue
        if not -prompt_tokens <= item < prompt_tokens:
            raise _outside(item, prompt_tokens, f"[{index}]")
        # resolved for each prompt, because requested numbers may apply to prompts of any length
        positions.add(item if item >= 0 else item + prompt_tokens)
    positions.update(joined(ranges))
    return sorted(positions)


def _outside(position: int, prompt_tokens: int, at: str) -> SelectorError:
    return SelectorError(
        f"position {position} is out of range: the prompt has positions 0 to {prompt_tokens - 1}",
        at,
    )


def _check(span: Span, images: Sequence[ImageRef], at: str) -> None:
    """Raises SelectorError for positions that are known only when the request ends, and for every
    n-th position of a prompt with images.
    """
    # Not for edits: an edit acts when its token is computed, before its window is known.
    if span.is_window:
        raise SelectorError(
            "last, head_and_tail, around and when are for the positions of a capture, and stand "
            "alone: their positions are known only when the request ends; edits take trigger",
            at,
        )
    if span.every is not None and images:
        raise SelectorError("every is not valid for a prompt with images", at)


def _of_images(span: Span, images: Sequence[ImageRef], at: str) -> list[int]:
    """Return the places of images' tokens, ascending. Raises SelectorError."""
    if not images:
        raise SelectorError("the prompt has no image", at)
    number = span.image
    if isinstance(number, int) and not -len(images) <= number < len(images):
        raise SelectorError(
            f"image {number} is out of range: the prompt has images 0 to {len(images) - 1}", at
        )
    chosen = range(len(images)) if not isinstance(number, int) else [number % len(images)]
    if span.start is None or span.stop is None:
        return [
            place for image in chosen for place in range(images[image].start, images[image].stop)
        ]
    return [inside(image, token) for image in chosen for token in range(span.start, span.stop)]


def _window(span: Span, prompt_tokens: int, at: str) -> PositionWindow:
    """Resolve a range's negative positions from the prompt's end. Raises SelectorError."""
    for name, place in (("start", span.start), ("stop", span.stop)):
        if place is not None and place < -prompt_tokens:
            raise _outside(place, prompt_tokens, f"{at}.{name}")
    start = _counted(span.start or 0, prompt_tokens)
    stop = None if span.stop is None else _counted(span.stop, prompt_tokens)
    if stop is not None and start >= stop:
        raise SelectorError(
            (f"the range from {start} up to {stop} is empty in a prompt of length {prompt_tokens}"),
            at,
        )
    return PositionWindow(start=start, stop=stop, step=span.every or 1)


def _counted(place: int, prompt_tokens: int) -> int:
    return place + prompt_tokens if place < 0 else place


def _inside(window: PositionWindow, prompt_tokens: int, at: str) -> range:
    """Return a range in a list of positions. Raises SelectorError if it is not in the prompt."""
    if window.stop is None:
        raise SelectorError(
            "a range in a list needs a `stop`; only a single range may be open-ended", at
        )
    if window.stop > prompt_tokens:
        raise SelectorError(
            f"the range stops at {window.stop}, but the prompt has length {prompt_tokens}; "
            "only a single range may extend beyond it",
            f"{at}.stop",
        )
    return range(window.start, window.stop, window.step)


def _span(span: Span, find: SpanFinder, at: str) -> list[int]:
    try:
        return find(span)
    except SelectorError as error:
        raise SelectorError(str(error), at + error.at) from error


def cut_positions(selector: RequestedPositions, prompt_tokens: int) -> RequestedPositions:
    """Drop positions beyond the prompt from a selector that applies to prompts of every length.

    Returns an empty list if no position is left. A single range (not in a list) keeps its positions
    of generated tokens.
    """
    if isinstance(selector, Span):
        return _cut(selector, prompt_tokens, None) or []
    if not isinstance(selector, list):
        return selector
    cut = [
        _cut(item, prompt_tokens, prompt_tokens) if isinstance(item, Span) else item
        for item in selector
    ]
    return [
        item
        for item in cut
        if isinstance(item, Span) or (item is not None and -prompt_tokens <= item < prompt_tokens)
    ]


def _cut(span: Span, prompt_tokens: int, end: int | None) -> Span | None:
    """Return the part of a range from 0 up to `end` (None: no upper bound), or None if it is empty.

    A span that is not a range is returned unchanged.
    """
    if not span.is_range:
        return span
    start = max(_counted(span.start or 0, prompt_tokens), 0)
    stop = end if span.stop is None else _counted(span.stop, prompt_tokens)
    stop = stop if end is None or stop is None else min(stop, end)
    empty = stop is not None and start >= stop
    return None if empty else Span(start=start, stop=stop, every=span.every)


def lowest_position(selector: PositionSelector, prompt_tokens: int) -> int:
    """Return the first absolute position that a resolved selector selects."""
    if isinstance(selector, str):
        return {
            "last_prompt": prompt_tokens - 1,
            "all_generated": prompt_tokens,
            "all_prompt": 0,
            "all": 0,
        }[selector]
    return selector.start if isinstance(selector, PositionWindow) else min(selector)


def end_position(selector: PositionSelector, prompt_tokens: int) -> int:
    """Return the position after the last one that a resolved selector selects; `sys.maxsize` if the
    selector has no upper bound.
    """
    if isinstance(selector, str):
        return prompt_tokens if selector in ("last_prompt", "all_prompt") else sys.maxsize
    if isinstance(selector, PositionWindow):
        return sys.maxsize if selector.stop is None else selector.stop
    return max(selector) + 1


def depends_on_prompt(selector: PositionSelector) -> bool:
    """Return whether a resolved selector selects other positions in a longer prompt with the same
    beginning.
    """
    return selector in ("last_prompt", "all_prompt", "all_generated")


def select(
    selector: PositionSelector, start: int, stop: int, prompt_tokens: int
) -> list[int] | range:
    """Return the absolute positions in `[start, stop)` that a resolved selector has, ascending."""
    if isinstance(selector, PositionWindow):
        end = stop if selector.stop is None else min(stop, selector.stop)
        chosen = range(selector.first_from(start), end, selector.step)
        return chosen if selector.step == 1 else list(chosen)
    if selector == "all":
        return range(start, stop)
    if selector == "all_prompt":
        return range(start, min(stop, prompt_tokens))
    if selector == "all_generated":
        return range(max(start, prompt_tokens), stop)
    if selector == "last_prompt":
        return (
            range(prompt_tokens - 1, prompt_tokens) if start < prompt_tokens <= stop else range(0)
        )
    return selector[bisect_left(selector, start) : bisect_left(selector, stop)]


def ranges_of(text: str) -> list[range]:
    """Invert `as_ranges`, with or without spaces. Raises ValueError for another text."""
    result = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        result.append(range(int(first), int(last or first) + 1))
    return result


def runs_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and the last of each run of consecutive numbers among ascending ones."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        first = runs.pop()[0] if runs and number == runs[-1][1] + 1 else number
        runs.append((first, number))
    return runs


def as_ranges(numbers: Iterable[int], most: int | None = None) -> str:
    """Write `[0, 1, 2, 5]` as `0-2, 5`; ranges beyond `most` are only counted."""
    ranges = runs_of(sorted(set(numbers)))
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:most]]
    remaining = len(ranges) - len(shown)
    return ", ".join(
        [*shown, f"and {remaining} more range{'s' if remaining > 1 else ''}"]
        if remaining
        else shown
    )

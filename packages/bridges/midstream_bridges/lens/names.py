"""Maps TransformerLens' names of activations to hook points, and says which a served model has."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from midstream.schemas.base.errors import MidstreamError, invalid
from midstream.schemas.base.records import by_key
from midstream.schemas.jobs.models import ModelFacts
from midstream.schemas.model.banks import BANK, OF_HEADS
from midstream.schemas.prompts.selectors import FORWARD, INSIDE, LENS_NAMES, NOT_SET, Hook

PATTERN = "attn.hook_pattern"
_ORDER: tuple[tuple[Hook, ...], ...] = (
    ("pre_attn",), ("q_proj",), ("k_proj",), ("v",), ("q",), ("k",), ("q", "k"), ("z",),
    ("attn_out",), ("post_attn",), ("mlp_act",), ("mlp_out",), ("post_block",),
)  # fmt: skip
#: Names within a block, in the order of the forward pass → the hook points whose rows give the
#: activation.
BLOCK: dict[str, tuple[Hook, ...]] = {
    LENS_NAMES[hooks[0]] if len(hooks) == 1 else PATTERN: hooks for hooks in _ORDER
}
#: TransformerLens' short names: the part after `hook_`, and its aliases.
SHORT: dict[str, str] = {name.rpartition("hook_")[2]: name for name in BLOCK} | {
    "attn": PATTERN,
    "query": "attn.hook_q",
    "key": "attn.hook_k",
    "value": "attn.hook_v",
    "mlp_post": "mlp.hook_post",
}
#: The end of the name of an activation that Midstream does not have → the reason, and an
#: alternative.
ABSENT: dict[str, str] = {
    "hook_embed": (
        "embeddings are served with positions added: blocks.0.hook_resid_pre is their sum"
    ),
    "hook_pos_embed": (
        "embeddings are served with positions added: blocks.0.hook_resid_pre is their sum"
    ),
    "hook_attn_scores": (
        "scores before the softmax are not served: attn.hook_pattern is, and so are "
        "attn.hook_rot_q and attn.hook_rot_k"
    ),
    "hook_result": (
        "what each head adds to the stream needs its weights, which are not served: "
        "attn.hook_z is what enters them"
    ),
    "hook_pre": "MLPs are read where they enter the down projection: mlp.hook_post",
    "hook_pre_linear": "MLPs are read where they enter the down projection: mlp.hook_post",
    "hook_scale": "the scales of norms are not served",
    "hook_normalized": "the outputs of norms are not served",
}
_FULL = re.compile(r"blocks\.(?P<layer>\d{1,6})\.(?P<name>.+)")

#: An activation as users name it: `blocks.3.hook_z`, or a short name with its layer, such as
#: `("z", 3)`.
CacheKey = str | tuple[Any, ...]


class NamedSite(NamedTuple):
    """One activation: a name of `BLOCK` in one layer."""

    name: str
    layer: int

    @property
    def full(self) -> str:
        """The name as TransformerLens writes it."""
        return f"blocks.{self.layer}.{self.name}"


class Card(ModelFacts, kw_only=True):
    """The response of `GET /v1/models/{name}`: the fields that this package reads."""

    id: str

    def has(self, name: str) -> bool:
        """Return whether the model serves the activation `name` of `BLOCK`."""
        return all(hook in self.hooks for hook in BLOCK[name])

    def why_not(self, name: str) -> str:
        """Return why the model does not serve the activation `name`."""
        missing = next(hook for hook in BLOCK[name] if hook not in self.hooks)
        start = f"{missing} is not served"
        if missing in self.absent:
            return f"{start}: {self.absent[missing]}"
        return f"{start}: {NOT_SET}" if missing in INSIDE else start

    def shape(self, hook: Hook) -> tuple[int, ...]:
        """Return the shape of one token's row: `[heads, width]` at hooks with heads, otherwise
        `[width]`.
        """
        row = self.inside.get(hook)
        if row is None:
            return (self.hidden_size,)
        return (row.heads, row.width) if BANK[hook] in OF_HEADS else (row.size,)

    @property
    def names(self) -> list[str]:
        """The activations of a block that the model serves, in the order of the forward pass."""
        return [name for name in BLOCK if self.has(name)]

    def sites(self) -> list[NamedSite]:
        """Return all served activations, layer by layer in the order of the forward pass."""
        return [NamedSite(name, layer) for layer in range(self.num_layers) for name in self.names]


def site_of(key: CacheKey, card: Card, field: str = "name") -> NamedSite:
    """Return the activation that a key names.

    Raises MidstreamError naming `field`, with the reason and the valid names.
    """
    if isinstance(key, str) and (match := _FULL.fullmatch(key)):
        name = match["name"]
        layer = int(match["layer"])
    elif _is_short(key):
        name = SHORT.get(key[0], key[0])
        layer = int(key[1])
    elif isinstance(key, str) and (why := _absent(key)):
        raise invalid(field, f"{key!r}: {why}")
    else:
        allowed = (
            'a full name such as "blocks.0.hook_resid_post", or a short one with its layer '
            'such as ("resid_post", 0)'
        )
        raise invalid(field, f"{str(key)[:80]!r} does not name an activation", allowed=allowed)
    if name not in BLOCK:
        if why := _absent(name):
            raise invalid(field, f"{name!r}: {why}")
        raise invalid(
            field,
            f"no activation is called {name[:80]!r}",
            allowed=", ".join(card.names),
        )
    if not -card.num_layers <= layer < card.num_layers:
        raise invalid(
            field, f"layer {layer} is out of range", allowed=f"0 to {card.num_layers - 1}"
        )
    if not card.has(name):
        raise MidstreamError("not_found", f"{name}: {card.why_not(name)}", field=field)
    return NamedSite(name, layer % card.num_layers)


def _is_short(key: Any) -> bool:
    """Return whether it is a short name with its layer."""
    if not isinstance(key, tuple) or len(key) not in (2, 3) or not isinstance(key[0], str):
        return False
    return hasattr(key[1], "__index__") and not isinstance(key[1], bool)


def _absent(name: str) -> str:
    """Return why Midstream lacks an activation of TransformerLens; empty for an unknown name."""
    return ABSENT.get(name.rpartition(".")[2], "") or ABSENT.get(f"hook_{name}", "")


#: The filter of `run_with_cache`: None for all activations, one, several, or a predicate of a name.
Filter = None | str | Sequence[CacheKey] | Callable[[str], bool]


def chosen(names: Filter, card: Card, field: str = "names_filter") -> list[NamedSite]:
    """Return the activations that a filter selects, in the order of the forward pass.

    Raises MidstreamError as `site_of` does, and if the filter selects none.
    """
    if names is None:
        return card.sites()
    if callable(names):
        sites = [site for site in card.sites() if names(site.full)]
    else:
        is_key = isinstance(names, str) or _is_short(names)
        keys: Iterable[CacheKey] = [names] if is_key else names  # type: ignore[list-item]
        named = {site_of(key, card, f"{field}[{number}]") for number, key in enumerate(keys)}
        sites = [site for site in card.sites() if site in named]
    if not sites:
        raise invalid(
            field,
            "selects no activation",
            allowed=f"{', '.join(card.names)}, each of a block",
        )
    return sites


def hooks_of(sites: Iterable[NamedSite]) -> dict[Hook, list[int]]:
    """Return the hook points, with their layers, that must be captured for these activations."""
    layers = by_key((hook, site.layer) for site in sites for hook in BLOCK[site.name])
    return {hook: sorted(set(layers[hook])) for hook in FORWARD if hook in layers}

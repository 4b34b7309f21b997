"""Gives a run's captured activations under TransformerLens' names, as numpy arrays."""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np

from midstream.client.captures.reader import CaptureReader
from midstream.schemas.base.errors import MidstreamError, invalid

from .names import BLOCK, PATTERN, CacheKey, Card, NamedSite, site_of

#: Methods of TransformerLens' cache that this one lacks → the reason.
REFUSED: dict[str, str] = {
    "apply_ln_to_stack": "it needs the scales of the model's norms, which are not served",
    "compute_head_results": "it needs the output matrices of attention, which are not served",
    "get_full_resid_decomposition": "it needs weights of the MLP, which are not served",
    "get_neuron_results": "it needs the output matrix of the MLP, which is not served",
    "logit_attrs": (
        "it needs the unembedding, which is not served; Client.lens reads rows through it"
    ),
    "logit_lens": "the unembedding is not served; Client.lens reads rows through it, on the server",
    "stack_head_results": "it needs the output matrices of attention, which are not served",
    "stack_neuron_results": "it needs the output matrix of the MLP, which is not served",
    "to": "activations are numpy arrays: torch.from_numpy takes them",
    "toggle_autodiff": "rows come from a server: run_with_cache(..., incl_bwd=True) has gradients",
}
_LN = "norms are not applied: their scales are not served"


class NotServed(MidstreamError, AttributeError):
    """A served model does not have this TransformerLens feature; the message says why."""


def refused(table: Mapping[str, str], owner: str, name: str) -> AttributeError:
    """Return the error for an attribute that `owner` lacks, with the reason from `table` if it has
    one.
    """
    if name in table:
        return NotServed("not_found", f"{owner}.{name} is not available: {table[name]}")
    return AttributeError(f"{owner!r} object has no attribute {name!r}")


#: The end of the names of gradients.
GRAD = "_grad"


def _plain(key: Any) -> Any:
    """Return the key of the activation whose gradient `key` names; None: it names none."""
    name, *rest = key if isinstance(key, tuple) and key else (key,)
    if not isinstance(name, str) or not name.endswith(GRAD):
        return None
    plain = name.removesuffix(GRAD)
    return (plain, *rest) if isinstance(key, tuple) else plain


class ActivationCache(Mapping[str, np.ndarray]):
    """Maps `cache["blocks.3.hook_resid_post"]` or `cache["resid_post", 3]` to float32 arrays, read
    on access.

    Shapes are TransformerLens': `[batch, pos, d_model]`; `[batch, pos, head, d_head]` for `hook_q`,
    `hook_k`, `hook_v`, `hook_z`, `hook_rot_q` and `hook_rot_k` (keys and values have key heads);
    `[batch, head, query, key]` for `hook_pattern`; `[batch, pos, d_mlp]` for `mlp.hook_post`. Rows
    include the run's own edits. With `gradients`, `cache["blocks.3.hook_resid_post_grad"]` has the
    gradient at that activation. An activation that was not captured raises MidstreamError that
    lists the captured activations.
    """

    def __init__(
        self,
        reader: CaptureReader,
        card: Card,
        sites: Sequence[NamedSite],
        prompts: Sequence[Sequence[int]],
        gradients: "ActivationCache | None" = None,
        scale: float | None = None,
    ):
        """`scale`: factor of the rows of `gradients`, which a second job captured."""
        self.reader = reader
        self.card = card
        self.gradients = gradients
        self.scale = scale
        self.sites = list(sites)
        self.prompts = [list(prompt) for prompt in prompts]  # token ids
        self.has_batch_dim = True

    def __repr__(self) -> str:
        return (
            f"ActivationCache(job={self.job!r}, prompts={len(self.prompts)}, "
            f"activations={len(self.sites)})"
        )

    def __getattr__(self, name: str) -> Any:
        raise refused(REFUSED, type(self).__name__, name)

    @property
    def job(self) -> str:
        """The id of the job that captured the activations.

        They stay on the server until `client.captures.delete(job)`.
        """
        return self.reader.job

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[str]:
        yield from (site.full for site in self.sites)
        yield from (name + GRAD for name in self.gradients or ())

    def __contains__(self, key: object) -> bool:
        if (plain := _plain(key)) is not None:
            return self.gradients is not None and plain in self.gradients
        try:
            return site_of(key, self.card) in self.sites  # type: ignore[arg-type]
        except MidstreamError:
            return False

    def __getitem__(self, key: CacheKey) -> np.ndarray:
        plain = _plain(key)
        if plain is not None and self.gradients is not None:
            return self.gradients[plain]
        site = site_of(key if plain is None else plain, self.card)
        if plain is not None or site not in self.sites:
            end = "" if plain is None and self.scale is None else GRAD
            kinds = [name + end for name in BLOCK if any(item.name == name for item in self.sites)]
            raise MidstreamError(
                "not_found",
                f"{site.full}{end} was not captured",
                field="names_filter",
                allowed=f"{', '.join(kinds)} of captured layers; gradients with incl_bwd=True",
            )
        rows = np.stack([self._of(site, request) for request in range(len(self.prompts))])
        return rows if self.has_batch_dim else rows[0]

    def _of(self, site: NamedSite, request: int) -> np.ndarray:
        if site.name == PATTERN:
            return self.reader.attention(site.layer, request=request)
        (hook,) = BLOCK[site.name]
        rows = self.reader.array(site.layer, hook, request)
        if self.scale is not None:
            rows = rows * np.float32(self.scale)
        return rows.reshape(len(rows), *self.card.shape(hook))

    def remove_batch_dim(self) -> "ActivationCache":
        """Return the cache without the batch axis. Raises MidstreamError unless it has one
        prompt.
        """
        if len(self.prompts) != 1:
            raise invalid(
                "remove_batch_dim", f"there are {len(self.prompts)} prompts", allowed="one prompt"
            )
        cache = copy(self)
        cache.gradients = self.gradients and self.gradients.remove_batch_dim()
        cache.has_batch_dim = False
        return cache

    def _layers(self, layer: int | None) -> int:
        """Resolve a `layer` argument: None and -1 stand for the number of layers. Raises
        MidstreamError if it is above.
        """
        most = self.card.num_layers
        count = most if layer in (None, -1) else layer
        if not isinstance(count, int) or not 0 <= count <= most:
            raise invalid(
                "layer", f"{layer} is out of range", allowed=f"0 to {most}; None or -1: all"
            )
        return count

    def stack_activation(
        self, activation_name: str, layer: int | None = -1, sublayer_type: str | None = None
    ) -> np.ndarray:
        """Return one activation of all layers below `layer`, `[layers, …]`. None or -1: all."""
        count = self._layers(layer)
        if not count:
            raise invalid(
                "layer",
                "0 has no layers below it",
                allowed=f"1 to {self.card.num_layers}; None or -1: all",
            )
        return np.stack([self[activation_name, item, sublayer_type] for item in range(count)])

    def accumulated_resid(
        self,
        layer: int | None = None,
        incl_mid: bool = False,
        apply_ln: bool = False,
        pos_slice: Any = None,
        mlp_input: bool = False,
        return_labels: bool = False,
    ) -> Any:
        """Return `[components, batch, pos, d_model]`: the residual stream that enters each layer up
        to `layer`; with None or -1, also the output of the last layer.

        Labels: `0_pre`, `0_mid`, …, `final_post`. Raises MidstreamError for `apply_ln`.
        """
        if apply_ln:
            raise invalid("apply_ln", _LN, allowed="False")
        last = self.card.num_layers
        count = self._layers(layer)
        parts: dict[str, CacheKey] = {}
        for item in range(min(count + 1, last)):
            parts[f"{item}_pre"] = ("resid_pre", item)
            if (incl_mid and item < count) or (mlp_input and item == count):
                parts[f"{item}_mid"] = ("resid_mid", item)
        if count == last:
            parts["final_post"] = ("resid_post", last - 1)
        return self._stacked(parts, pos_slice, return_labels)

    def decompose_resid(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        mode: str = "all",
        apply_ln: bool = False,
        pos_slice: Any = None,
        incl_embeds: bool = True,
        return_labels: bool = False,
    ) -> Any:
        """Return `[components, batch, pos, d_model]`: what each component below `layer` adds to the
        residual stream. Their sum is the stream that enters `layer`.

        `mode`: `all`, `attn` or `mlp`. Labels: `embed` (the stream that enters layer 0, so with
        position embeddings if the model has them), `0_attn_out`, `0_mlp_out`, …. Raises
        MidstreamError for `apply_ln`, for an unknown mode, and for a model that multiplies these
        outputs before it adds them, such as Granite: they do not sum to its stream.
        """
        if apply_ln:
            raise invalid("apply_ln", _LN, allowed="False")
        if self.card.multiplied:
            raise invalid(
                "decompose_resid",
                f"the model multiplies {', '.join(self.card.multiplied)} before it adds them",
                allowed="accumulated_resid, and differences of its rows",
            )
        if mode not in ("all", "attn", "mlp"):
            raise invalid("mode", f"{mode!r} is not known", allowed="all, attn, mlp")
        count = self._layers(layer)
        parts: dict[str, CacheKey] = {"embed": ("resid_pre", 0)} if incl_embeds else {}
        for item in range(count + 1 if mlp_input and count < self.card.num_layers else count):
            if mode != "mlp":
                parts[f"{item}_attn_out"] = ("attn_out", item)
            if mode != "attn" and item < count:
                parts[f"{item}_mlp_out"] = ("mlp_out", item)
        return self._stacked(parts, pos_slice, return_labels)

    def _stacked(self, parts: Mapping[str, CacheKey], pos_slice: Any, labels: bool) -> Any:
        if not parts:
            raise invalid("layer", "no components are below it", allowed="a higher layer")
        chosen = pos_slice
        if pos_slice is None:
            chosen = slice(None)
        elif isinstance(pos_slice, tuple):
            chosen = slice(*pos_slice)
        stack = np.stack([self[key][..., chosen, :] for key in parts.values()])
        return (stack, list(parts)) if labels else stack

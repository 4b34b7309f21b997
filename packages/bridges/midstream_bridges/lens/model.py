"""Wraps a served model in the interface of TransformerLens' models: runs with cached activations
and with edits, tokens, generation.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import msgspec
import numpy as np

from midstream.client.sdk import wire
from midstream.client.sdk.client import Client
from midstream.client.sdk.fields import ReadingFields
from midstream.client.values import as_numpy, given
from midstream.schemas.base.errors import MidstreamError, Translated, invalid
from midstream.schemas.jobs.results import JobResult
from midstream.schemas.readings.lens import LensReading

from . import stopping
from .cache import ActivationCache, refused
from .logits import Logits, Predictions
from .names import PATTERN, Card, Filter, NamedSite, chosen, hooks_of
from .ops import Op

#: Number of top tokens at each prompt's last position that every run fetches.
FIRST_TOP = 20
_WEIGHTS = "weights are not served; captures, edits and Client.lens compute with them on the server"
_GRADIENTS = (
    "no gradients flow through a server's forward pass; run_with_cache(..., incl_bwd=True) has "
    "those at activations"
)
#: Attributes of TransformerLens' models that `HookedModel` lacks → the reason.
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            *("W_E", "W_U", "W_O", "W_Q", "W_K", "W_V", "W_in", "W_out", "W_pos", "b_U"),
            *("blocks", "unembed", "embed", "state_dict", "parameters", "named_parameters"),
            "tokens_to_residual_directions",
        ),
        _WEIGHTS,
    ),
    **dict.fromkeys(("backward", "train", "zero_grad", "add_caching_hooks"), _GRADIENTS),
    "enable_compatibility_mode": "weights are as in the checkpoint: nothing is folded or centred",
    "tokenizer": "it is on the server; to_tokens, to_str_tokens and to_string use it",
    "to": "the server decides the device",
}


@dataclass(frozen=True)
class Config:
    """`HookedModel.cfg`, with TransformerLens' names.

    None: unknown, because the server serves no hook that reveals the value.
    """

    model_name: str
    original_architecture: str
    n_layers: int
    d_model: int
    d_vocab: int
    n_ctx: int  # tokens, prompt and generated together
    dtype: str
    n_heads: int | None
    d_head: int | None
    n_key_value_heads: int | None
    d_mlp: int | None


def _config(card: Card) -> Config:
    heads = next((item for item in card.attention if item.heads), None)
    query, key, neurons = (
        next((card.inside[h] for h in hooks if h in card.inside), None)
        for hooks in (("q", "z"), ("k", "v"), ("mlp_act",))
    )
    n_heads: int | None = None
    d_head: int | None = None
    if heads:
        n_heads = heads.heads
        d_head = heads.head_dim
    elif query:
        n_heads = query.heads
        d_head = query.width
    return Config(
        model_name=card.id,
        original_architecture=card.architecture,
        n_layers=card.num_layers,
        d_model=card.hidden_size,
        d_vocab=card.vocab_size,
        n_ctx=card.max_model_len,
        dtype=card.dtype,
        n_heads=n_heads,
        d_head=d_head,
        n_key_value_heads=key.heads if key else None,
        d_mlp=neurons.size if neurons else None,
    )


#: What is an address, and not a model's name: with a scheme, or a host with its port.
_ADDRESS = re.compile(r"https?://.*|[\w.-]+:\d{1,5}/?")
#: (an activation's name, several names, or a function of the name; the edit).
LensHook = tuple[Any, Op]
#: A text, several texts, or token ids `[pos]` or `[batch, pos]`.
Input = Any


class HookedModel:
    """A model that Midstream serves, with the interface of a TransformerLens model without weight
    processing; needs no torch.

    `model`: its name; may be omitted if the server serves only one. In its place, the address or
    the client of that server. `client`: by default a new `Client(url, api_key)`.

    Raises MidstreamError: `not_found` for a model that is not served, `invalid_request` naming an
    invalid argument.
    """

    def __init__(
        self,
        model: str | Client | None = None,
        *,
        client: Client | None = None,
        url: str | None = None,
        api_key: str | None = None,
    ):
        if isinstance(model, Client):
            model, client = None, model if client is None else client
        elif model is not None and url is None and client is None and _ADDRESS.fullmatch(model):
            model, url = None, model
        if client is not None and (url is not None or api_key is not None):
            raise invalid(
                "client", "has its own address and key", allowed="either client, or url and api_key"
            )
        self.client = Client(url, api_key) if client is None else client
        name = wire.only_model(self.client.models()) if model is None else model
        self.card = msgspec.convert(self.client.model(name), Card)
        self.cfg = _config(self.card)
        self._hooks: list[LensHook] = []

    def __repr__(self) -> str:
        return (
            f"HookedModel({self.card.id!r}, layers={self.cfg.n_layers}, "
            f"d_model={self.cfg.d_model}, url={self.client.url!r})"
        )

    def __getattr__(self, name: str) -> Any:
        raise refused(REFUSED, type(self).__name__, name)

    @property
    def hook_names(self) -> list[str]:
        """The activations that can be cached, layer by layer in the order of the forward pass."""
        return [site.full for site in self.card.sites()]

    # --- Runs

    def __call__(self, input: Input, return_type: str | None = "logits", **options: Any) -> Any:
        """Run as `run_with_hooks` does, with only the hooks of `hooks()` and `add_hook`."""
        return self.run_with_hooks(input, (), return_type, **options)

    def run_with_cache(
        self,
        input: Input,
        names_filter: Filter = None,
        *,
        fwd_hooks: Sequence[LensHook] = (),
        return_type: str | None = "logits",
        remove_batch_dim: bool = False,
        prepend_bos: bool | None = None,
        stop_at_layer: int | None = None,
        incl_bwd: bool = False,
        scalar: Mapping[str, Any] | None = None,
        **fields: Unpack[ReadingFields],
    ) -> tuple[Any, ActivationCache]:
        """Run one job; return (logits, cache). The cache has the activations that `names_filter`
        selects, by default all that are served.

        `names_filter`: a name, a list of names or pairs such as `("resid_post", 3)`, or a predicate
        of a name. The rows stay on the server until they are deleted (`ActivationCache.job`).
        `fields`: other fields of the job, such as `lora`.

        `stop_at_layer`: compute the layers below it alone (negative: counted from the end), and
        return the residual stream that enters it, `[batch, pos, d_model]`, in place of the logits;
        the cache has activations of these layers.

        `incl_bwd`: also cache the gradient at each activation except attention patterns, under its
        name with `_grad`: of the loss, which `return_type` must then select, or of `scalar`, such
        as `{"kind": "logit", "token": " Paris", "foil": " Rome"}` (`capture.scalar` of a job). A
        second job on the model's gradient worker computes them, without edits.
        """
        sites = chosen(names_filter, self.card)
        run = _Run(self, input, [*self._hooks, *fwd_hooks], prepend_bos, dict(fields))
        if stop_at_layer is not None:
            if incl_bwd:
                raise invalid("incl_bwd", "gradients are of the whole model", hint="omit it")
            stop = stopping.layer_of(stop_at_layer, self.card)
            residual, cache = run.stopped(stop, sites)
            return residual, cache.remove_batch_dim() if remove_batch_dim else cache
        if incl_bwd:
            _check_backward(run, scalar, return_type)
        result = run.first(
            capture={"hooks": hooks_of(sites), "positions": "all_prompt", "at": "after"}
        )
        gradients = run.gradients(sites, scalar) if incl_bwd else None
        reader = self.client.capture(result)
        cache = ActivationCache(reader, self.card, sites, run.prompts, gradients=gradients)
        return run.answer(return_type), cache.remove_batch_dim() if remove_batch_dim else cache

    def run_with_hooks(
        self,
        input: Input,
        fwd_hooks: Sequence[LensHook] = (),
        return_type: str | None = "logits",
        *,
        bwd_hooks: Sequence[Any] = (),
        prepend_bos: bool | None = None,
        stop_at_layer: int | None = None,
        **fields: Unpack[ReadingFields],
    ) -> Any:
        """Run with edits, and return the logits; with `stop_at_layer`, the residual stream that
        enters this layer, as `run_with_cache` does.

        `fwd_hooks`: pairs of an activation's name and an op of `midstream.lens.ops`. Python
        functions are rejected: the forward pass takes no code from requests. `return_type`:
        `logits`, `loss`, `both` or None.
        """
        if bwd_hooks:
            raise invalid("bwd_hooks", _GRADIENTS, allowed="fwd_hooks")
        run = _Run(self, input, [*self._hooks, *fwd_hooks], prepend_bos, dict(fields))
        if stop_at_layer is not None:
            return run.stopped(stopping.layer_of(stop_at_layer, self.card), [])[0]
        run.first()
        return run.answer(return_type)

    @contextmanager
    def hooks(
        self, fwd_hooks: Sequence[LensHook] = (), bwd_hooks: Sequence[Any] = ()
    ) -> Iterator["HookedModel"]:
        """Apply these edits to every run and generation within the block, before the call's own
        edits.
        """
        if bwd_hooks:
            raise invalid("bwd_hooks", _GRADIENTS, allowed="fwd_hooks")
        edits_of(fwd_hooks, self.card)
        before = list(self._hooks)
        self._hooks += fwd_hooks
        try:
            yield self
        finally:
            self._hooks = before

    def add_hook(self, name: Any, hook: Op) -> None:
        """Apply this edit to every run and generation until `reset_hooks`."""
        edits_of([(name, hook)], self.card)
        self._hooks.append((name, hook))

    def reset_hooks(self) -> None:
        self._hooks = []

    def generate(
        self,
        input: Input,
        max_new_tokens: int = 10,
        *,
        do_sample: bool = True,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_at_eos: bool = True,
        seed: int | None = None,
        fwd_hooks: Sequence[LensHook] = (),
        prepend_bos: bool | None = None,
        return_type: str = "input",
        **fields: Unpack[ReadingFields],
    ) -> Any:
        """Return prompt and continuation: as text if `input` is text, otherwise as token ids
        `[batch, pos]` (a list if lengths differ).

        `return_type`: `input` (like the input), `str` or `tokens`. `do_sample=False`: greedy. Hooks
        also edit generated tokens, unless their `pos` excludes them.
        """
        if return_type not in ("input", "str", "tokens"):
            raise invalid(
                "return_type", f"{return_type!r} is not known", allowed="input, str, tokens"
            )
        run = _Run(
            self, input, [*self._hooks, *fwd_hooks], prepend_bos, dict(fields), together=False
        )
        sampling = {
            "max_tokens": max_new_tokens,
            "temperature": temperature if do_sample else 0.0,
            "ignore_eos": not stop_at_eos,
        }
        result = run.send(
            run.inputs,
            sampling=sampling | given(top_k=top_k, top_p=top_p, seed=seed),
        )
        whole = [
            prompt + output.token_ids
            for prompt, output in zip(run.prompts, result.outputs, strict=True)
        ]
        if return_type == "str" or (return_type == "input" and run.is_text):
            texts = [self.client.detokenize(self.card.id, tokens).prompt for tokens in whole]
            return texts[0] if run.is_single else texts
        return np.array(whole, dtype=np.int64) if len({len(item) for item in whole}) == 1 else whole

    # --- Tokens

    def to_tokens(self, input: str | Sequence[str], prepend_bos: bool | None = None) -> np.ndarray:
        """Return the server's token ids of a text or texts: int64 `[batch, pos]`.

        All texts must have the same number of tokens: nothing is padded.

        `prepend_bos`: False omits the tokens that the tokenizer adds around a text; None keeps
        them. True is an error if the tokenizer adds none: give token ids instead.
        """
        return np.array(
            self._equal([self._ids(text, prepend_bos) for text in _texts(input)]), dtype=np.int64
        )

    def to_str_tokens(self, input: Any, prepend_bos: bool | None = None) -> list[str]:
        """Return the text of each token of a text or of token ids, with its leading space."""
        ids = self._ids(input, prepend_bos) if isinstance(input, str) else _one(_token_ids(input))
        return self.client.detokenize(self.card.id, ids).token_strs

    def to_string(self, tokens: Any) -> str | list[str]:
        """Return the text of token ids; for `[batch, pos]`, a list of texts."""
        many = np.ndim(tokens) == 2
        texts = [self.client.detokenize(self.card.id, row).prompt for row in _token_ids(tokens)]
        return texts if many else texts[0]

    def to_single_token(self, string: str) -> int:
        """Return the token id of a text that is a single token, apart from the special tokens that
        the tokenizer adds. Raises MidstreamError for other texts.
        """
        ids = self._ids(string, prepend_bos=False)
        if len(ids) != 1:
            raise invalid(
                "string",
                f"{string[:80]!r} has {len(ids)} tokens: {self.to_str_tokens(ids)}"[:500],
                allowed="a text of one token",
            )
        return ids[0]

    def to_single_str_token(self, int_token: int) -> str:
        (text,) = self.to_str_tokens([int_token])
        return text

    def _ids(self, text: str, prepend_bos: bool | None) -> list[int]:
        if not isinstance(text, str):
            raise invalid("input", f"is a {type(text).__name__}", allowed="text")
        tokens = self.client.tokenize(
            self.card.id, text, add_special_tokens=prepend_bos is not False
        ).tokens
        if (
            prepend_bos
            and tokens == self.client.tokenize(self.card.id, text, add_special_tokens=False).tokens
        ):
            raise invalid(
                "prepend_bos",
                "the model's tokenizer adds no token before a text",
                allowed="None, False, or token ids as input",
            )
        return tokens

    def _equal(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the prompts. Raises MidstreamError if they differ in length."""
        lengths = [len(prompt) for prompt in prompts]
        if len(set(lengths)) > 1:
            raise invalid(
                "input",
                f"prompts have {lengths[:20]} tokens: nothing is padded",
                hint="run prompts of one length, or one at a time",
            )
        return prompts


def _texts(input: Any) -> list[Any]:
    result = [input] if isinstance(input, str) else list(input)
    if not result:
        raise invalid("input", "is empty", allowed="a prompt, or a list of prompts")
    return result


def _token_ids(input: Any) -> list[list[int]]:
    """Convert token ids `[pos]` or `[batch, pos]` to lists. Raises MidstreamError."""
    with Translated(
        ValueError,
        lambda error: invalid(
            "input",
            "prompts differ in length: nothing is padded",
            hint="run prompts of one length, or one at a time",
        ),
        hidden=True,
    ):
        result = as_numpy(input)
    if result.dtype.kind not in "iu" or result.ndim not in (1, 2) or not result.size:
        allowed = "text, a list of texts, or token ids [pos] or [batch, pos]"
        raise invalid(
            "input", f"is {type(input).__name__} of shape {list(result.shape)}", allowed=allowed
        )
    return [[int(token) for token in row] for row in np.atleast_2d(result)]


def _one(prompts: list[list[int]]) -> list[int]:
    if len(prompts) != 1:
        raise invalid("input", f"holds {len(prompts)} prompts", allowed="one")
    return prompts[0]


def _check_backward(run: "_Run", scalar: Mapping[str, Any] | None, return_type: str | None) -> None:
    """Raise MidstreamError unless `run` has gradients."""
    if scalar is None and return_type not in ("loss", "both"):
        raise invalid(
            "incl_bwd",
            f"return_type {return_type!r} is no scalar",
            allowed="return_type='loss', or a scalar such as {'kind': 'logit', 'token': …}",
        )
    if any(run.edits.values()):
        raise invalid("incl_bwd", "gradients are of the unedited model", hint="omit edits")


def edits_of(hooks: Sequence[LensHook], card: Card) -> dict[str, Any]:
    """Convert edits to a request's `steering` and `patch`, and to attention `patterns`.

    Raises MidstreamError for a Python function, for a name that is not an activation, and if edits
    of one row are not listed in the order in which they are applied.
    """
    result: dict[str, Any] = {"steering": [], "patch": [], "patterns": {}}
    last: dict[NamedSite, Op] = {}
    for number, pair in enumerate(hooks):
        at = f"fwd_hooks[{number}]"
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise invalid(
                at,
                "is not a pair of a name and an op",
                allowed='("blocks.3.hook_resid_post", ops.add(vector))',
            )
        name, op = pair
        if not isinstance(op, Op):
            what = "is a Python function" if callable(op) else f"is a {type(op).__name__}"
            why = ": the forward pass runs in a server and takes no code from requests"
            allowed = (
                "ops.add, ablate, clamp, replace, zero, patch, attend; an operator can install "
                "code of yours: docs/extending.md"
            )
            raise invalid(at, what + why, allowed=allowed)
        for site in chosen(name, card, at):
            before = last.get(site)
            if before is not None and before.order > op.order:
                detail = (
                    f"at {site.full}, ops.{op.name} is always applied before ops.{before.name}, "
                    "but is listed after it"
                )
                raise invalid(
                    at,
                    detail,
                    allowed=(
                        "replace, zero and patch, then add, ablate, clamp; or an edit at the next "
                        "activation"
                    ),
                )
            last[site] = op
            entries = op.entries(site, card, at)
            if op.kind == "pattern":
                result["patterns"] |= {
                    (site.layer, head): pattern for head, pattern in op.patterns.items()
                }
            else:
                result[op.kind] += entries
    return result


class _Run:
    """One input with its edits: sends the first request, and those that fetch more predictions."""

    def __init__(
        self,
        model: HookedModel,
        input: Input,
        hooks: Sequence[LensHook],
        prepend_bos: bool | None,
        fields: dict[str, Any],
        together: bool = True,
    ):
        self.model = model
        self.fields = fields
        self.is_single = isinstance(input, str)
        self.is_text = self.is_single or (
            isinstance(input, list | tuple)
            and bool(input)
            and all(isinstance(item, str) for item in input)
        )
        own = {"model", "prompts", "prompt", "steering", "patch", "capture", "lens", "sampling"}
        reserved = sorted(own & fields.keys())
        if reserved:
            raise invalid(
                reserved[0],
                "is set by this call",
                allowed="other fields of a job; edits as hooks",
            )
        if self.is_text:
            texts = _texts(input)
            self.prompts = [model._ids(text, prepend_bos) for text in texts]
            # texts where possible, because `pos` may name a text span
            self.inputs: list[Any] = texts if prepend_bos is None else self.prompts
        else:
            self.prompts = _token_ids(input)
            self.inputs = self.prompts
        if together:
            model._equal(self.prompts)
        self.edits = edits_of(hooks, model.card)
        if self.edits["patterns"] and len(self.prompts) != 1:
            raise invalid("fwd_hooks", "ops.attend takes one prompt", hint="run a prompt at a time")
        self.known = Predictions(
            self._ask, self.prompts, model.card.vocab_size, model.card.memory_limit_kib
        )
        self.refused = model.card.readings.get("lens", "the worker does not offer it")

    def send(self, prompts: list[Any], **request: Any) -> JobResult:
        """Run one job with the edits."""
        edits = {name: self.edits[name] for name in ("steering", "patch") if self.edits[name]}
        call = (
            partial(self.model.client.readings.patch_attention, prompts[0], self.edits["patterns"])
            if self.edits["patterns"]
            else partial(self.model.client.run, prompts=prompts)
        )
        return call(model=self.model.card.id, progress=False, **self.fields, **edits, **request)

    def first(self, **request: Any) -> JobResult:
        """Run the job; if a lens is served, also fetch the top tokens at the last position."""
        lens = {"lens": self._lens("last_prompt", FIRST_TOP, [])} if not self.refused else {}
        asked = {**lens, **request}
        # a job that asks for nothing else has a token
        tokens = 0 if asked else 1
        result = self.send(self.inputs, sampling={"max_tokens": tokens}, **asked)
        for reading in result.lens or []:
            self.known.learn(reading, reading.request)
        return result

    def stopped(self, stop: int, sites: Sequence[NamedSite]) -> tuple[np.ndarray, ActivationCache]:
        """Return the stream that enters layer `stop`, and the activations at `sites` below it."""
        below = [site for site in sites if site.layer < stop]
        entry, at = stopping.entry_of(stop)
        result = self.send(
            self.inputs,
            sampling={"max_tokens": 0},
            capture={"hooks": hooks_of([*below, entry]), "positions": "all_prompt", "at": at},
        )
        reader = self.model.client.capture(result)
        stream = ActivationCache(reader, self.model.card, [entry], self.prompts)
        return stream[entry.full], ActivationCache(reader, self.model.card, below, self.prompts)

    def gradients(
        self, sites: Sequence[NamedSite], scalar: Mapping[str, Any] | None
    ) -> ActivationCache:
        """Capture the gradients at `sites` that are rows: of the mean loss, or of `scalar`."""
        rows = [site for site in sites if site.name != PATTERN]
        capture = {
            "hooks": hooks_of(rows),
            "positions": "all_prompt",
            "of": "gradient",
            "scalar": dict(scalar or {"kind": "loss"}),
        }
        result = self.send(self.inputs, capture=capture)
        # the server's loss is a sum over tokens, this interface's the mean over tokens and prompts
        predicted = sum(len(prompt) - 1 for prompt in self.prompts)
        scale = 1.0 if scalar is not None else 1.0 / max(predicted, 1)
        reader = self.model.client.capture(result)
        return ActivationCache(reader, self.model.card, rows, self.prompts, scale=scale)

    def _lens(self, positions: Any, top: int, tokens: list[int]) -> dict[str, Any]:
        return {
            "layers": -1,
            "hook": "post_block",
            "positions": positions,
            "top_k": top,
            "tokens": tokens,
            "at": "after",
        }

    def _ask(self, prompt: int, positions: list[int], top: int, tokens: list[int]) -> LensReading:
        if self.refused:
            raise MidstreamError(
                "not_found", f"this model's logits are not served: {self.refused}", field="logits"
            )
        result = self.send(
            [self.inputs[prompt]],
            sampling={"max_tokens": 0},
            lens=self._lens(positions, top, tokens),
        )
        (reading,) = result.lens or []
        return reading

    def answer(self, return_type: str | None) -> Any:
        """Return the result of a run, as `return_type` selects. Raises MidstreamError for an
        unknown type.
        """
        if return_type not in ("logits", "loss", "both", None):
            raise invalid(
                "return_type", f"{return_type!r} is not known", allowed="logits, loss, both, None"
            )
        logits = Logits(self.known)
        if return_type == "both":
            return logits, logits.loss()
        if return_type == "loss":
            return logits.loss()
        return logits if return_type else None

"""Rows of the served model against transformers' rows of the same checkpoint, before the first
request of a user.

What is compared, and with which tolerance: `docs/decisions/0024-certification.md`. transformers'
model is `reference`, the rows come from `certificate`.
"""

import asyncio
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ....schemas.base.settings import Settings
from ....schemas.jobs.certificates import LawFigure
from ....schemas.prompts.selectors import HOOKS, Hook
from ...runner.hooks.config_rules import as_served
from ..options.option_check import accepted
from .reference import NotComparableError, Reference, Tensors

#: Largest error of rows, in multiples of what transformers' own model in that dtype is off from
#: float32: both round, in other places.
TIMES = 4.0
#: Least tolerance, relative: fp32 kernels add up in another order; other dtypes round the result
#: once.
FLOORS = {"float32": 1e-4, "bfloat16": 2.0**-7, "float16": 2.0**-10}
#: What leaves a layer is compared relative to what the layer adds to it, or to this share of the
#: stream if that is more: rounding.
LEAST_SHARE = 1 / 16
#: Tensors of transformers' layer that are the stream. The other hooks are searched for, by their
#: rows.
STREAM_TENSORS: Mapping[Hook, str] = {"pre_attn": "input", "post_block": "output"}
#: Seconds that reading the weights and computing with them may take, after the certification run.
TIMEOUT_S = 300.0
#: Fields of a config after which a layer computes otherwise: windows, and chunks of recurrent
#: layers.
SPANS = (
    "sliding_window",
    "sliding_window_size",
    "attention_chunk_size",
    "chunk_size",
    "mamba_chunk_size",
)
#: Tokens beyond a span that are compared, and the longest prompt.
BEYOND, LONGEST = 8, 1100
#: Parts of the names of fields that cannot make two libraries compute differently without a shape
#: being wrong, or that neither reads.
_NO_SUSPECTS = re.compile(
    r"^_|size|^num_|^n_(embd|layer|head|inner|positions|ctx)|dim$|_id$|max_position|version"
    r"|initializer|dropout|model_type|dtype|cache|^architectures"
)

Rows = Mapping[tuple[Hook, int], torch.Tensor]  # float32 `[positions, hidden]`


class Source(NamedTuple):
    """The served checkpoint, as transformers finds it; `refused`: why it is not compared."""

    path: str = ""
    architecture: str = ""
    revision: str | None = None
    overrides: Mapping[str, Any] = {}  # fields of its config
    limit_gib: float = 0.0
    refused: str = ""


class Prompt(NamedTuple):
    """A request's tokens, and the rows that the engine has of it."""

    tokens: Sequence[int]
    positions: Sequence[int]
    rows: Rows


class Head(NamedTuple):
    """Rows that leave the last layer of the whole model, `[rows, hidden]`, and the logits that
    vLLM's sampler got, `[rows, vocabulary]`.
    """

    rows: torch.Tensor
    logits: torch.Tensor


class Difference(NamedTuple):
    """A hook's rows in one layer, or the logits, relative to transformers'."""

    hook: str
    layer: int
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # not of NaN

    @property
    def share(self) -> float:
        return self.error / self.tolerance if math.isfinite(self.error) else math.inf

    def __str__(self) -> str:
        where = self.hook if self.hook == "logits" else f"{self.hook} of layer {self.layer}"
        return (
            f"{where} differs from transformers' by {self.error:.3g} (tolerance "
            f"{self.tolerance:.2g}, relative)"
        )


class Comparison:
    """One checkpoint's: `refused` says why it is not compared.

    transformers' model is read while the certification run continues.
    """

    def __init__(self, source: Source, dtype: str) -> None:
        self.refused = source.refused
        self.reference: Reference | None = None
        self._source, self._dtype = source, dtype
        self._planned = asyncio.Event()
        self._read = asyncio.create_task(self._prepare())

    async def _prepare(self) -> None:
        try:
            if not self.refused:
                self.reference = await asyncio.to_thread(_opened, self._source)
                self._planned.set()
                await asyncio.to_thread(self.reference.load)
        except NotComparableError as error:
            self.refused = str(error)
        finally:
            self._planned.set()

    async def plan(self) -> Reference | None:
        """The reference, whose weights need not be there yet; None: `refused` says why."""
        await self._planned.wait()
        return None if self.refused else self.reference

    async def judge(self, prompts: Sequence[Prompt], head: Head | None) -> list[Difference]:
        """Return the largest difference of each hook in each kept layer, over all prompts.

        Empty where `refused` says why.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await asyncio.shield(self._read)
                if not self.refused and self.reference is not None:
                    return await asyncio.to_thread(
                        differences, self.reference, prompts, head, self._dtype
                    )
        except NotComparableError as error:
            self.refused = str(error)
        except TimeoutError:
            self.refused = f"transformers took longer than {TIMEOUT_S:g} s"
        return []


def source_of(settings: Settings, config: Any, quantization: str) -> Source:
    """Return what transformers is asked for; `config`: vLLM's of the model; `quantization`: of its
    weights.
    """
    unproven, load_format = accepted(settings).caveats, settings.engine_options.get("load_format")
    reasons = {
        "the setting compare=off": settings.compare == "off",
        f"load_format={load_format}": load_format == "dummy",
        "the model's code is remote": config.trust_remote_code
        and hasattr(config.hf_config, "auto_map"),
        f"its weights are quantised ({quantization})": bool(quantization),
        f"options of vLLM that are not proven ({'; '.join(unproven)})": bool(unproven),
    }
    given = dict(settings.engine_options.get("hf_overrides") or {})
    return Source(
        path=config.model,
        architecture=config.architectures[0],
        revision=config.revision,
        overrides=given
        | as_served(config.architectures[0], config.hf_text_config, config.max_model_len),
        limit_gib=settings.compare_memory_gib,
        refused=next((why for why, applies in reasons.items() if applies), ""),
    )


def _opened(source: Source) -> Reference:
    return Reference(
        source.path,
        architecture=source.architecture,
        revision=source.revision,
        overrides=source.overrides,
        limit_gib=source.limit_gib,
    )


def differences(
    reference: Reference, prompts: Sequence[Prompt], head: Head | None, dtype: str
) -> list[Difference]:
    """Return what is compared, in order of layers and hooks. Raises NotComparableError."""
    exact = [reference.trace(prompt.tokens, prompt.positions) for prompt in prompts]
    logits = reference.logits(head.rows) if head else None
    rounded: Sequence[Sequence[Tensors] | None] = [None] * len(prompts)
    own = None
    if dtype != "float32":
        reference.round(getattr(torch, dtype))
        rounded = [reference.trace(prompt.tokens, prompt.positions) for prompt in prompts]
        own = reference.logits(head.rows) if head else None
    worst: dict[tuple[int, str], Difference] = {}
    for prompt, right, near in zip(prompts, exact, rounded, strict=True):
        for layer, tensors in enumerate(right):
            if not all(bool(tensors[name].isfinite().all()) for name in STREAM_TENSORS.values()):
                raise NotComparableError(f"transformers' own rows of layer {layer} are not finite")
            median = dtype != "float32" and reference.follows[layer]
            for item in _of_layer(
                layer,
                prompt.rows,
                tensors,
                near[layer] if near else None,
                FLOORS[dtype],
                median=median,
            ):
                known = worst.setdefault((layer, item.hook), item)
                worst[layer, item.hook] = max(known, item, key=lambda one: one.share)
    differing = list(worst.values())
    if head and logits is not None:
        count = min(logits.shape[1], head.logits.shape[1])
        parts = [
            part[:, :count] for part in (head.logits, logits, own if own is not None else logits)
        ]
        finite = parts[0].isfinite().all(0) & parts[1].isfinite().all(
            0
        )  # a vocabulary may be padded
        served, defined, own = (part[:, finite] for part in parts)
        size = defined.norm(dim=-1)
        differing.append(
            Difference(
                "logits",
                -1,
                _error(served, defined, size),
                max(FLOORS[dtype], TIMES * _error(own, defined, size)),
            )
        )
    return differing


def _of_layer(
    layer: int, rows: Rows, exact: Tensors, rounded: Tensors | None, floor: float, *, median: bool
) -> Iterator[Difference]:
    added = (exact["output"] - exact["input"]).norm(dim=-1)
    for hook in (hook for hook in HOOKS if (hook, layer) in rows):
        got = rows[hook, layer]
        names = (
            [STREAM_TENSORS[hook]]
            if hook in STREAM_TENSORS
            else [name for name, value in exact.items() if value.shape == got.shape]
        )

        def judged(name: str, got: torch.Tensor = got, hook: Hook = hook) -> Difference:
            right = exact[name]
            norms = right.norm(dim=-1)
            size = torch.maximum(added, LEAST_SHARE * norms) if hook == "post_block" else norms
            rounding = _error(rounded[name], right, size, median=median) if rounded else 0.0
            return Difference(
                hook, layer, _error(got, right, size, median=median), max(floor, TIMES * rounding)
            )

        yield min((judged(name) for name in names), key=lambda value: value.share)


def _error(
    got: torch.Tensor, right: torch.Tensor, size: torch.Tensor, *, median: bool = False
) -> float:
    """Norm of the rows' errors relative to `size`: the median, or the root of the mean square."""
    if got.shape != right.shape:
        return math.inf
    errors = (got - right).norm(dim=-1) / size.clamp_min(torch.finfo(torch.float32).tiny)
    return float(errors.median() if median else errors.square().mean().sqrt())


def longer(config: Any, length: int, limit: int) -> tuple[int, list[str]]:
    """A prompt's length beyond the spans of a config that `length` tokens do not pass, or 0; and
    the spans that none passes.

    `limit`: the longest prompt that the engine takes.
    """
    limit = min(limit, LONGEST)
    spans = {
        name: int(value)
        for name in SPANS
        if isinstance(value := getattr(config, name, None), int) and value >= length
    }
    passed = [span for span in spans.values() if span + BEYOND <= limit]
    return max(passed, default=-BEYOND) + BEYOND, [
        f"{name}={span}" for name, span in spans.items() if span not in passed
    ]


def verdict(differences: Sequence[Difference]) -> Difference | None:
    """The first that differs, or None where the stream and the logits do not: laws tie the other
    hooks to the stream.
    """
    if all(item.ok for item in differences if item.hook in STREAM_TENSORS or item.hook == "logits"):
        return None
    return next(item for item in differences if not item.ok)


def figures(
    differences: Sequence[Difference], hooks: Sequence[str]
) -> tuple[list[LawFigure], dict[str, str]]:
    """The laws of a certificate, and those that were not compared: hooks whose tensor transformers'
    layers do not have.
    """
    laws, lacking = [], {}
    for hook in [*hooks, "logits"]:
        of_hook = [item for item in differences if item.hook == hook]
        if not of_hook:
            continue
        law, worst = f"{hook} = transformers'", max(of_hook, key=lambda item: item.share)
        if hook not in STREAM_TENSORS and hook != "logits" and not worst.ok:
            lacking[law] = f"transformers' layer {worst.layer} has no tensor with these rows"
            continue
        laws.append(
            LawFigure(
                law=law,
                figure=float(f"{worst.error:.3g}"),
                tolerance=float(f"{worst.tolerance:.3g}"),
                checked=len(of_hook),
                layer=worst.layer,
                hooks=[hook] if hook in hooks else [],
                ok=worst.ok,
            )
        )
    return laws, lacking


def suspects(config: Any) -> list[str]:
    """Fields of a config that have other values than in a fresh one of its class, as
    `name=value`.
    """
    text = config.get_text_config()
    given, fresh = text.to_dict(), type(text)().to_dict()
    return [
        f"{name}={value!r}"
        for name, value in given.items()
        if name in fresh and value != fresh[name] and not _NO_SUSPECTS.search(name)
    ]

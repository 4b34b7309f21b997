"""Compares rows of the served model with transformers' rows of the same checkpoint, before the
first request of a user.

transformers defines the rows, since no table of the config fields that vLLM reads otherwise can be
complete: it ignored five of OLMoE alone. `docs/architectures.md` says what is compared, with which
tolerance. `reference` runs transformers' model; `certificate` supplies the served rows.
"""

import asyncio
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ....schemas.jobs.certificates import LawFigure
from ....schemas.prompts.selectors import HOOKS, INSIDE, Hook
from ....schemas.settings.settings import Settings
from ...runner.hooks.config_rules import as_served
from .reference import Checkpoint, NamedTensors, NotComparableError, TransformersReference

#: Tolerance, in multiples of the error that transformers' own model has in that dtype against
#: float32: both implementations round, but in different places. The error depends
#: on the weights: 0.4 % in a plain layer, 10 % after a sharp softmax.
TIMES = 4.0
#: Least relative tolerance: float32 kernels add up in different orders; other dtypes round the
#: result once.
FLOORS = {"float32": 1e-4, "bfloat16": 2.0**-7, "float16": 2.0**-10}
#: Errors of `post_block` are relative to what the layer adds, since a large stream would hide a
#: wrong layer, or to this share of the stream if that is more: the stream itself is rounded.
LEAST_SHARE = 1 / 16
#: Tensors of transformers' layer that are the residual stream, which decides: laws tie the other
#: hooks to it. Theirs have the hook's name, or are searched for by rows, only to name the first
#: hook that differs.
STREAM_TENSORS: Mapping[Hook, str] = {"pre_attn": "input", "post_block": "output"}
#: Seconds that reading the weights and the comparison may take, after the certification run.
TIMEOUT_S = 300.0
#: Fields of a config with a length beyond which a layer computes differently: attention windows,
#: and chunks of recurrent layers.
SPANS = (
    "sliding_window",
    "sliding_window_size",
    "attention_chunk_size",
    "chunk_size",
    "mamba_chunk_size",
)
#: Tokens beyond a span that are compared.
BEYOND = 8
#: The most tokens of a prompt.
LONGEST = 1100
#: Parts of the names of fields that are no suspects: two libraries cannot read them differently
#: without a wrong shape, or neither computes with them.
_NO_SUSPECTS = re.compile(
    r"^_|size|^num_|^n_(embd|layer|head|inner|positions|ctx)|dim$|_id$|max_position|version"
    r"|initializer|dropout|model_type|dtype|cache|^architectures"
)

RowsOfSites = Mapping[tuple[Hook, int], torch.Tensor]  # float32 `[positions, hidden]`


class ComparedPrompt(NamedTuple):
    """A request's tokens, and the engine's rows at some of its positions."""

    tokens: Sequence[int]
    positions: Sequence[int]
    rows: RowsOfSites


class FinalLogits(NamedTuple):
    """`post_block` rows of the model's last layer, `[rows, hidden]`, and the logits that vLLM's
    sampler got for them, `[rows, vocabulary]`.
    """

    rows: torch.Tensor
    logits: torch.Tensor


class Difference(NamedTuple):
    """The error of a hook's rows in one layer, or of the logits, relative to transformers'."""

    hook: str
    layer: int
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # False for NaN

    @property
    def share(self) -> float:
        return self.error / self.tolerance if math.isfinite(self.error) else math.inf

    def __str__(self) -> str:
        where = self.hook if self.hook == "logits" else f"{self.hook} of layer {self.layer}"
        return (
            f"{where} differs from transformers' by {self.error:.3g} (tolerance "
            f"{self.tolerance:.2g}, relative)"
        )


class Traced(Protocol):
    """transformers' model of the checkpoint, as `differences` uses it: `TransformersReference`."""

    @property
    def routed(self) -> Sequence[bool]: ...

    def trace(self, tokens: Sequence[int], positions: Sequence[int]) -> Sequence[NamedTensors]: ...

    def round(self, dtype: torch.dtype) -> None: ...

    def logits(self, rows: torch.Tensor) -> torch.Tensor: ...


class Comparison:
    """The comparison of one checkpoint; `refused` says why it is not compared.

    transformers' model is read while the certification run continues, in this process, on the CPU:
    model and KV cache take the ranks' memory, and this process only waits for them.
    """

    def __init__(self, source: Checkpoint, dtype: str) -> None:
        self.refused = source.refused
        self.reference: TransformersReference | None = None
        self._source = source
        self._dtype = dtype
        self._planned = asyncio.Event()
        self._read = asyncio.create_task(self._prepare())

    async def _prepare(self) -> None:
        try:
            if not self.refused:
                self.reference = await asyncio.to_thread(TransformersReference, self._source)
                self._planned.set()
                await asyncio.to_thread(self.reference.load)
        except NotComparableError as error:
            self.refused = str(error)
        finally:
            self._planned.set()

    async def plan(self) -> TransformersReference | None:
        """Return the reference, whose weights may not be read yet; None if `refused` says why."""
        await self._planned.wait()
        return None if self.refused else self.reference

    async def judge(
        self, prompts: Sequence[ComparedPrompt], head: FinalLogits | None
    ) -> list[Difference]:
        """Return the largest difference of each hook in each kept layer, over all prompts; empty if
        `refused` says why.
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


def source_of(settings: Settings, config: Any, quantization: str) -> Checkpoint:
    """Return the source that transformers reads. `config`: vLLM's `ModelConfig`; `quantization` of
    its weights, or "".
    """
    load_format = settings.engine_options.get("load_format")
    reasons = {
        "the setting compare=off": settings.compare == "off",
        f"load_format={load_format}": load_format == "dummy",
        "the model's code is remote": config.trust_remote_code
        and hasattr(config.hf_config, "auto_map"),
        f"its weights are quantised ({quantization})": bool(quantization),
    }
    overrides = dict(settings.engine_options.get("hf_overrides") or {})
    return Checkpoint(
        path=config.model,
        architecture=config.architectures[0],
        revision=getattr(config.hf_config, "_commit_hash", None) or config.revision,
        overrides=overrides
        | as_served(config.architectures[0], config.hf_text_config, config.max_model_len),
        limit_gib=settings.tuning.compare_memory_gib,
        refused=next((why for why, applies in reasons.items() if applies), ""),
    )


def differences(
    reference: Traced, prompts: Sequence[ComparedPrompt], head: FinalLogits | None, dtype: str
) -> list[Difference]:
    """Return all differences, in order of layers and hooks. Raises NotComparableError."""

    def computed() -> tuple[list[Sequence[NamedTensors]], torch.Tensor | None]:
        traces = [reference.trace(prompt.tokens, prompt.positions) for prompt in prompts]
        return traces, reference.logits(head.rows) if head else None

    exact, logits = computed()
    rounded: Sequence[Sequence[NamedTensors] | None] = [None] * len(prompts)
    near = logits
    if dtype != "float32":
        reference.round(getattr(torch, dtype))
        rounded, near = computed()
    worst: dict[tuple[int, str], Difference] = {}
    for prompt, exact_layers, rounded_layers in zip(prompts, exact, rounded, strict=True):
        for layer, tensors in enumerate(exact_layers):
            if not all(bool(tensors[name].isfinite().all()) for name in STREAM_TENSORS.values()):
                raise NotComparableError(f"transformers' own rows of layer {layer} are not finite")
            median = dtype != "float32" and reference.routed[layer]
            for item in _layer_differences(
                layer,
                prompt.rows,
                tensors,
                rounded_layers[layer] if rounded_layers else None,
                FLOORS[dtype],
                median=median,
            ):
                known = worst.setdefault((layer, item.hook), item)
                worst[layer, item.hook] = max(known, item, key=lambda one: one.share)
    differing = list(worst.values())
    if head and logits is not None and near is not None:
        # a vocabulary may be padded, by further or by infinite logits
        count = min(logits.shape[1], head.logits.shape[1])
        parts = [part[:, :count] for part in (head.logits, logits, near)]
        finite = parts[0].isfinite().all(0) & parts[1].isfinite().all(0)
        served, defined, near = (part[:, finite] for part in parts)
        size = defined.norm(dim=-1)
        differing.append(
            Difference(
                "logits",
                -1,
                _error(served, defined, size),
                max(FLOORS[dtype], TIMES * _error(near, defined, size)),
            )
        )
    return differing


def _layer_differences(
    layer: int,
    rows: RowsOfSites,
    exact: NamedTensors,
    rounded: NamedTensors | None,
    floor: float,
    *,
    median: bool,
) -> Iterator[Difference]:
    added = (exact["output"] - exact["input"]).norm(dim=-1)
    for hook in (hook for hook in (*HOOKS, *INSIDE) if (hook, layer) in rows):
        served = rows[hook, layer]
        names = (
            [STREAM_TENSORS.get(hook, hook)]
            if hook in STREAM_TENSORS or hook in exact
            else [name for name, value in exact.items() if value.shape == served.shape]
        )

        def difference(name: str, served: torch.Tensor = served, hook: Hook = hook) -> Difference:
            expected = exact[name]
            norms = expected.norm(dim=-1)
            size = torch.maximum(added, LEAST_SHARE * norms) if hook == "post_block" else norms
            rounding = _error(rounded[name], expected, size, median=median) if rounded else 0.0
            error = _error(served, expected, size, median=median)
            return Difference(hook, layer, error, max(floor, TIMES * rounding))

        yield min((difference(name) for name in names), key=lambda value: value.share)


def _error(
    actual: torch.Tensor, expected: torch.Tensor, size: torch.Tensor, *, median: bool = False
) -> float:
    """Returns the norm of the rows' errors relative to `size`: their median, or the root of the
    mean square; infinity for different shapes.
    """
    if actual.shape != expected.shape:
        return math.inf
    errors = (actual - expected).norm(dim=-1) / size.clamp_min(torch.finfo(torch.float32).tiny)
    return float(np.median(errors.cpu()) if median else errors.square().mean().sqrt())


def longer(config: Any, length: int, limit: int) -> tuple[int, list[str]]:
    """Returns the length of a prompt that passes the config's spans which `length` tokens do not
    pass, or 0 if none is needed; and the spans that such a prompt cannot pass.

    `limit`: the longest prompt that the engine takes.
    """
    limit = min(limit, LONGEST)
    values = {name: getattr(config, name, None) for name in SPANS}
    spans = {
        name: int(value)
        for name, value in values.items()
        if isinstance(value, int) and value >= length
    }
    passed = [span for span in spans.values() if span + BEYOND <= limit]
    return max(passed, default=-BEYOND) + BEYOND, [
        f"{name}={span}" for name, span in spans.items() if span not in passed
    ]


def verdict(differences: Sequence[Difference]) -> Difference | None:
    """Returns the first difference beyond its tolerance; None if neither stream nor logits differ,
    because laws tie the other hooks to the stream.
    """
    if all(item.ok for item in differences if item.hook in STREAM_TENSORS or item.hook == "logits"):
        return None
    return next(item for item in differences if not item.ok)


def figures(
    differences: Sequence[Difference], hooks: Sequence[str]
) -> tuple[list[LawFigure], dict[str, str]]:
    """Returns the figures for a certificate; and law → why it was not compared, for hooks whose
    tensor transformers' layers do not have.
    """
    laws = []
    lacking = {}
    for hook in [*hooks, "logits"]:
        if not (of_hook := [item for item in differences if item.hook == hook]):
            continue
        law = f"{hook} = transformers'"
        worst = max(of_hook, key=lambda item: item.share)
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
    """Returns the fields of a config that do not have their class's defaults, as `name=value`."""
    text = config.get_text_config()
    fields = text.to_dict()
    defaults = type(text)().to_dict()
    return [
        f"{name}={value!r}"
        for name, value in fields.items()
        if name in defaults and value != defaults[name] and not _NO_SUSPECTS.search(name)
    ]

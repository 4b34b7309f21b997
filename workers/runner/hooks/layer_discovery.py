"""Discovery of a decoder layer's effect on the residual stream, by running it on random rows.

The layer's composite parts (attention, MLP, experts) are replaced by stubs that return random rows;
its norms run unchanged. The places of the stream and of each branch then follow from which tensors
are sums of which others. Least squares finds these sums, without attention metadata, KV cache or
collectives. An edit in place checks every result.

Names would be guesses: `post_attention_layernorm` is the norm before the MLP in Llama, and that of
the attention branch in Gemma 2; Granite multiplies each branch by a number that no module names.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ....schemas.prompts.selectors import HOOKS, Hook
from .architectures import PARALLEL, SumLaw, Tap, TapKind, Taps

#: Lengths of the probe's rows: very different, so that a normalised tensor is no multiple of the
#: tensor itself.
_SCALES = (1.0, 4.0, 0.5, 8.0, 2.0)
#: Largest error of a sum, relative to its rows, by dtype: it allows for rounding.
_EXACT = {torch.float32: 1e-4, torch.float64: 1e-8}
_ROUNDED = 3e-2
#: Shapes of what a part may return, tried in turn. Five rows are not unpacked as two or three
#: values by accident.
_RETURNS: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda rows: rows,
    lambda rows: (rows, None),
    lambda rows: (rows, None, None),
)
_HIDDEN = ("hidden_states", "hidden", "x", "inputs")
_POSITIONS = ("positions", "position_ids")

#: The stream as it is passed: hidden, residual.
_StreamRows = tuple[torch.Tensor, torch.Tensor | None]
#: A sum: the entering stream ("stream") and calls → the multiples of their rows.
_Multiples = Mapping[Any, float]


class NoStreamError(ValueError):
    """The layer does not add branches to a residual stream in a way that can be read and edited;
    the message names the step that failed.
    """


@dataclass(frozen=True)
class LayerShape:
    """Hook points of one layer."""

    taps: Taps
    absent: dict[Hook, str] = field(default_factory=dict)
    laws: dict[Hook, SumLaw] = field(default_factory=dict)


@dataclass
class _Call:
    """One call of a part of the layer."""

    path: str
    leaf: bool
    # `[rows, hidden]`, as they were before the call
    inputs: list[torch.Tensor] = field(default_factory=list)
    output: torch.Tensor | None = None  # the first tensor that it returned, or wrote to
    mixes: bool = False  # contains attention or another mixer of tokens


@dataclass
class _Run:
    calls: list[_Call]
    inputs: _StreamRows
    outputs: _StreamRows


@dataclass(frozen=True)
class _Stream:
    """The residual stream in one run of the layer, and the hook points as they are found on it."""

    run: _Run
    kind: TapKind
    entering: torch.Tensor  # `[rows, hidden]`
    #: The stream that leaves.
    law: _Multiples
    shape: LayerShape

    @property
    def branches(self) -> list[int]:
        """Return the calls whose outputs are added to the stream."""
        return [place for place in self.law if place != "stream"]

    def add(
        self,
        hook: Hook,
        calls: Sequence[int],
        beside: Tap | None,
        total: Hook,
        rest: SumLaw,
        multiples: _Multiples,
    ) -> None:
        """Add the hook of a branch, the sum of `calls`, which `total` adds to `rest`. `beside`: the
        branch's tensor where `total` is a pair of it and the stream before.
        """
        if len(calls) > 1:
            self.shape.absent[hook] = f"it is the sum of several parts ({self.paths(calls)})"
            return
        (call,) = calls
        self.shape.taps[hook] = beside or Tap(self.run.calls[call].path, "output")
        self.shape.laws[total] = {**rest, hook: multiples[call] if beside is None else 1.0}

    def add_last(self, hook: Hook, calls: Sequence[int], rest: SumLaw) -> None:
        """Add the hook of a branch that the stream which leaves adds to `rest`, see `add`."""
        beside = Tap("", "output") if self.kind == "pair" else None
        self.add(hook, calls, beside, "post_block", rest, self.law)

    def paths(self, calls: Sequence[int]) -> str:
        return ", ".join(self.run.calls[number].path for number in calls)


_Edit = tuple[Tap, torch.Tensor]  # (where, the rows that are added there)


def probe(
    layer: nn.Module,
    hidden_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    known: Sequence[float] = (),
) -> LayerShape:
    """Return the hook points of `layer`.

    `known`: multipliers that the model's config states. Raises NoStreamError.
    """
    probing = _Probe(layer, hidden_size, dtype, device, (1.0, *known, *_scalars(layer)))
    with torch.inference_mode():
        return probing.shape()


def _scalars(layer: nn.Module) -> Iterator[float]:
    """Yield the multipliers that the layer holds as parameters or buffers."""
    for tensor in itertools.chain(layer.parameters(recurse=False), layer.buffers(recurse=False)):
        if tensor.numel() == 1:
            yield float(tensor)


class _Probe:
    def __init__(
        self,
        layer: nn.Module,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        known: Sequence[float],
    ) -> None:
        self.layer = layer
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.device = device
        self.known = known
        self.exact = _EXACT.get(dtype, _ROUNDED)
        self.residual = "residual" in list(inspect.signature(layer.forward).parameters)
        self.returns: dict[str, int] = {}

    # --- One run

    def run(self, edit: _Edit | None = None) -> _Run:
        """Run the layer; try combinations of `_RETURNS` for its composite parts until one works."""
        first: Exception | None = None
        composites = [path for path, part in _parts(self.layer) if list(part.children())]
        combinations = (
            [tuple(self.returns[path] for path in composites)]
            if self.returns
            else itertools.product(range(3), repeat=len(composites))
        )
        for combination in itertools.islice(combinations, 81):
            try:
                run = self._run(dict(zip(composites, combination, strict=True)), edit)
            except Exception as error:  # of any type, from the layer's own code
                first = first or error
                continue
            self.returns = dict(zip(composites, combination, strict=True))
            return run
        raise NoStreamError(
            f"the layer cannot be run separately ({type(first).__name__}: "
            f"{' '.join(str(first).split())[:200]})"
        )

    def _run(self, returns: Mapping[str, int], edit: _Edit | None) -> _Run:
        generator = torch.Generator().manual_seed(0)
        calls: list[_Call] = []
        hidden = self._rows(generator)
        residual = self._rows(generator) if self.residual else None
        # Random rows are independent of one another, so the multipliers of a sum are unique.
        stubs = {path: self._rows(generator) for path in returns}
        with ExitStack() as stack:
            for path, part in _parts(self.layer):
                stack.enter_context(
                    self._recorded(
                        path, part, calls, stubs.get(path), _RETURNS[returns.get(path, 0)], edit
                    )
                )
            inputs = (hidden.clone(), None if residual is None else residual.clone())
            output = self.layer.forward(**self._arguments(hidden, residual))
        returned = output if isinstance(output, tuple) else [output]
        tensors = [item for item in returned if self._is_rows(item)]
        if not tensors:
            raise NoStreamError("the layer returns no rows")
        outputs = [item.reshape(-1, self.hidden_size).clone() for item in tensors]
        return _Run(calls, inputs, (outputs[0], outputs[1] if len(outputs) > 1 else None))

    def _rows(self, generator: torch.Generator) -> torch.Tensor:
        rows = torch.randn(len(_SCALES), self.hidden_size, generator=generator)
        order = torch.randperm(len(_SCALES), generator=generator)
        return (rows * torch.tensor(_SCALES)[order, None]).to(self.dtype).to(self.device)

    def _arguments(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for name, parameter in inspect.signature(self.layer.forward).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if name in _HIDDEN and not any(value is hidden for value in arguments.values()):
                arguments[name] = hidden
            elif name == "residual":
                arguments[name] = residual
            elif name in _POSITIONS:
                arguments[name] = torch.arange(len(_SCALES), device=self.device)
            elif parameter.default is parameter.empty:
                arguments[name] = None
        if not any(value is hidden for value in arguments.values()):
            raise NoStreamError("the layer's forward takes no hidden_states")
        return arguments

    def _is_rows(self, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.shape[-1:] == (self.hidden_size,)
            and value.numel() == len(_SCALES) * self.hidden_size
        )

    @contextmanager
    def _recorded(
        self,
        path: str,
        part: nn.Module,
        calls: list[_Call],
        stub: torch.Tensor | None,
        returned: Callable[[torch.Tensor], Any],
        edit: _Edit | None,
    ) -> Iterator[None]:
        forward = part.forward
        signature = inspect.signature(forward)
        mixes = any(_mixes(module) for module in part.modules())

        def record(*args: Any, **kwargs: Any) -> Any:
            out = signature.bind_partial(*args, **kwargs).arguments.get("output")
            given = [
                value
                for value in (*args, *kwargs.values())
                if value is not out and self._is_rows(value)
            ]
            if edit is not None and (edit[0].path, edit[0].side) == (path, "input") and given:
                (given[1] if edit[0].kind == "pair" else given[0]).add_(edit[1])
            call = _Call(
                path,
                stub is None,
                [value.reshape(-1, self.hidden_size).clone() for value in given],
                mixes=mixes,
            )
            calls.append(call)
            if stub is None:
                result: Any = forward(*args, **kwargs)
            elif out is not None and self._is_rows(out):
                out.copy_(stub.reshape(out.shape))
                result = None
            else:
                result = returned(stub.clone().reshape(given[0].shape if given else stub.shape))
            tensor = out
            if result is not None:
                tensor = result[0] if isinstance(result, tuple) else result
            if tensor is not None and self._is_rows(tensor):
                if edit is not None and (edit[0].path, edit[0].side) == (path, "output"):
                    tensor.add_(edit[1])
                call.output = tensor.reshape(-1, self.hidden_size).clone()
            return result

        was_wrapped = "forward" in vars(part)
        part.forward = record
        try:
            yield
        finally:
            if was_wrapped:
                part.forward = forward
            else:
                del part.forward

    # --- Interpretation of a run

    def fit(self, target: torch.Tensor, columns: Mapping[Any, torch.Tensor]) -> _Multiples | None:
        """Return the multiples of `columns` whose sum is `target`, without those of columns that
        add nothing; None if there is no such sum.
        """
        weights = 1 / target.double().norm(dim=-1, keepdim=True).clamp_min(1e-9)
        right_side = (target.double() * weights).flatten().cpu()
        chosen = {
            name: (column.double() * weights).flatten().cpu() for name, column in columns.items()
        }
        while chosen:
            length = {name: max(float(column.norm()), 1e-30) for name, column in chosen.items()}
            matrix = torch.stack([column / length[name] for name, column in chosen.items()], 1)
            parts = (
                torch.linalg.lstsq(matrix, right_side[:, None], driver="gelsd")
                .solution[:, 0]
                .tolist()
            )
            adds = {
                name: abs(part) > 10 * self.exact for name, part in zip(chosen, parts, strict=True)
            }
            if all(adds.values()):
                factors = {
                    name: self._snapped(part / length[name])
                    for name, part in zip(chosen, parts, strict=True)
                }
                rest = sum((value * chosen[name] for name, value in factors.items()), -right_side)
                error = rest.reshape(len(_SCALES), -1).norm(dim=-1).max()
                return factors if float(error) < self.exact else None
            chosen = {name: column for name, column in chosen.items() if adds[name]}
        return None

    def _snapped(self, value: float) -> float:
        """Return the known multiplier that `value` equals up to rounding; else `value`."""
        return next(
            (
                known
                for known in self.known
                if abs(value - known) <= max(self.exact, 1e-3) * abs(known)
            ),
            value,
        )

    def shape(self) -> LayerShape:
        run = self.run()
        outputs = self._outputs(run)
        stream = self._stream(run, outputs)
        middle = self._middle(stream, outputs)
        added = len(stream.branches)
        if middle is not None:
            self._two_branches(stream, *middle)
        elif added > 2:
            raise NoStreamError(
                f"{added} branches are added to the stream in one sum "
                f"({stream.paths(stream.branches)})"
            )
        elif added == 1:
            self._one_branch(stream)
        else:
            self._parallel(stream)
        self._check_edits(stream)
        return stream.shape

    def _outputs(self, run: _Run) -> dict[int, torch.Tensor]:
        """Return call → output, without outputs that repeat an input of the layer or an earlier
        output, as a dropout's does.
        """
        known = [item for item in run.inputs if item is not None]
        branches: dict[int, torch.Tensor] = {}
        for number, call in enumerate(run.calls):
            if call.output is not None and not any(
                call.output.shape == item.shape and bool((call.output == item).all())
                for item in (*known, *branches.values())
            ):
                branches[number] = call.output
        return branches

    def _stream(self, run: _Run, outputs: Mapping[int, torch.Tensor]) -> _Stream:
        """Return the stream, with the taps of its two ends."""
        kinds: tuple[TapKind, ...] = ("pair", "single")
        for kind in kinds:
            if kind == "pair" and (run.inputs[1] is None or run.outputs[1] is None):
                continue
            entering = _whole(run.inputs, kind)
            law = self.fit(_whole(run.outputs, kind), {"stream": entering, **outputs})
            if law is not None and "stream" in law and len(law) > 1:
                ends: Taps = {
                    "pre_attn": Tap("", "input", kind),
                    "post_block": Tap("", "output", kind),
                }
                return _Stream(run, kind, entering, law, LayerShape(ends))
        raise NoStreamError("the layer's output is not its input plus the outputs of its parts")

    def _middle(
        self, stream: _Stream, outputs: Mapping[int, torch.Tensor]
    ) -> tuple[_Call, Tap, _Multiples] | None:
        """Return the first call that reads the stream after a branch was added: (call, tap, the
        stream there as multiples of earlier rows).
        """
        for number, call in enumerate(stream.run.calls):
            before: dict[Any, torch.Tensor] = {
                "stream": stream.entering,
                **{place: value for place, value in outputs.items() if place < number},
            }
            targets = dict[TapKind, torch.Tensor]()
            if len(call.inputs) == 2:
                targets["pair"] = call.inputs[0] + call.inputs[1]
            if call.inputs:
                targets["single"] = call.inputs[0]
            for kind, target in targets.items():
                law = self.fit(target, before)
                if (
                    law is not None
                    and "stream" in law
                    and len(law) > 1
                    and law.keys() <= stream.law.keys()
                ):
                    return call, Tap(call.path, "input", kind), law
        return None

    def _two_branches(
        self, stream: _Stream, reader: _Call, tap: Tap, multiples: _Multiples
    ) -> None:
        taps = stream.shape.taps
        absent = stream.shape.absent
        first = [place for place in multiples if place != "stream"]
        second = [place for place in stream.branches if place not in first]
        taps["post_attn"] = tap
        stream.add(
            "attn_out",
            first,
            Tap(tap.path, "input") if tap.kind == "pair" else None,
            "post_attn",
            {"pre_attn": multiples["stream"]},
            multiples,
        )
        if second:
            kept = stream.law["stream"] / multiples["stream"]
            stream.add_last("mlp_out", second, {"post_attn": kept})
        else:
            absent["mlp_out"] = "nothing is added after post_attn"
        if reader.leaf and reader.output is not None:
            taps["mlp_in"] = Tap(reader.path, "output")
        else:
            absent["mlp_in"] = "the MLP reads the stream, which is post_attn"

    def _parallel(self, stream: _Stream) -> None:
        if stream.kind == "pair":
            raise NoStreamError(
                "two branches are added in one sum to a stream that is a pair of tensors"
            )
        calls = stream.run.calls
        shape = stream.shape
        attention, mlp = sorted(stream.branches)
        shape.absent["post_attn"] = PARALLEL
        stream.add_last("attn_out", [attention], {"pre_attn": stream.law["stream"]})
        stream.add_last("mlp_out", [mlp], shape.laws["post_block"])
        computes = next((call for call in reversed(calls[: mlp + 1]) if not call.leaf), None)
        if computes is not None and not computes.mixes:
            shape.taps["mlp_in"] = Tap(computes.path, "input")
        else:
            shape.absent["mlp_in"] = "no part of the layer is the MLP"

    def _one_branch(self, stream: _Stream) -> None:
        output: Hook = "attn_out" if any(call.mixes for call in stream.run.calls) else "mlp_out"
        others = (hook for hook in HOOKS[1:-1] if hook != output)
        stream.shape.absent.update(dict.fromkeys(others, "the layer has one branch"))
        stream.add_last(output, stream.branches, {"pre_attn": stream.law["stream"]})

    def _check_edits(self, stream: _Stream) -> None:
        """Add rows in place at each tap of a branch or of the stream, and check that they reach the
        layer's output, times their multiplier: a tensor with the right values may be a copy.
        """
        taps = stream.shape.taps
        laws = stream.shape.laws
        last: SumLaw = laws.get("post_block", {})
        through: dict[Hook, float | None] = {
            "mlp_out": last.get("mlp_out"),
            "post_attn": last.get("post_attn"),
            "attn_out": last.get("attn_out"),
        }
        if "post_attn" in laws and "post_attn" in last:
            through["attn_out"] = laws["post_attn"]["attn_out"] * last["post_attn"]
        plain = self.run()
        leaving = _whole(plain.outputs, stream.kind)
        added = self._rows(torch.Generator().manual_seed(1))
        for hook, expected in through.items():
            tap = taps.get(hook)
            if tap is None or expected is None or not tap.path:
                continue
            run = self.run((tap, added))
            change = _whole(run.outputs, stream.kind) - leaving
            mlp = taps.get("mlp_out")
            if hook != "mlp_out" and mlp is not None:
                change = change - last["mlp_out"] * (
                    self._branch(run, mlp) - self._branch(plain, mlp)
                )
            size = added.norm(dim=-1) + leaving.norm(dim=-1)
            if float(((change - expected * added).norm(dim=-1) / size).max()) > self.exact:
                raise NoStreamError(
                    f"an edit at {hook} ({tap.path}, {tap.side}) does not reach the layer's output "
                    f"times {expected:g}"
                )

    def _branch(self, run: _Run, tap: Tap) -> torch.Tensor:
        """Return the output of the branch that ends at `tap`."""
        if not tap.path:
            return run.outputs[0]
        return next(
            call.output for call in run.calls if call.path == tap.path and call.output is not None
        )


def _whole(rows: _StreamRows, kind: TapKind) -> torch.Tensor:
    """Return the stream that enters or leaves as these rows."""
    first, second = rows
    return first + second if kind == "pair" and second is not None else first


def _parts(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layer's direct children with their paths; items of a list are separate parts."""
    parts: set[nn.Module] = set()
    for name, part in layer.named_children():
        if isinstance(part, nn.ModuleList | nn.ModuleDict):
            for inner, item in part.named_children():
                if item not in parts:
                    parts.add(item)
                    yield f"{name}.{inner}", item
        elif part not in parts:
            parts.add(part)
            yield name, part


def _mixes(module: nn.Module) -> bool:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    return isinstance(module, AttentionLayerBase)

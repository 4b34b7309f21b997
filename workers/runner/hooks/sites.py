"""Installation of hook points in a loaded model: wraps the instances of the modules that the
adapter names.

Sites are installed after loading and before compilation or graph capture; model files stay
unchanged. Neighbouring sites on the same tensors share one launch. In a traced forward every launch
is one opaque op whose tensors are buffers of its module, so the same graph serves idle and busy
steps. A forward that runs as Python skips a launch that is not busy.

The adapter of a loaded model is its entry in the table, or the structure discovered in its layers.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from ....kernels import STREAM, WHOLE, pair_site, single_site
from ....kernels.plan import COLUMNS, COUNTS, NO_SLOT, ROWS_PER_TOKEN, Buffers
from ....schemas.prompts.selectors import HOOKS, Hook
from ....schemas.requests.interventions import EVERY, FAMILIES, SCALARS
from .architectures import (
    UNKNOWN,
    Adapter,
    TapKind,
    TapSide,
    UnsupportedArchitectureError,
    Variant,
    launch_groups,
    stream_group,
)
from .layer_discovery import LayerShape, NoStreamError, probe

_BY_SITE = ("plan", "site_rows")
#: (hidden, residual or None) → None: runs the op of one launch.
LaunchVisit = Callable[[torch.Tensor, torch.Tensor | None], None]
#: Module of vLLM's Transformers backend.
BACKEND_MODULE = "vllm.model_executor.models.transformers"


@dataclass
class RankSite:
    """One hook point of one layer that this rank holds."""

    hook: Hook
    layer: int  # absolute layer number
    kind: TapKind
    # this site's launch has work in the next forward; traced forwards ignore this
    busy: bool = False
    # first site of its launch; the following sites that do not lead share that launch
    leads: bool = True
    group: int = WHOLE  # of its launch, see `kernels.ops` and `stream_hooks`


@dataclass(frozen=True)
class Sizes:
    """Sizes of the buffers."""

    # captured rows of one step, over all sites; 0: the ring is set later
    ring_rows: int
    capacity: int  # token rows of one step
    lists: int  # token numbers and ring rows of one step, over all sites
    patterns: int  # distinct sets of captured tokens in one step
    configurations: int  # distinct intervention configurations in one step
    entries: int  # vectors of those configurations


#: The buffers in the order of the ops' arguments, and those of which a launch gets only the rows of
#: its sites.
_ORDER = tuple(field.name for field in fields(Buffers))


def install(
    model: nn.Module,
    adapter: Adapter,
    sizes: Sizes,
    hooks: Sequence[Hook],
    *,
    dtype: torch.dtype,
    device: torch.device,
    always: bool,
) -> tuple[list[RankSite], Buffers]:
    """Wrap the modules that the adapter names for `hooks`, in the layers that this rank holds.

    Returns the sites in (layer, hook) order, and the buffers; site `i` has `plan[i]` and
    `site_rows[i]`. `always`: the forward is traced, or captured as a graph; every op must then be
    in it, and every forward begins at the first layer.

    Raises UnsupportedArchitectureError when a hook does not exist or the model does not match the
    adapter.
    """
    ordered = [hook for hook in adapter.hooks if hook in hooks]
    for hook in hooks:
        adapter.tap(hook, 0)
    layers = held_layers(model, adapter) if ordered else []
    placed = [
        (number, layer, hook, adapter.tap(hook, number))
        for number, layer in layers
        for hook in ordered
    ]
    sites = [RankSite(hook, number, tap.kind) for number, _, hook, tap in placed]
    buffers = buffers_of(len(sites), sizes, adapter.hidden_size, dtype, device)
    _lead(
        sites,
        adapter,
        ordered,
        # Where the forward runs as Python, re-entry begins before `pre_attn`. What a model keeps
        # between its layers (for EAGLE-3) must not have the next layer's edits.
        next_layer=always and bool(ordered) and not read_between_layers(model, adapter),
    )
    visits: dict[nn.Module, dict[TapSide, list[tuple[bool, LaunchVisit]]]] = {}
    for first, launched in _launches(sites):
        _, layer, _, tap = placed[first]
        module = _submodule(layer, tap.path, adapter)
        visit = visit_of(module, launched, first, buffers, always)
        visits.setdefault(module, {"input": [], "output": []})[tap.side].append(
            (launched[-1].kind == "pair", visit)
        )
    for module, sides in visits.items():
        _wrap(module, sides["input"], sides["output"])
    return sites, buffers


def warm_up(sites: Sequence[RankSite], buffers: Buffers) -> None:
    """Run each op that the sites need once, on one row, while nothing is planned.

    On a GPU this compiles the kernels, each of which is the same for every number of rows and of
    sites. Without graphs the first busy step would compile them.
    """
    # a launch that begins with a single tensor and ends with a pair is a kind of its own
    kinds = {
        (launched[0].kind, launched[-1].kind): (first, launched)
        for first, launched in _launches(sites)
    }
    for _, (first, launched) in sorted(kinds.items()):
        one = slice(first, first + len(launched))
        arguments = [
            getattr(buffers, name)[one] if name in _BY_SITE else getattr(buffers, name)
            for name in _ORDER
        ]
        stream = buffers.pool.new_zeros(1, buffers.pool.shape[1])
        if launched[-1].kind == "pair":
            pair_site(stream, stream.clone(), *arguments, _branches(launched))
        else:
            single_site(stream, *arguments)


def _launches(sites: Sequence[RankSite]) -> Iterator[tuple[int, Sequence[RankSite]]]:
    """Yield for each launch the number of its first site, and its sites."""
    firsts = [number for number, site in enumerate(sites) if site.leads]
    for first, stop in itertools.pairwise([*firsts, len(sites)]):
        yield first, sites[first:stop]


def _branches(sites: Sequence[RankSite]) -> int:
    """Return how many sites of a launch are on one tensor, `hidden`; the rest are on a pair."""
    return sum(site.kind == "single" for site in sites)


def _lead(
    sites: Sequence[RankSite], adapter: Adapter, hooks: Sequence[Hook], *, next_layer: bool
) -> None:
    """Set `leads` of each site, whether it is the first of its launch, and `group`.

    `sites`: the sites of all held layers, which are consecutive, in order.
    """
    for last, site in itertools.pairwise(sites):
        groups = launch_groups(adapter.of(last.layer), hooks, next_layer=next_layer)
        site.leads = not any(
            (last.hook, site.hook) in itertools.pairwise(group) for group in groups
        )
    launches = [[site.hook for site in launched] for _, launched in _launches(sites)]
    stream = stream_group(launches)
    for (_, launched), hooks in zip(_launches(sites), launches, strict=True):
        for site in launched:
            site.group = WHOLE if stream.isdisjoint(hooks) else STREAM


def stream_hooks(sites: Sequence[RankSite]) -> frozenset[Hook]:
    """Return the hooks that need no other launches than those of the family `kernels.ops.STREAM`:
    `post_block`, and hooks that share its launches. Empty if there are no other launches, and
    therefore no such family.
    """
    others = {site.hook for site in sites if site.group == WHOLE}
    return frozenset({site.hook for site in sites} - others) if others else frozenset()


def read_between_layers(model: nn.Module, adapter: Adapter) -> tuple[int, ...]:
    """Return after how many layers the model reads the stream for EAGLE-3; the next layer's edits
    must come after this read.
    """
    return tuple(getattr(decoder(model, adapter), "aux_hidden_state_layers", ()))


def has_sites(module: nn.Module) -> bool:
    """Return whether this module itself, not a part of it, has a site."""
    return any(name.startswith("midstream_") for name, _ in module.named_buffers(recurse=False))


def language_model(model: nn.Module) -> nn.Module:
    """Return the part of vLLM's model that generates text: the language model of a model that takes
    images, else the model itself.
    """
    below: Any = model
    return below.get_language_model() if getattr(model, "supports_multimodal", False) else below


def held_layers(model: nn.Module, adapter: Adapter) -> list[tuple[int, nn.Module]]:
    """Return (absolute number, decoder layer) for the layers that this rank holds, without the
    placeholders of other pipeline stages.
    """
    layers = _submodule(decoder(model, adapter), adapter.variant.layers.rpartition(".")[2], adapter)
    return [
        (number, layer) for number, layer in enumerate(layers) if not isinstance(layer, nn.Identity)
    ]


def decoder(model: nn.Module, adapter: Adapter) -> nn.Module:
    """Return the module whose forward runs the decoder layers.

    Some language models are this module themselves; the output head is in the model around them.
    """
    below = language_model(model)
    (path, _, layers) = adapter.variant.layers.rpartition(".")
    return below if hasattr(below, layers) else _submodule(below, path, adapter)


def _submodule(module: nn.Module, path: str, adapter: Adapter) -> Any:
    try:
        return module.get_submodule(path)
    except AttributeError as error:
        raise UnsupportedArchitectureError(
            f"{adapter.architecture} does not match its adapter: {error}"
        ) from error


def buffers_of(
    sites: int, sizes: Sizes, hidden: int, dtype: torch.dtype, device: torch.device
) -> Buffers:
    def empty(*shape: int, dtype: torch.dtype = torch.int32, fill: int = 0) -> torch.Tensor:
        return torch.full(shape, fill, dtype=dtype, device=device)

    return Buffers(
        ring=empty(sizes.ring_rows, hidden, dtype=dtype),
        plan=empty(sites, COLUMNS),
        lists=empty(sizes.lists, dtype=torch.int64),
        token_rows=empty(sizes.capacity, ROWS_PER_TOKEN),
        capture_slots=empty(sizes.patterns, sizes.capacity, fill=NO_SLOT),
        site_rows=empty(
            sites, len(EVERY if device.type == "cpu" else FAMILIES), 1 + sizes.configurations
        ),
        pool=empty(1 + sizes.entries, hidden, dtype=dtype),
        scalars=empty(1 + sizes.entries, SCALARS, dtype=torch.float32),
        counts=empty(sites, COUNTS),
        sizes=empty(sites, sizes.capacity, dtype=torch.float32),
    )


def visit_of(
    module: nn.Module,
    sites: Sequence[RankSite],
    first: int,
    buffers: Buffers,
    always: bool,
    bank: str = "",
) -> LaunchVisit:
    """Return the call that runs the op of `sites`, from traced forwards and from Python ones.

    `first`: the first of their rows in `plan` and `site_rows`. `bank`: the bank that the buffers
    belong to; empty: the residual stream's.
    """
    by_site = {name: getattr(buffers, name)[first : first + len(sites)] for name in _BY_SITE}
    leader = sites[0]
    branches = _branches(sites)
    # Buffers on the module become inputs of the traced graph, as weights do. They are never saved.
    shared = f"midstream_{bank}_" if bank else "midstream_"
    names = tuple(
        f"midstream_{leader.hook}_{name}" if name in by_site else f"{shared}{name}"
        for name in _ORDER
    )
    for name, of_module in zip(_ORDER, names, strict=True):
        module.register_buffer(
            of_module, by_site.get(name, getattr(buffers, name)), persistent=False
        )

    def arguments() -> list[torch.Tensor]:
        if torch.compiler.is_compiling():
            return [getattr(module, name) for name in names]
        return [by_site[name] if name in by_site else getattr(buffers, name) for name in _ORDER]

    def visit(hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        if torch.compiler.is_compiling() or always or leader.busy:
            if residual is None:
                single_site(hidden, *arguments(), group=leader.group)
            else:
                pair_site(hidden, residual, *arguments(), branches, group=leader.group)

    return visit


def _wrap(
    module: nn.Module,
    before: Sequence[tuple[bool, LaunchVisit]],
    after: Sequence[tuple[bool, LaunchVisit]],
) -> None:
    """Wrap `module.forward` with calls of the ops before and after it, in order.

    `before`, `after`: (the op takes a pair, its call).
    """
    forward = module.forward
    hidden_at, residual_at = places(forward)
    names = list(inspect.signature(forward).parameters)
    hidden_name = names[hidden_at] if hidden_at < len(names) else "hidden_states"
    # some forwards return None, and write to the argument `output`
    written_at = names.index("output") if "output" in names else len(names)
    # Closed over, not read from objects, because tracing adds a guard for each read attribute.
    inputs = tuple(before)
    outputs = tuple(after)

    def with_sites(*args: Any, **kwargs: Any) -> Any:
        for pair, visit in inputs:
            hidden = args[hidden_at] if hidden_at < len(args) else kwargs[hidden_name]
            residual = None
            if pair:
                residual = args[residual_at] if residual_at < len(args) else kwargs["residual"]
            visit(hidden, residual)
        output = forward(*args, **kwargs)
        for pair, visit in outputs:
            if output is None:
                visit(args[written_at] if written_at < len(args) else kwargs["output"], None)
            else:
                visit(
                    output[0] if isinstance(output, tuple) else output, output[1] if pair else None
                )
        return output

    with_sites.bare = forward  # type: ignore[attr-defined]
    module.forward = with_sites


@contextmanager
def without_sites(module: nn.Module) -> Iterator[None]:
    """Disable every site in this module and its parts within the block, for all callers."""
    wrapped = [part for part in module.modules() if hasattr(part.__dict__.get("forward"), "bare")]
    forwards = [part.forward for part in wrapped]
    for part, forward in zip(wrapped, forwards, strict=True):
        part.forward = forward.bare
    try:
        yield
    finally:
        for part, forward in zip(wrapped, forwards, strict=True):
            part.forward = forward


def places(forward: Callable[..., Any]) -> tuple[int, int]:
    """Return the indices of `hidden_states` and `residual` among the positional arguments; norms
    take them first and second.
    """
    names = list(inspect.signature(forward).parameters)
    hidden = names.index("hidden_states") if "hidden_states" in names else 0
    return hidden, names.index("residual") if "residual" in names else hidden + 1


def complete(
    adapter: Adapter, model: nn.Module, config: Any, *, dtype: torch.dtype, device: torch.device
) -> Adapter:
    """Return `adapter`, completed for the loaded `model`. `config`: the model's HF text config.

    A table entry applies only if vLLM runs the model in the entry's way: by vLLM's own model file,
    or by the Transformers backend. Otherwise the layers are probed. Raises
    UnsupportedArchitectureError if no stream is found.
    """
    backend = type(language_model(model)).__module__.startswith(BACKEND_MODULE)
    if adapter.variant.known and adapter.variant.backend == backend:
        return adapter
    path = decoder_layers(model, adapter)
    known = [float(value) for value in vars(config).values() if isinstance(value, float) and value]
    layer_shapes: dict[int, LayerShape] = {}
    for number, layer in enumerate(language_model(model).get_submodule(path)):
        if isinstance(layer, nn.Identity):  # the layer is on another pipeline stage
            continue
        try:
            layer_shapes[number] = probe(
                layer, adapter.hidden_size, dtype=dtype, device=device, known=known
            )
        except NoStreamError as error:
            raise UnsupportedArchitectureError(
                f"{adapter.architecture}: no residual stream was found in layer {number}: {error}"
            ) from error
    return _joined(replace(adapter, variant=UNKNOWN), path, backend, layer_shapes)


def _joined(
    adapter: Adapter, path: str, backend: bool, layer_shapes: dict[int, LayerShape]
) -> Adapter:
    """Return `adapter` with the probed layers, restricted to the hooks that all layers have."""
    absent: dict[Hook, str] = {}
    for hook in HOOKS:
        lacking = [number for number, shape in layer_shapes.items() if hook not in shape.taps]
        if lacking:
            reason = layer_shapes[lacking[0]].absent.get(hook, "it was not found")
            absent[hook] = (
                reason
                if len(lacking) == len(layer_shapes)
                else f"layer {lacking[0]} has none: {reason}"
            )
    variants = {
        number: Variant(
            path,
            {hook: tap for hook, tap in shape.taps.items() if hook not in absent},
            absent,
            backend=backend,
            measured={
                hook: law
                for hook, law in shape.laws.items()
                if hook not in absent and not absent.keys() & law.keys()
            },
        )
        for number, shape in layer_shapes.items()
    }
    first = variants[min(variants)]
    return replace(
        adapter,
        variant=first,
        kinds={number: variant for number, variant in variants.items() if variant != first},
    )


def decoder_layers(model: nn.Module, adapter: Adapter) -> str:
    """Return the path of the decoder layers in vLLM's language model.

    Raises UnsupportedArchitectureError.
    """
    lists = sorted(
        _lists(language_model(model), adapter.num_layers), key=lambda path: path.count(".")
    )
    if not lists:
        raise UnsupportedArchitectureError(
            f"{adapter.architecture}: no list of {adapter.num_layers} decoder layers was "
            "found in the model"
        )
    return lists[0]


def _lists(root: nn.Module, length: int) -> Iterator[str]:
    for path, module in root.named_modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) == length
            and any(next(layer.children(), None) is not None for layer in module)
        ):
            yield path

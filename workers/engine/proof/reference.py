"""transformers' model of a checkpoint's first layers, on the CPU; its rows define what the
checkpoint computes.

The class is transformers' own, config and weights are the checkpoint's. Only the layers that
`Truncation` keeps are read, so most files of a sharded checkpoint are never read beyond their
headers.
"""

import contextlib
import copy
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging as hf_logging

logger = logging.getLogger(__name__)

#: Names of the list of decoder layers in transformers' models.
_LISTS = ("layers", "h", "blocks")
#: Parts of the names of modules that a text prompt does not reach, such as image encoders.
_ENCODERS = ("vision", "visual", "audio", "image", "speech", "encoder", "multi_modal", "mtp")
#: Parts of the names of attributes that number a layer.
_NUMBERS = ("idx", "index", "layer_id", "layer_num")
#: Depth, below a layer, of the modules whose inputs and outputs are recorded.
_DEPTH = 2
#: Memory while weights are read, in multiples of their float32 size.
_LOADING = 1.25
#: Most layers that are kept: reading more would take longer than the rest of the certification.
MOST_LAYERS = 24

#: Name of a layer's tensor (`input`, `output`, `self_attn.output`, …) → its rows at the compared
#: positions.
NamedTensors = Mapping[str, torch.Tensor]


class NotComparableError(Exception):
    """transformers cannot compute this checkpoint here; the message says why."""


class Checkpoint(NamedTuple):
    """The served checkpoint, for transformers to load; `refused`: why it is not compared."""

    path: str = ""
    architecture: str = ""
    revision: str | None = None
    overrides: Mapping[str, Any] = {}  # fields of its config
    limit_gib: float = 0.0  # memory that transformers' model may use
    refused: str = ""
    content: str = ""  # see `model_identity.content_of`; empty: not read


class _LastLayerDone(Exception):
    """The last kept layer has run. The pass ends here, because the logits of a whole prompt would
    take more memory and time than the layers.
    """


class Truncation(NamedTuple):
    """The number of a model's layers that are kept."""

    layers: int
    kinds: int  # kinds of layers in the whole model
    missing: int  # kinds that no kept layer has


def truncation(
    kinds: Sequence[Hashable], sizes: Sequence[int], rest: int, limit: int
) -> Truncation:
    """Keep the first layers, up to the first that completes all kinds, within `limit` bytes.

    `kinds`: the kind of each layer; `sizes`: bytes of each layer's float32 weights; `rest`: bytes
    of all other weights. Raises NotComparableError if no layer fits.
    """
    requested = max(kinds.index(kind) for kind in set(kinds)) + 1
    for kept in range(min(requested, MOST_LAYERS), 0, -1):
        needed = int(_LOADING * (rest + sum(sizes[:kept])))
        if needed <= limit:
            return Truncation(kept, len(set(kinds)), len(set(kinds) - set(kinds[:kept])))
    raise NotComparableError(
        f"its first layer, embedding and output matrix take {needed / 2**30:.1f} GiB in "
        f"float32, and {limit / 2**30:.1f} GiB may be used "
        "(setting tuning.compare_memory_gib, and half of the memory that is free)"
    )


def kinds_of(layers: Sequence[nn.Module], config: Any) -> list[Hashable]:
    """Return the kind of each layer: its modules with their plain attributes, the shapes of its
    weights, and its entries in lists of the config.
    """
    lists = [
        value
        for value in vars(config).values()
        if isinstance(value, list | tuple) and len(value) == len(layers)
    ]
    return [
        (_kind(layer), tuple(repr(value[place]) for value in lists))
        for place, layer in enumerate(layers)
    ]


def _kind(layer: nn.Module) -> Hashable:
    modules = tuple(
        (path, type(module).__name__, _plain(module)) for path, module in layer.named_modules()
    )
    return modules, tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters())


def _plain(module: nn.Module) -> Hashable:
    fields = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and not any(item in name for item in _NUMBERS)
    }
    return tuple(
        sorted(
            (name, repr(value))
            for name, value in fields.items()
            if isinstance(value, bool | int | float | str | None)
        )
    )


class TransformersReference:
    """One checkpoint in transformers. Every method may raise NotComparableError."""

    def __init__(self, source: Checkpoint) -> None:
        """Reads only the config."""
        self._source = source
        self.config, self._class = configured(source)
        with torch.device("meta"):
            bare = _attempt("its class", lambda: self._class(copy.deepcopy(self.config)))
        self._layers, stack = _stack(bare, self.config.get_text_config().num_hidden_layers)
        _without_encoders(bare, self._layers)
        sizes = [4 * sum(weight.numel() for weight in layer.parameters()) for layer in stack]
        rest = 4 * sum(weight.numel() for weight in bare.parameters()) - sum(sizes)
        limit = min(int(source.limit_gib * 2**30), free_bytes() // 2)
        self.truncation = truncation(
            kinds_of(stack, self.config.get_text_config()), sizes, rest, limit
        )
        routes = [any("experts" in name for name, _ in layer.named_modules()) for layer in stack]
        #: For each kept layer, whether it or a layer below it chooses experts.
        self.routed = [any(routes[: place + 1]) for place in range(self.truncation.layers)]
        self._model: Any = None

    def load(self) -> None:
        """Read the weights, in float32."""
        kept = self.truncation.layers
        layers = self._layers

        class Truncated(self._class):  # type: ignore[name-defined]
            """The model with the kept layers only. The config is unchanged, because some layers
            compute with the number of all layers.
            """

            def __init__(self, config: Any) -> None:
                super().__init__(config)
                _without_encoders(self, layers)
                parent, _, name = layers.rpartition(".")
                setattr(self.get_submodule(parent), name, self.get_submodule(layers)[:kept])

        # transformers finds the class's weights by its name and module
        Truncated.__name__ = self._class.__name__
        Truncated.__module__ = self._class.__module__
        with _quiet():  # the checkpoint also has the weights of the other layers
            self._model, report = _attempt(
                "its weights",
                lambda: Truncated.from_pretrained(
                    self._source.path,
                    config=self.config,
                    revision=self._source.revision,
                    dtype=torch.float32,
                    attn_implementation="eager",
                    output_loading_info=True,
                ),
            )
        mismatched = map(str, report["mismatched_keys"])
        missing = sorted({*report["missing_keys"], *mismatched})
        if missing:
            raise NotComparableError(
                f"transformers' class has weights that the checkpoint does not: {missing[0]}"
            )

    def round(self, dtype: torch.dtype) -> None:
        """Round the weights to `dtype`. Buffers keep their dtype, as in transformers."""
        for weight in self._model.parameters():
            weight.data = weight.data.to(dtype)

    def trace(self, tokens: Sequence[int], positions: Sequence[int]) -> list[NamedTensors]:
        """Return, for each kept layer, every tensor that has a row for each token."""
        traces: list[dict[str, torch.Tensor]] = [{} for _ in range(self.truncation.layers)]
        handles = [
            module.register_forward_hook(
                _recorder(path, into, len(tokens), list(positions)), with_kwargs=True
            )
            for layer, into in zip(self._model.get_submodule(self._layers), traces, strict=True)
            for path, module in layer.named_modules()
            if path.count(".") < _DEPTH
        ]
        # registered last, so that it runs after the hooks above
        handles.append(self._model.get_submodule(self._layers)[-1].register_forward_hook(_stop))
        self._forward(tokens, handles)
        return list(traces)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits, `[rows, vocabulary]` float32, of `rows`, `[rows, hidden]`, which leave
        the last layer of the whole model.
        """

        def replaced(_module: Any, _inputs: Any, output: Any) -> Any:
            first = output[0] if isinstance(output, tuple) else output
            held = rows.to(first.dtype).view_as(first)
            return (held, *output[1:]) if isinstance(output, tuple) else held

        handle = self._model.get_submodule(self._layers)[-1].register_forward_hook(replaced)
        return self._forward(list(range(len(rows))), [handle]).logits[0].float()

    def _forward(self, tokens: Sequence[int], handles: Sequence[Any]) -> Any:
        def run() -> Any:
            try:
                with torch.inference_mode():
                    return self._model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
            except _LastLayerDone:
                return None

        try:
            return _attempt("its forward pass", run)
        finally:
            for handle in handles:
                handle.remove()


def _stop(*_: Any) -> None:
    raise _LastLayerDone


def _recorder(
    path: str, into: dict[str, torch.Tensor], tokens: int, positions: list[int]
) -> Callable[..., None]:
    def keep(side: str, value: Any) -> None:
        tensor = value[0] if isinstance(value, tuple) and value else value
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.ndim > 1:
            width = tensor.shape[-1]
            if tensor.numel() == tokens * width:
                into[f"{path}.{side}".strip(".")] = (
                    tensor.detach().reshape(tokens, width)[positions].float()
                )

    def record(_module: Any, inputs: Any, named: Mapping[str, Any], output: Any) -> None:
        keep("input", inputs[0] if inputs else named.get("hidden_states"))
        keep("output", output)

    return record


def configured(source: Checkpoint) -> tuple[Any, Any]:
    """Returns a checkpoint's config, with its `overrides`, and transformers' class of the model.
    Raises NotComparableError, also for a quantised checkpoint.
    """
    config = _attempt(
        "its config", lambda: AutoConfig.from_pretrained(source.path, revision=source.revision)
    )
    text = config.get_text_config()
    for name, value in source.overrides.items():
        (config if name in config.to_dict() else text).update({name: value})
    model_class = _class_of(source.architecture, config)
    if getattr(config, "quantization_config", None) is not None:
        raise NotComparableError("it is quantised, and transformers computes other kernels")
    return config, model_class


def _class_of(architecture: str, config: Any) -> Any:
    """Returns transformers' class of the model. Raises NotComparableError."""
    model_class = getattr(transformers, architecture, None)
    if model_class is None and type(config) in AutoModelForCausalLM._model_mapping:
        model_class = AutoModelForCausalLM._model_mapping[type(config)]
    if model_class is None or not isinstance(
        config, getattr(model_class, "config_class", None) or PretrainedConfig
    ):
        raise NotComparableError(
            f"transformers {transformers.__version__} has no class {architecture} for its config"
        )
    return model_class


def _stack(model: nn.Module, number: int) -> tuple[str, nn.ModuleList]:
    """Returns the path of the decoder layers, and the layers. Raises NotComparableError."""
    stacks = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and path.rpartition(".")[2] in _LISTS
        and len(module) == number
        and not any(word in path for word in _ENCODERS)
    ]
    if len(stacks) != 1:
        raise NotComparableError(f"transformers' model has {len(stacks)} lists of {number} layers")
    return stacks[0]


def _without_encoders(model: nn.Module, layers: str) -> None:
    """Removes modules that text does not reach, so that their weights are not read."""
    for path, module in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        has_layers = layers.startswith(f"{path}.") or path.startswith(f"{layers}.")
        if (
            any(word in name for word in _ENCODERS)
            and not has_layers
            and any(True for _ in module.parameters())
        ):
            setattr(model.get_submodule(parent), name, nn.Identity())


def free_bytes() -> int:
    """Returns the free memory of this machine, or of the container if that is less."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = [int(fields["MemAvailable"].split()[0]) << 10]
    try:
        limit, used = (
            int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current")
        )
        free.append(limit - used)
    except (OSError, ValueError):  # no limit
        pass
    return min(free)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses transformers' progress bars, and its report of weights that the model lacks."""
    level = hf_logging.get_verbosity()
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if shown:
            hf_logging.enable_progress_bar()


def _attempt(what: str, call: Callable[[], Any]) -> Any:
    """Return what `call` returns. Raises NotComparableError naming `what` for any error."""
    try:
        return call()
    except NotComparableError:
        raise
    except Exception as error:
        logger.warning("comparison with transformers: %s", what, exc_info=True)
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise NotComparableError(f"transformers fails on {what}: {reason}") from error

"""Adapter of a loaded model: its entry in the table, or the structure discovered in its layers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ....schemas.prompts.selectors import HOOKS, Hook
from .architectures import UNKNOWN, Adapter, UnsupportedArchitectureError, Variant
from .layer_discovery import LayerShape, NoStreamError, probe
from .sites import language_model

#: Module of vLLM's Transformers backend.
BACKEND_MODULE = "vllm.model_executor.models.transformers"


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

"""Loads the served checkpoint in transformers, and estimates the memory of a run with gradients.

What autograd keeps is measured, not derived: three short runs give its bytes as a quadratic
polynomial in the number of tokens, which holds for any architecture, dtype and attention kernel.
"""

import copy
import ctypes
import gc
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch

from midstream.schemas.base.errors import MidstreamError, Translated
from midstream.workers.engine.proof.reference import (
    Checkpoint,
    NotComparableError,
    configured,
    free_bytes,
)
from midstream.workers.runner.hooks.architectures import UnsupportedArchitectureError

from .points import ATTENTION, Points, SiteKey

#: dtypes in which gradients are computed.
DTYPES = ("float32", "bfloat16")
#: Memory that a model takes while it is loaded, in multiples of its weights.
_LOADING = 1.1
GIB = 1 << 30
#: Lengths of the runs that are measured, in tokens.
_LENGTHS = (8, 16, 24)
#: Layers' worth of kept tensors that a pass holds beside them: the temporaries of the layer that it
#: computes, and their gradients.
_WORKING_LAYERS = 3
#: Bytes of a logit: in the model's dtype, in float64, its logarithm and their gradients.
_PER_LOGIT = 48
#: What the allocator and the libraries may take beyond this, once.
SLACK_BYTES = 64 << 20


def refused(why: str) -> MidstreamError:
    return MidstreamError("gradients_refused", why)


class Device(NamedTuple):
    """The model's place, as transformers' `device_map`, and the bytes that are free there."""

    place: str
    free: int


def load_points(source: Checkpoint, dtype: str, setting: str) -> Points:
    """Load the checkpoint. `setting`: the setting `gradients_device`.

    Raises MidstreamError("gradients_refused") for a checkpoint whose gradients cannot be computed
    here, with the reason.
    """
    config, model_class, bare = bare_points(source, dtype)
    weights = sum(weight.numel() for weight in bare.model.parameters())
    device = device_for(int(_LOADING * weights * getattr(torch, dtype).itemsize), dtype, setting)
    with Translated(
        torch.OutOfMemoryError,
        lambda error: refused(f"memory ran out while the weights were read: {error}"),
    ):
        model, report = model_class.from_pretrained(
            source.path,
            config=config,
            revision=source.revision or "main",
            dtype=getattr(torch, dtype),
            device_map=None if device.place == "cpu" else device.place,
            attn_implementation=ATTENTION,
            output_loading_info=True,
        )
    if missing := sorted({*report["missing_keys"], *map(str, report["mismatched_keys"])}):
        raise refused(
            f"transformers' {type(model).__name__} has weights that the checkpoint does not: "
            f"{missing[0]}"
        )
    return Points(model)


def bare_points(source: Checkpoint, dtype: str) -> tuple[Any, Any, Points]:
    """Return the checkpoint's config, transformers' class, and its hook points without weights.

    Raises MidstreamError("gradients_refused") for a checkpoint that has no gradients.
    """
    if source.refused:
        raise refused(f"its gradients are not computed: {source.refused}")
    if dtype not in DTYPES:
        raise refused(f"gradients are computed in {' or '.join(DTYPES)}; the model is in {dtype}")
    with Translated(
        (NotComparableError, UnsupportedArchitectureError), lambda error: refused(str(error))
    ):
        config, model_class = configured(source)
        with torch.device("meta"):
            return config, model_class, Points(model_class(copy.deepcopy(config)))


def device_for(needed: int, dtype: str, setting: str) -> Device:
    """Return the device for `needed` bytes of weights: the one that `setting` names; for `auto`
    the GPU with the most free memory, all GPUs if only together they have enough, or the CPU where
    there is none.

    Raises MidstreamError("gradients_refused") with the figures if the memory is not there.
    """
    gpus = [
        Device(f"cuda:{index}", torch.cuda.mem_get_info(index)[0])
        for index in range(torch.cuda.device_count())
    ]
    if setting == "auto" and gpus:
        largest = max(gpus, key=lambda gpu: gpu.free)
        devices = [largest, Device("auto", sum(gpu.free for gpu in gpus))]
    else:
        place = "cpu" if setting == "auto" else setting
        devices = [one for one in (Device("cpu", free_bytes()), *gpus) if one.place == place]
    if not devices:
        have = ", ".join(["auto", "cpu", *(gpu.place for gpu in gpus)])
        raise refused(f"gradients_device={setting!r} does not exist here; valid: {have}")
    for device in devices:
        if needed <= device.free:
            return device
    where = {"auto": "all GPUs together"}.get(device.place, device.place)
    raise refused(
        f"its weights take {needed / GIB:.1f} GiB in {dtype}, and {device.free / GIB:.1f} GiB "
        f"are free on {where} (settings gradients_device, dtype)"
    )


def free_on(points: Points) -> int:
    """Return the bytes that are free for activations where the model is; of several GPUs, on the
    one with the least.
    """
    free = [
        torch.cuda.mem_get_info(device)[0]
        + torch.cuda.memory_reserved(device)
        - torch.cuda.memory_allocated(device)
        for device in {weight.device for weight in points.model.parameters() if weight.is_cuda}
    ]
    return min(free) if free else free_bytes()


def give_back_memory() -> None:
    """Return the memory of dropped tensors to the device and to the operating system."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps freed memory
    if trim is not None:
        trim(0)


class PassMemory(NamedTuple):
    """Bytes of one pass forward and back, beside the parameters."""

    activations: int  # that autograd keeps
    gradients: int  # of the rows of sites, and these rows in the source run
    working: int  # temporaries, logits, slack

    @property
    def total(self) -> int:
        return sum(self)


class Footprint:
    """The memory of a loaded model's runs. `memory` is an upper bound of the peak, and at most
    about twice as much for runs whose kept tensors exceed `SLACK_BYTES`.
    """

    def __init__(self, points: Points) -> None:
        """Run the model three times on short prompts."""
        self.points = points
        self._owned = {*points.model.parameters(), *points.model.buffers()}
        self._curve = np.polyfit(_LENGTHS, [self._kept(length) for length in _LENGTHS], 2)

    def _kept(self, length: int) -> int:
        """Return the bytes that autograd keeps for a prompt, beside the model's own tensors."""
        seen: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        tokens = self.points.batch([[0] * length])
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run = self.points.run(tokens, [("pre_attn", 0)], grad=True)
        del run
        owned = {tensor.untyped_storage().data_ptr() for tensor in self._owned}
        return sum(size for place, size in seen.items() if place not in owned)

    def memory(
        self, tokens: int, batch: int = 1, sites: Collection[SiteKey] = (), kept: int = 1
    ) -> PassMemory:
        """Return the memory of a run of `batch` prompts of `tokens` tokens.

        `sites`: whose gradients are computed; `kept`: positions whose logits are computed.
        """
        points = self.points
        activations = batch * max(float(np.polyval(self._curve, tokens)), 0.0)
        rows = sum(points.width(hook) for hook, _ in sites) * tokens * batch
        logits = batch * kept * points.model.config.get_text_config().vocab_size * _PER_LOGIT
        return PassMemory(
            int(activations),
            2 * rows * points.model.dtype.itemsize,
            int(_WORKING_LAYERS * activations / points.num_layers) + logits + SLACK_BYTES,
        )

"""Loads the served checkpoint in transformers, where there is memory for it."""

import copy
import ctypes
import gc
from typing import Any, NamedTuple

import torch

from ...schemas.base.errors import MidstreamError, Translated
from ..engine.proof.comparison import Checkpoint
from ..engine.proof.reference import NotComparableError, configured, free_bytes
from ..runner.hooks.architectures import UnsupportedArchitectureError
from . import attention
from .points import Points

#: dtypes in which gradients are computed.
DTYPES = ("float32", "bfloat16")
#: Memory that a model takes while it is loaded, in multiples of its weights.
_LOADING = 1.1
GIB = 1 << 30


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
            attn_implementation=attention.NAME,
            output_loading_info=True,
        )
    missing = sorted({*report["missing_keys"], *map(str, report["mismatched_keys"])})
    if missing:
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
        config, model_class = configured(
            source.path, source.architecture, source.revision, source.overrides
        )
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

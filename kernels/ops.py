"""Torch ops that the model's forward calls, with an implementation for each device.

The schemas declare every tensor that is written, so that no compiler drops or reorders a call.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch

from . import reference
from .plan import Buffers

#: Runs the sites of a launch: see `reference.launch`.
Launch = Callable[..., None]
_BUFFERS = len(fields(Buffers))
#: Arguments after the stream and the ring: the fields of `Buffers`. All are persistent; the planner
#: fills them before the forward, except the last two, which the ops write.
_PLANNED = (
    "Tensor plan, Tensor lists, Tensor token_rows, Tensor capture_slots, Tensor "
    "site_rows, Tensor pool, Tensor scalars, "
    "Tensor(d!) counts, Tensor(e!) sizes"
)
_SCHEMAS = {
    "pair_site": (
        f"(Tensor(a!) hidden, Tensor(b!) residual, Tensor(c!) ring, {_PLANNED}, int "
        "branches=0, *, int group=0) -> ()"
    ),
    "single_site": f"(Tensor(a!) stream, Tensor(b!) ring, {_PLANNED}, *, int group=0) -> ()",
}

# Every launch in a graph costs time at each replay, with or without work. Most requests need the
# residual stream alone: directions are added to it, and rows captured from it.
#: Families of forward passes: with the launches of all sites, with those of the residual stream's
#: group (`hooks.sites.stream_hooks`), and with none. A launch of group `g` runs in the families up
#: to `g`.
WHOLE, STREAM, IDLE = range(3)
_family = WHOLE


@contextmanager
def in_family(chosen: int) -> Iterator[None]:
    """Have the ops within the block do nothing unless their launch is in the family `chosen`. A
    graph that is captured there contains no other launch, whenever it is replayed.

    Apart from their tensors, the ops have no other state.
    """
    global _family
    before = _family
    _family = chosen
    try:
        yield
    finally:
        _family = before


def family() -> int:
    """Return the family of the present forward pass."""
    return _family


def implementations(launch: Launch) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return implementations of `pair_site` and `single_site` that run sites by `launch`, or do
    nothing if the launch is not in the family of the forward pass.
    """

    # They run while a graph is captured, not when it is replayed: what is left out costs nothing.
    # `arguments`: the buffers, then `branches`, which torch omits where it is the default.
    def pair_site(
        hidden: torch.Tensor, residual: torch.Tensor, *arguments: Any, group: int = WHOLE
    ) -> None:
        if group >= _family:
            buffers = Buffers(*arguments[:_BUFFERS])
            launch(hidden, residual, buffers, *arguments[_BUFFERS:])

    def single_site(stream: torch.Tensor, *buffers: torch.Tensor, group: int = WHOLE) -> None:
        if group >= _family:
            launch(None, stream, Buffers(*buffers))

    return pair_site, single_site


def _nothing(*_: Any, group: int = WHOLE) -> None:
    """Stand in for an op while tracing: no result, and no shape changes."""


def _launch_on_gpu(*arguments: Any) -> None:
    # imported at the first call, so that processes on a CPU do not need Triton
    from .triton_site import launch

    launch(*arguments)


_library = torch.library.Library("midstream", "FRAGMENT")
for _name, _schema in _SCHEMAS.items():
    # The kernels need contiguous tensors.
    _library.define(_name + _schema, tags=(torch.Tag.needs_exact_strides,))
    _library._register_fake(_name, _nothing)
for _device, _launch in (("CPU", reference.launch), ("CUDA", _launch_on_gpu)):
    for _name, _site in zip(_SCHEMAS, implementations(_launch), strict=True):
        _library.impl(_name, _site, _device)

pair_site = torch.ops.midstream.pair_site.default
single_site = torch.ops.midstream.single_site.default

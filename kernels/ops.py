"""Torch ops that the model's forward calls, with an implementation for each device.

The schemas declare every tensor that is written, so that no compiler drops or reorders a call.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from . import reference

#: Arguments after the stream and the ring. All are persistent buffers; the planner fills them
#: before the forward, except the last two, which the ops write.
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


def _in_its_families(site: Callable[..., None]) -> Callable[..., None]:
    def run(*arguments: Any, group: int = WHOLE) -> None:
        # This runs while a graph is captured, not when it is replayed: what is left out costs
        # nothing.
        if group >= _family:
            site(*arguments)

    return run


def _nothing(*_: Any, group: int = WHOLE) -> None:
    """Stand in for an op while tracing: no result, and no shape changes."""


# Triton is imported at the first call on a GPU, so that processes on a CPU do not need it.
def _on_gpu(name: str, *arguments: Any) -> None:
    from . import triton_site

    getattr(triton_site, name)(*arguments)


_library = torch.library.Library("midstream", "FRAGMENT")
for _name, _schema in _SCHEMAS.items():
    # The kernels need contiguous tensors.
    _library.define(_name + _schema, tags=(torch.Tag.needs_exact_strides,))
    _library.impl(_name, _in_its_families(getattr(reference, _name)), "CPU")
    _library.impl(_name, _in_its_families(partial(_on_gpu, _name)), "CUDA")
    _library._register_fake(_name, _nothing)

#: Signatures: `reference.pair_site` and `reference.single_site`.
pair_site = torch.ops.midstream.pair_site.default
single_site = torch.ops.midstream.single_site.default

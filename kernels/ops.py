"""Torch ops that the model's forward calls, with an implementation for each device.

The schemas declare every tensor that is written, so that no compiler drops or reorders a call.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import reference

#: Arguments after the stream and the ring. All are persistent buffers; the planner fills them
#: before the forward, except the last three, which the ops write.
_PLANNED = (
    "Tensor plan, Tensor lists, Tensor token_rows, Tensor capture_slots, Tensor "
    "site_rows, Tensor pool, Tensor scalars, "
    "Tensor(d!) broken, Tensor(e!) counts, Tensor(f!) sizes"
)
_SCHEMAS = {
    "pair_site": (
        f"(Tensor(a!) hidden, Tensor(b!) residual, Tensor(c!) ring, {_PLANNED}, int "
        "branches=0) -> ()"
    ),
    "single_site": f"(Tensor(a!) stream, Tensor(b!) ring, {_PLANNED}) -> ()",
}

_library = torch.library.Library("midstream", "FRAGMENT")
for _name, _schema in _SCHEMAS.items():
    # The kernels need contiguous tensors.
    _library.define(_name + _schema, tags=(torch.Tag.needs_exact_strides,))


#: Whether ops of this process do nothing. A graph that is captured while this is true contains no
#: launch of a site, whenever it is replayed.
_idle = False


@contextmanager
def idle_sites(idle: bool) -> Iterator[None]:
    """Disable the ops within the block if `idle`, else enable them.

    Apart from their tensors, the ops have no other state.
    """
    global _idle
    before, _idle = _idle, idle
    try:
        yield
    finally:
        _idle = before


def sites_idle() -> bool:
    """Return whether the ops are disabled now."""
    return _idle


def _unless_idle(site: Callable[..., None]) -> Callable[..., None]:
    def run(*arguments: Any) -> None:
        if not _idle:
            site(*arguments)

    return run


def _nothing(*_: Any) -> None:
    """Stand in for an op while tracing: no result, and no shape changes."""


# Triton is imported at the first call on a GPU, so that processes on a CPU do not need it.
def _pair_site_on_gpu(*arguments: Any) -> None:
    from .triton_site import pair_site

    pair_site(*arguments)


def _single_site_on_gpu(*arguments: Any) -> None:
    from .triton_site import single_site

    single_site(*arguments)


_library.impl("pair_site", _unless_idle(reference.pair_site), "CPU")
_library.impl("single_site", _unless_idle(reference.single_site), "CPU")
_library.impl("pair_site", _unless_idle(_pair_site_on_gpu), "CUDA")
_library.impl("single_site", _unless_idle(_single_site_on_gpu), "CUDA")
_library._register_fake("pair_site", _nothing)
_library._register_fake("single_site", _nothing)

#: Signatures: `reference.pair_site` and `reference.single_site`.
pair_site = torch.ops.midstream.pair_site.default
single_site = torch.ops.midstream.single_site.default

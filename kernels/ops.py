"""Torch ops called by the model's traced forward, and their implementation per device.

The schemas name every tensor that is written, so that no compiler drops or reorders a call.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import reference

#: What follows the stream and the ring. All are persistent; the planner fills them before the
#: forward, but for the last two.
_PLANNED = (
    "Tensor plan, Tensor lists, Tensor token_rows, Tensor capture_slots, Tensor "
    "site_rows, Tensor pool, Tensor scalars, "
    "Tensor(d!) broken, Tensor(e!) counts"
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
    # The kernels take rows that lie one after the other.
    _library.define(_name + _schema, tags=(torch.Tag.needs_exact_strides,))


#: Of this process: an op that runs does nothing. A graph that is captured meanwhile has no launch
#: of a site in it, however often and whenever it is replayed.
_idle = False


@contextmanager
def idle_sites(idle: bool) -> Iterator[None]:
    """Disable the ops within the block if `idle`; else they act by their tensors.

    This is the only state of the ops.
    """
    global _idle
    before, _idle = _idle, idle
    try:
        yield
    finally:
        _idle = before


def sites_idle() -> bool:
    """Return whether an op that ran now would do nothing."""
    return _idle


def _unless_idle(site: Callable[..., None]) -> Callable[..., None]:
    def run(*arguments: Any) -> None:
        if not _idle:
            site(*arguments)

    return run


def _nothing(*_: Any) -> None:
    """For tracing: no result, and no shape changes."""


# Triton is imported when a GPU first asks for it: processes on a CPU do without.
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

"""Host memory for rows and plans: all page-locked memory is allocated here, and an allocation that
fails raises HostMemoryError.
"""

import numpy as np
import torch

from .shared_memory import HostMemoryError


def locked_like(values: torch.Tensor) -> torch.Tensor:
    """Return uninitialised page-locked memory on the CPU, of the dtype and shape of `values`.

    Torch's allocator does not reuse it before the copies queued from it or into it are over.
    Raises HostMemoryError.
    """
    try:  # each step calls this, and a context would be two calls more
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    except (RuntimeError, MemoryError) as error:
        raise _none(values.numel() * values.itemsize, error) from error


def locked_copy(values: torch.Tensor) -> torch.Tensor:
    """Copy `values` from ordinary CPU memory into page-locked memory, see `locked_like`.

    Raises HostMemoryError.
    """
    try:  # each step calls this, and a context would be two calls more
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)
    except (RuntimeError, MemoryError) as error:
        raise _none(values.numel() * values.itemsize, error) from error


def lock(memory: np.ndarray) -> None:
    """Lock the pages of memory, uint8 `[size]`, for copies from an accelerator. Raises
    HostMemoryError.
    """
    register = torch.cuda.cudart().cudaHostRegister
    if code := int(register(memory.ctypes.data, len(memory), 0)):
        error = RuntimeError(f"cudaHostRegister: error {code}")
        raise _none(len(memory), error)


def on_device(values: torch.Tensor) -> torch.Tensor:
    """Return page-locked memory as a tensor of the accelerator, which writes through the bus."""
    return torch.ops._C.get_cuda_view_from_cpu_tensor(values)


def _none(size: int, error: BaseException) -> HostMemoryError:
    return HostMemoryError(
        f"cannot allocate {size} bytes of page-locked memory for captured rows and plans: {error}"
    )

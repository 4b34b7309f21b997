"""Host memory for rows and plans: all page-locked memory is allocated here, and an allocation that
fails raises HostMemoryError.
"""

import mmap
import weakref

import numpy as np
import torch

#: Bytes from which an allocation gets its own mapping. Smaller allocations may number in the
#: thousands, and the mappings of a process are limited. Huge pages are not requested: where memory
#: is short or fragmented, the kernel makes room for them while the model waits.
_LARGE = 4 << 20


class HostMemoryError(RuntimeError):
    """The machine has no memory left for rows, or cannot lock more of it."""


def locked_like(values: torch.Tensor) -> torch.Tensor:
    """Return uninitialised page-locked memory on the CPU, of the dtype and shape of `values`.

    Torch's allocator does not reuse it before the copies queued from it or into it are over.
    Raises HostMemoryError.
    """
    try:
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    except (RuntimeError, MemoryError) as error:
        raise _none(values.numel() * values.itemsize, "page-locked memory", error) from error


def locked_copy(values: torch.Tensor) -> torch.Tensor:
    """Copy `values` from ordinary CPU memory into page-locked memory, see `locked_like`.

    Raises HostMemoryError.
    """
    return locked_like(values).copy_(values)


def pages(size: int, *, locked: bool) -> torch.Tensor:
    """Return uninitialised memory, uint8 `[size]`. Raises HostMemoryError.

    `locked`: page-locked, for copies from an accelerator; the memory may be reused or dropped only
    when these are over. (Torch's own allocator would round large memory up to a power of two.)
    """
    if size < _LARGE:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=locked)
        except (RuntimeError, MemoryError) as error:
            raise _none(size, "page-locked memory" if locked else "memory", error) from error
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError) as error:
        raise _none(size, "memory", error) from error
    # The array is freed before its mapping; an mmap's finaliser would run after unmapping.
    array = np.frombuffer(memory, dtype=np.uint8)
    if locked:
        cuda = torch.cuda.cudart()
        if code := int(cuda.cudaHostRegister(array.ctypes.data, size, 0)):
            raise _none(size, "page-locked memory", RuntimeError(f"cudaHostRegister: error {code}"))
        weakref.finalize(array, cuda.cudaHostUnregister, array.ctypes.data).atexit = False
    return torch.from_numpy(array)


def _none(size: int, kind: str, error: BaseException) -> HostMemoryError:
    return HostMemoryError(
        f"cannot allocate {size} bytes of {kind} for captured rows and plans: {error}"
    )

"""Host memory for rows and plans: all that is page-locked is allocated here, and an allocation that
fails raises HostMemoryError.
"""

import mmap
import weakref

import numpy as np
import torch

#: Memory of at least this size is mapped on its own. Below it there may be thousands of pieces, and
#: a process has only that many mappings. Huge pages are not asked for: where memory is short or
#: fragmented, the kernel makes room for them while the model waits.
_LARGE = 4 << 20


class HostMemoryError(RuntimeError):
    """The machine has no memory left for rows, or locks no more of it."""


def locked_like(values: torch.Tensor) -> torch.Tensor:
    """Uninitialised page-locked memory on the CPU, of the dtype and shape of `values`.

    Raises HostMemoryError.

    From torch's allocator, which does not hand it out again before the copies queued from it or
    into it are over.
    """
    try:
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    except (RuntimeError, MemoryError) as error:
        raise _none(values.numel() * values.itemsize, "page-locked memory", error) from error


def locked_copy(values: torch.Tensor) -> torch.Tensor:
    """`values`, which are on the CPU, in page-locked memory, see `locked_like`.

    Raises HostMemoryError.
    """
    return locked_like(values).copy_(values)


def pages(size: int, *, locked: bool) -> torch.Tensor:
    """uint8 `[size]`, uninitialised. Raises HostMemoryError.

    `locked`: page-locked for copies from an accelerator. It may be used again, or dropped, only
    when those are over. (Torch's own allocator would round large memory up to a power of two.)
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

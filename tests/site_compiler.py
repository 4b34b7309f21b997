"""Compiles the Triton kernels for GPUs that are not here, through the launch itself. A program that prints JSON.

The object is architecture → how many compilations the launches led to, over dtypes, sizes and numbers of tokens: of pair
sites and of single ones.
"""

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from midstream.kernels import triton_site
from midstream.kernels.plan import Does, SitePlan

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (37, 576, 4096)
#: Triton tells 1 and multiples of 16 from other integers, if it is not told to leave it.
TOKENS = (1, 7, 16)


class Absent(DriverBase):
    """Names a GPU to compile for; nothing can run on it."""

    def __init__(self, architecture: int) -> None:
        super().__init__()
        self._target = GPUTarget("cuda", architecture, 32)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise RuntimeError("nothing runs here")

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        return None

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


class CompiledOnly:
    """Stands for the kernel: a launch compiles, nothing runs. Collects machine code by its hash."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.made: set[str] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            compiled = self._kernel.warmup(*arguments, grid=grid, **options)
            assert compiled.asm["cubin"]
            self.made.add(compiled.hash)

        return launch


def compilations(architecture: int, *, pair: bool) -> int:
    triton.runtime.driver.set_active(Absent(architecture))
    kernel = triton_site._site
    triton_site._site = recorder = CompiledOnly(kernel)
    try:
        for dtype in DTYPES:
            for width in WIDTHS:
                for tokens in TOKENS:
                    plan = SitePlan(width, [{"add": Does(torch.zeros(1, width))}] * tokens, {0: [1]}, before=[0])
                    planned = plan.build(tokens, dtype)
                    rows = [torch.zeros(tokens, width, dtype=dtype) for _ in range(3)]
                    if pair:
                        triton_site.pair_site(*rows, *planned)
                    else:
                        triton_site.single_site(*rows[1:], *planned)
    finally:
        triton_site._site = kernel
    return len(recorder.made)


if __name__ == "__main__":
    json.dump(
        {str(architecture): [compilations(architecture, pair=pair) for pair in (True, False)] for architecture in (80, 90)}, sys.stdout
    )

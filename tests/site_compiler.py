"""Compiles the Triton kernels for GPUs that are not here, through the launch itself.

A program that prints JSON.

The object is architecture → how many compilations the launches led to, over dtypes, sizes, numbers
of tokens and of sites: of pair sites, of pairs behind a branch, and of single ones.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

sys.path.append(str(Path(__file__).parent / "engine" / "triton_cpu"))

from midstream_triton_cpu.driver import CpuDriver
from site_plans import SitePlan, build_group

from midstream.kernels import triton_site
from midstream.kernels.ops import implementations
from midstream.kernels.plan import Does

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (37, 576, 4096)
#: Triton tells 1 and multiples of 16 from other integers, if it is not told to leave it.
TOKENS = (1, 7, 16)
KINDS = ("pair", "behind a branch", "single")


class Absent(CpuDriver):
    """Names a GPU to compile for; nothing can run on it."""

    def __init__(self, architecture: int) -> None:
        super().__init__()
        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target


class CompiledOnly:
    """Stands for the kernel: a launch compiles, nothing runs. Collects machine code by its hash."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.made: set[str] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            compiled = self._kernel.warmup(*arguments, grid=grid, **options)
            assert compiled.asm["cubin"]
            assert (
                compiled.metadata.target.arch
                == triton.runtime.driver.active.get_current_target().arch
            )
            self.made.add(compiled.hash)

        return launch


def compilations(architecture: int, kind: str) -> int:
    """`kind`: one of KINDS."""
    triton.runtime.driver.set_active(Absent(architecture))
    pair_site, single_site = implementations(triton_site.launch)
    kernel = triton_site._sites
    kernel.device_caches.clear()  # it remembers for which architecture it compiled on device 0
    triton_site._sites = recorder = CompiledOnly(kernel)
    try:
        for dtype in DTYPES:
            for width in WIDTHS:
                for sites, tokens in enumerate(TOKENS, 1):
                    plan = SitePlan(
                        width, [{"add": Does(torch.zeros(1, width))}] * tokens, {0: [1]}, before=[0]
                    )
                    planned = build_group([plan] * sites, tokens, dtype)
                    rows = [torch.zeros(tokens, width, dtype=dtype) for _ in range(3)]
                    if kind == "single":
                        single_site(*rows[1:], *planned)
                    else:
                        pair_site(*rows, *planned, int(kind == "behind a branch"))
    finally:
        triton_site._sites = kernel
    return len(recorder.made)


if __name__ == "__main__":
    json.dump(
        {
            str(architecture): [compilations(architecture, kind) for kind in KINDS]
            for architecture in (80, 90)
        },
        sys.stdout,
    )

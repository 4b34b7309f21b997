"""What the Triton kernel is on paper: registers, spills, width of loads and the idle path, compiled
for GPUs that are not here.

    python tools/kernel_paper.py [--architecture 90] [--widths 8192 …] [--json]

Needs torch, triton and the disassembler that comes with triton; no GPU. Prints a table of each
variant that a model can need, then the estimated cost of a step from `tools/pages/kernel_costs.py`.
`tests/unit/kernels/test_site_paper.py` keeps the facts as they are.
"""

# ruff: noqa: E402 -- the environment and where our modules are are settled first

import os

os.environ["TRITON_INTERPRET"] = "0"

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools" / "pages")]

import torch
import triton
from kernel_costs import table
from site_compiler import KINDS, Absent
from site_plans import SitePlan

from midstream.kernels import triton_site
from midstream.kernels.ops import implementations

#: Llama-3.1-8B and Llama-3.3-70B; a width that is no power of two.
WIDTHS = (4096, 8192, 576)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
#: A load or store in PTX: how many values, of how many bits.
_ACCESS = re.compile(r"\b(?:ld|st)\.global(?:\.[a-z_:0-9]+?)*?(?:\.v([248]))?\.b(16|32|64)\b")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+((?:@!?U?P\d+ )?)([A-Z0-9_.]+)", re.MULTILINE)


@dataclass(frozen=True)
class Facts:
    """Of one compilation."""

    architecture: int
    kind: str  # one of `site_compiler.KINDS`
    dtype: str
    width: int
    registers: int  # of a thread
    spilled: int  # bytes of a thread's stack
    warps: int  # of a program
    # programs that a multiprocessor holds at once, as far as registers and threads limit them
    rows_per_sm: int
    instructions: int
    idle_instructions: int  # up to the first exit: all that runs where there is nothing to do
    idle_loads: int
    wide: int  # 16-byte loads and stores
    narrow: int  # loads and stores of rows that are narrower; the numbers of the plan are not rows
    reductions: int  # counted rows: additions that nothing waits for
    row_reductions: int  # places in the source at which all threads of a row wait for one another


class _Compiled:
    """Stands for the kernel: a launch compiles, nothing runs."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.last = None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            self.last = self._kernel.warmup(*arguments, grid=grid, **options)

        return launch


def compiled(architecture: int, kind: str, dtype: torch.dtype, width: int) -> Any:
    """Triton's result for the launch that `kernels.ops` would make."""
    triton.runtime.driver.set_active(Absent(architecture))
    pair_site, single_site = implementations(triton_site.launch)
    kernel = triton_site._sites
    kernel.device_caches.clear()  # it remembers for which architecture it compiled on device 0
    triton_site._sites = recorder = _Compiled(kernel)
    try:
        rows = [torch.zeros(16, width, dtype=dtype) for _ in range(3)]
        planned = SitePlan(width, [{}], {0: [1]}).build(16, dtype)
        if kind == "single":
            single_site(*rows[1:], *planned)
        else:
            pair_site(*rows, *planned, int(kind == "behind a branch"))
    finally:
        triton_site._sites = kernel
    return recorder.last


def facts(architecture: int, kind: str, dtype: torch.dtype, width: int) -> Facts:
    made = compiled(architecture, kind, dtype, width)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(made.asm["cubin"])
        cubin.flush()
        usage, sass = (_disassembled(option, cubin.name) for option in ("-res-usage", "-sass"))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    registers, spilled = map(int, found.groups())
    warps = made.metadata.num_warps
    names = [name for _, name in _INSTRUCTION.findall(sass)]
    idle = names[: next(number for number, name in enumerate(names) if name == "EXIT") + 1]
    sizes = [int(count or 1) * int(bits) // 8 for count, bits in _ACCESS.findall(made.asm["ptx"])]
    return Facts(
        architecture=architecture,
        kind=kind,
        dtype=str(dtype).removeprefix("torch."),
        width=width,
        registers=registers,
        spilled=spilled,
        warps=warps,
        rows_per_sm=min(65536 // (-(-registers // 8) * 8 * 32 * warps), 2048 // (32 * warps)),
        instructions=len(names),
        idle_instructions=len(idle),
        idle_loads=sum(name.startswith("LDG") for name in idle),
        wide=sum(size == 16 for size in sizes),
        narrow=sum(size not in (4, 16) for size in sizes),
        reductions=sum(name.startswith("RED") and "GPU" in name for name in names),
        row_reductions=made.asm["ttir"].count('"tt.reduce"'),
    )


def _disassembled(option: str, path: str) -> str:
    return subprocess.run(
        [str(_DISASSEMBLER), option, path], capture_output=True, text=True, check=True
    ).stdout


def all_facts(architecture: int, widths: Sequence[int] = WIDTHS) -> list[Facts]:
    return [
        facts(architecture, kind, dtype, width)
        for kind in KINDS
        for dtype in DTYPES
        for width in widths
    ]


def rendered(found: list[Facts]) -> str:
    """As Markdown."""
    lines = [
        "| sites | dtype | width | registers | spilled | rows per SM | instructions | "
        "idle: instructions, loads "
        "| 16-byte accesses, others |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each.kind} | {each.dtype} | {each.width} | {each.registers} | "
        f"{each.spilled} B | {each.rows_per_sm} | {each.instructions:,} "
        f"| {each.idle_instructions}, {each.idle_loads} | {each.wide}, {each.narrow} |"
        for each in found
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--architecture", type=int, default=90)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = all_facts(options.architecture, options.widths)
    if options.json:
        json.dump([asdict(each) for each in found], sys.stdout)
        return
    print(
        f"triton {triton.__version__}, sm_{options.architecture}\n\n{rendered(found)}\n\n{table()}"
    )


if __name__ == "__main__":
    main()

"""Are the Triton kernels right on this GPU, also inside a CUDA graph, and how near do they come to the speed of a copy?

    python benchmarks/gpu/kernels.py [--checks-only] [--programs N]

Needs a GPU, torch and triton, and of Midstream this checkout alone. Prints a table and one JSON line; ends with an error if a
check fails. Times are those of launches inside a replayed graph, so the host has no part in them.
"""

# ruff: noqa: E402 -- where our modules are is settled first

import argparse
import json
import secrets
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
try:
    import midstream  # noqa: F401
except ImportError:  # not installed: the checkout is the package, whatever its folder is called
    _links = tempfile.TemporaryDirectory(prefix="midstream-")
    (Path(_links.name) / "midstream").symlink_to(ROOT)
    sys.path.insert(0, _links.name)

import torch
import triton
from site_kit import DTYPES, EXACT, Case, Op, check, random_case, run, same_bits
from site_properties import PROPERTIES

from midstream.kernels import pair_site, reference, single_site, triton_site
from midstream.kernels.plan import COLUMNS, NO_SLOT, ROWS_PER_TOKEN, Does, Planned, SitePlan, lowrank
from midstream.schemas.interventions import PLACE, SCALARS

HIDDEN = 4096
TOKENS = (1, 64, 8192)
DTYPE = torch.bfloat16
#: Launches in one timed graph, and replays of which the median is taken.
LAUNCHES, REPLAYS = 20, 15
#: Sites of a 32-layer model with all six hooks.
SITES = 192
#: Elements beyond which a 32-bit offset would overflow.
FAR = 2**31


# -- checks --------------------------------------------------------------------------------------------------------------


def there_and_back(op: Op) -> Op:
    """`op` on the GPU, for tensors on the CPU."""

    def call(*tensors: torch.Tensor) -> None:
        on_gpu = [tensor.cuda() for tensor in tensors]
        op(*on_gpu)
        for host, device in zip(tensors, on_gpu, strict=True):
            host.copy_(device)

    return call


def check_properties() -> int:
    """Every sentence that the tests hold the implementations to."""
    on_gpu = there_and_back(pair_site), there_and_back(single_site)
    for sentence, property_ in PROPERTIES.items():
        property_(*on_gpu)
        print(f"  {sentence.replace('_', ' ')}")
    return len(PROPERTIES)


def compare(case: Case, pair: Op, single: Op) -> None:
    """Of families that sum over the row, with the truth; else with the reference, bit for bit."""
    found = run(case, pair, single)
    if not {name for configuration in case.plan.configurations for name in configuration} <= set(EXACT):
        check(case, found)
        return
    expected = run(case, reference.pair_site, reference.single_site)
    assert same_bits(found.stream, expected.stream), f"{case.name}: stream"
    assert same_bits(found.ring, expected.ring), f"{case.name}: ring"
    assert found.hidden is None or same_bits(found.hidden, expected.hidden), f"{case.name}: hidden"


def check_against_reference() -> int:
    """In all dtypes and odd sizes, more tokens than programs among them."""
    shapes = [(1, 1), (37, 7), (576, 130), (4096, 33), (5120, 9), (8192, 5), (64, 2 * triton_site.MAX_PROGRAMS + 3)]
    cases = 0
    for dtype in DTYPES:
        for width, tokens in shapes:
            for pair in (True, False):
                for families in (EXACT, EXACT, tuple(PLACE)):
                    case = random_case(secrets.randbits(32), dtype=dtype, width=width, tokens=tokens, pair=pair, families=families)
                    compare(case, there_and_back(pair_site), there_and_back(single_site))
                    cases += 1
    return cases


class GraphOfOneSite:
    """One op captured in a CUDA graph over persistent buffers; `pair` and `single` load a case, replay, and read back."""

    CAPACITY, CONFIGURATIONS, ENTRIES, RING = 64, 8, 128, 160

    def __init__(self, dtype: torch.dtype, width: int, tokens: int, *, pair: bool) -> None:
        def zeros(*shape: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=kind, device="cuda")

        self.planned = Planned(
            zeros(COLUMNS),
            zeros(1),
            zeros(self.CAPACITY, ROWS_PER_TOKEN),
            zeros(2, self.CAPACITY),
            zeros(len(PLACE), 1 + self.CONFIGURATIONS),
            zeros(1 + self.ENTRIES, width, kind=dtype),
            zeros(1 + self.ENTRIES, SCALARS, kind=torch.float32),
            zeros(self.CAPACITY),
        )
        self.written = [zeros(tokens, width, kind=dtype) for _ in range(1 + pair)] + [zeros(self.RING, width, kind=dtype)]
        op = pair_site if pair else single_site
        op(*self.written, *self.planned)  # compiles, before the capture
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            op(*self.written, *self.planned)

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Stands for the op, for a case on the CPU that fits."""
        written, planned = tensors[: len(self.written)], Planned(*tensors[len(self.written) :])
        for buffer, values in zip(self.written, written, strict=True):
            buffer[: len(values)] = values.cuda()
        self.planned.plan.copy_(planned.plan)
        self.planned.capture_slots.fill_(NO_SLOT)
        for name in ("token_rows", "capture_slots", "site_rows", "pool", "scalars"):
            values = getattr(planned, name)
            getattr(self.planned, name)[: values.shape[0], : values.shape[1]] = values.cuda()
        self.planned.broken.zero_()
        self._graph.replay()
        planned.broken.copy_(self.planned.broken[: len(planned.broken)])
        for buffer, values in zip(self.written, written, strict=True):
            values.copy_(buffer[: len(values)])


def check_graphs() -> int:
    """A captured launch obeys the buffers as they are when it is replayed."""
    replays = 0
    for dtype in DTYPES:
        for width, tokens in ((37, 7), (4096, 33)):
            for pair in (True, False):
                graph = GraphOfOneSite(dtype, width, tokens, pair=pair)
                for turn in range(12):
                    families = tuple(PLACE) if turn % 2 else EXACT
                    case = random_case(secrets.randbits(32), dtype=dtype, width=width, tokens=tokens, pair=pair, families=families)
                    if turn % 4 == 3:
                        case = Case(SitePlan(width), case.hidden, case.stream, case.ring_rows, case.capacity, f"{case.name}, idle")
                    compare(case, graph, graph)
                    replays += 1
    return replays


def check_far_offsets() -> bool:
    """The last rows of tensors with more than 2^31 elements. False where the GPU's memory does not hold them."""
    tokens = FAR // HIDDEN + 3
    if torch.cuda.mem_get_info()[0] < 3 * tokens * HIDDEN * DTYPE.itemsize:
        return False
    last = tokens - 1
    vector = torch.ones(1, HIDDEN)
    plan = SitePlan(HIDDEN, [{"add": Does(vector)}], {last: [1]}, [last], [last - 1, last], before_row=last, after_row=last - 2)
    stream = torch.zeros(tokens, HIDDEN, dtype=DTYPE, device="cuda")
    ring = torch.zeros(tokens, HIDDEN, dtype=DTYPE, device="cuda")
    stream[last], stream[last - 1] = 2.0, 5.0
    single_site(stream, ring, *plan.build(tokens, DTYPE, "cuda"))
    assert stream[last].eq(3).all(), "the edit of the last token is not there"
    assert ring[last].eq(2).all(), "the capture before the edit is not in the last ring row"
    assert ring[last - 2].eq(5).all(), "the capture after the edits is not where it should be"
    assert ring[last - 1].eq(3).all(), "the capture after the edits is not where it should be"
    assert not ring[: last - 2].any(), "a ring row that nothing names was written"
    return True


# -- times ---------------------------------------------------------------------------------------------------------------


def seconds(work: Callable[[], Any], launches: int = LAUNCHES) -> float:
    """Median time of one `work`, from graphs that hold `launches` of them."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            work()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / launches)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy far larger than the caches."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), 5)


def to_all(**does: Does) -> Callable[[int], SitePlan]:
    """Every token has the one configuration."""
    return lambda tokens: SitePlan(HIDDEN, [does], {token: [1] for token in range(tokens)})


def low_rank(rank: int) -> Does:
    rotation, weight = torch.randn(2, rank, HIDDEN) / HIDDEN**0.5
    return lowrank(0.01, rotation, weight, torch.zeros(rank))


ONES = torch.ones(1, HIDDEN)
#: What a site does in a timed step → a plan for so many tokens, and the rows that must cross the memory for one token:
#: of a pair, of a single tensor. The vectors are few and stay in the cache.
STEPS: dict[str, tuple[Callable[[int], SitePlan], int, int]] = {
    "idle": (lambda tokens: SitePlan(HIDDEN), 0, 0),
    "capture all": (lambda tokens: SitePlan(HIDDEN, before=range(tokens)), 3, 2),
    "add": (to_all(add=Does(torch.zeros(1, HIDDEN))), 2, 2),
    "replace": (to_all(replace=Does(ONES, (1.0,))), 4, 2),
    "replace_masked": (to_all(replace_masked=Does(torch.cat([ONES, ONES]), (1.0,))), 4, 2),
    "lowrank 4": (to_all(lowrank=low_rank(4)), 4, 2),
    "lowrank 64": (to_all(lowrank=low_rank(64)), 4, 2),
    "add_matched": (to_all(add_matched=Does(ONES, (1e-6,))), 4, 2),
    "ablate": (to_all(ablate=Does(ONES, (1.0,))), 4, 2),
    "clamp": (to_all(clamp=Does(ONES, (1e-6, 2.0, 3.0))), 4, 2),  # never arrives
}


def time_sites(bandwidth: float) -> list[dict[str, Any]]:
    results = []
    for pair in (True, False):
        for tokens in TOKENS:
            written = [torch.zeros(tokens, HIDDEN, dtype=DTYPE, device="cuda") for _ in range(2 + pair)]
            for step, (plan, *rows) in STEPS.items():
                planned = plan(tokens).build(tokens, DTYPE, "cuda")
                op, arguments = pair_site if pair else single_site, (*written, *planned)
                took = seconds(lambda op=op, arguments=arguments: op(*arguments))  # type: ignore[misc]
                moved = rows[not pair] * tokens * HIDDEN * DTYPE.itemsize
                results.append(
                    {
                        "site": "pair" if pair else "single",
                        "tokens": tokens,
                        "step": step,
                        "us": round(took * 1e6, 2),
                        "gb_per_s": round(moved / took / 1e9, 1),
                        "of_copy": round(moved / took / bandwidth, 3),
                    }
                )
    return results


def time_idle_sites() -> dict[int, float]:
    """Microseconds that all the sites of a large model add to one step in which nobody asks for anything: tokens → µs."""
    found = {}
    for tokens in TOKENS:
        written = [torch.zeros(tokens, HIDDEN, dtype=DTYPE, device="cuda") for _ in range(3)]
        planned = SitePlan(HIDDEN).build(tokens, DTYPE, "cuda")
        found[tokens] = round(SITES * 1e6 * seconds(lambda written=written, planned=planned: pair_site(*written, *planned), SITES), 1)  # type: ignore[misc]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks-only", action="store_true")
    parser.add_argument("--programs", type=int, default=triton_site.MAX_PROGRAMS, help="programs of a launch at most")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here")
    triton_site.MAX_PROGRAMS = options.programs
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, "programs": options.programs}
    print("  ".join(f"{name} {value}" for name, value in machine.items()))

    print("checks")
    checks: dict[str, int | bool] = {
        "properties": check_properties(),
        "random_steps": check_against_reference(),
        "graph_replays": check_graphs(),
        "far_offsets": check_far_offsets(),
    }
    print("  " + "  ".join(f"{name} {value}" for name, value in checks.items()))
    result: dict[str, Any] = {"machine": machine, "checks": checks}

    if not options.checks_only:
        bandwidth = copy_bandwidth()
        print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s")
        result["copy_gb_per_s"] = round(bandwidth / 1e9, 1)
        result["sites"] = time_sites(bandwidth)
        print(f"  {'site':8}{'tokens':>7}  {'step':14}{'µs':>9}{'GB/s':>9}{'of copy':>9}")
        for row in result["sites"]:
            print(f"  {row['site']:8}{row['tokens']:>7}  {row['step']:14}{row['us']:>9}{row['gb_per_s']:>9}{row['of_copy']:>9}")
        result["idle_sites_us"] = time_idle_sites()
        print(
            f"  {SITES} idle sites in one step: "
            + ", ".join(f"{us} µs at {tokens} tokens" for tokens, us in result["idle_sites_us"].items())
        )
    print(json.dumps({"benchmark": "gpu_kernels", "hidden": HIDDEN, "dtype": str(DTYPE), "result": result}))


if __name__ == "__main__":
    main()

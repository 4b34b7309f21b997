"""The Triton kernels on this GPU: right, also inside a CUDA graph, and as fast as a copy?

Checks every family, dtype and width against the reference, then times launches inside a replayed
graph, so that the host has no part in them. With `--device cpu` Triton interprets the kernels, and
the times say nothing.
"""

# ruff: noqa: E402 -- where our modules are is settled first, and whether Triton interprets

import os
import random
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import kit

ASKED = kit.options(__doc__)
if not ASKED.gpu:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from site_groups import KINDS, check_groups, check_groups_against
from site_kit import DTYPES, EXACT, RANDOM, Case, Op, check, random_case, run, same_bits
from site_plans import OpInputs, SitePlan
from site_properties import PROPERTIES

from midstream.kernels import reference, triton_site
from midstream.kernels.ops import implementations
from midstream.kernels.plan import NO_SLOT, Does, lowrank

if not ASKED.gpu:
    from site_rounding import round_as_gpus_do

    round_as_gpus_do()

#: What the stage launches: not the ops of `midstream.kernels`, which on the CPU are the reference.
pair_site, single_site = implementations(triton_site.launch)
REFERENCE = implementations(reference.launch)
DEVICE = "cuda" if ASKED.gpu else "cpu"
HIDDEN = 4096
TOKENS = (1, 64, 2048)
DTYPE = torch.bfloat16
#: (width, tokens) of the random sites, more tokens than programs among them.
SHAPES = [
    (1, 1),
    (37, 7),
    (576, 130),
    (4096, 33),
    (5120, 9),
    (8192, 5),
    (64, 2 * triton_site.MAX_PROGRAMS + 3),
]
if ASKED.tiny:
    SHAPES = [(37, 3)]
    HIDDEN = 64
    TOKENS = (1, 2)
#: Launches in one timed graph, and replays of which the median is taken.
LAUNCHES, REPLAYS = (1, 1) if ASKED.tiny else (20, 15)
#: Width and tokens of the ops that are captured in graphs.
GRAPH_SHAPES = [(37, 7)] if ASKED.tiny else [(37, 7), (4096, 33)]
#: Seconds that all after the random sites takes.
SPARE_S = 45
#: Elements beyond which a 32-bit offset would overflow.
FAR = 2**31


# -- checks
# --------------------------------------------------------------------------------------------------


def there_and_back(op: Op) -> Op:
    """`op` on the GPU, for tensors on the CPU."""

    def call(*given: torch.Tensor | int) -> None:
        on_gpu = [
            each.to(DEVICE, copy=True) if isinstance(each, torch.Tensor) else each for each in given
        ]
        op(*on_gpu)
        for host, device in zip(given, on_gpu, strict=True):
            if isinstance(host, torch.Tensor):
                host.copy_(device)

    return call


def check_properties() -> int:
    """Every sentence that the tests hold the implementations to."""
    on_gpu = there_and_back(pair_site), there_and_back(single_site)
    done = 0
    for sentence, property_ in [*PROPERTIES.items()][: 3 if ASKED.tiny else None]:
        if ASKED.left < 0:
            break
        property_(*on_gpu)
        print(f"  {sentence.replace('_', ' ')}")
        done += 1
    return done


def compare(case: Case, pair: Op, single: Op) -> None:
    """Of families that sum over the row, with the truth; else with the reference, bit for bit."""
    found = run(case, pair, single)
    if not {name for configuration in case.plan.configurations for name in configuration} <= set(
        EXACT
    ):
        check(case, found)
        return
    expected = run(case, *REFERENCE)
    assert same_bits(found.stream, expected.stream), f"{case.name}: stream"
    assert same_bits(found.ring, expected.ring), f"{case.name}: ring"
    assert found.hidden is None or same_bits(found.hidden, expected.hidden), f"{case.name}: hidden"


def check_against_reference(shapes: Sequence[tuple[int, int]], spare_s: float = 0) -> int:
    """Every family alone, those without sums together, and all, in all dtypes. How many; no shape
    is begun with less than so many seconds left.
    """
    cases = 0
    for width, tokens in shapes:
        if cases and ASKED.left < spare_s:
            break
        for dtype in DTYPES:
            for pair in (True, False):
                for families in (
                    EXACT,
                    tuple(RANDOM),
                    *((name,) for name in RANDOM if tokens < triton_site.MAX_PROGRAMS),
                ):
                    case = random_case(
                        secrets.randbits(32),
                        dtype=dtype,
                        width=width,
                        tokens=tokens,
                        pair=pair,
                        families=families,
                    )
                    compare(case, there_and_back(pair_site), there_and_back(single_site))
                    cases += 1
    return cases


def check_shared_launches() -> int:
    """Sites that share a launch give the bits of one launch each, and of the reference where
    nothing is summed.
    """
    on_gpu = there_and_back(pair_site), there_and_back(single_site)
    widths, rounds = ((37,), 1) if ASKED.tiny else ((1, 37, 576, 8192), 20)
    check_groups(*on_gpu, rounds=rounds, widths=widths)
    check_groups_against(*on_gpu, REFERENCE, rounds=rounds, width=37)
    return rounds * len(KINDS) * len(DTYPES) * (len(widths) + 1)


class GraphOfOneSite:
    """One op captured in a CUDA graph over persistent buffers, replayed for a case on the CPU that
    fits: it stands for the op.

    A CPU has no graphs: there the op is called again.
    """

    def __init__(self, dtype: torch.dtype, width: int, tokens: int, *, pair: bool) -> None:
        everything = {name: draw(random.Random(0), width) for name, draw in RANDOM.items()}
        # the largest of those that are drawn
        everything["lowrank"] = lowrank(1.0, *torch.randn(2, 5, width), torch.zeros(5))
        largest = SitePlan(width, [everything] * 6).build(tokens + 8, dtype, DEVICE)
        self._planned = OpInputs(*map(torch.zeros_like, largest))
        self._written = [
            torch.zeros(tokens, width, dtype=dtype, device=DEVICE) for _ in range(2 if pair else 1)
        ]
        self._written.append(torch.zeros(4 * tokens + 16, width, dtype=dtype, device=DEVICE))
        op = pair_site if pair else single_site
        self._replay = captured(lambda: op(*self._written, *self._planned), 1)

    def __call__(self, *tensors: torch.Tensor) -> None:
        written = tensors[: len(self._written)]
        planned = OpInputs(*tensors[len(self._written) :])
        for buffer, values in zip(self._written, written, strict=True):
            buffer[: len(values)] = values.to(DEVICE)
        for name, buffer, values in zip(OpInputs._fields, self._planned, planned, strict=True):
            if name != "lists":  # the kernels read none
                buffer.fill_(NO_SLOT if name == "capture_slots" else 0)
                buffer[tuple(map(slice, values.shape))] = values.to(DEVICE)
        self._replay()
        for name, buffer, values in zip(OpInputs._fields, self._planned, planned, strict=True):
            if name in ("counts", "sizes"):
                values.copy_(buffer[tuple(map(slice, values.shape))])
        for buffer, values in zip(self._written, written, strict=True):
            values.copy_(buffer[: len(values)])


def captured(work: Callable[[], Any], times: int) -> Callable[[], Any]:
    """Replays a graph that holds `work` so many times."""
    if not ASKED.gpu:
        return lambda: [work() for _ in range(times)]
    for _ in range(3):
        work()  # compiles, before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            work()
    return graph.replay


def check_graphs() -> int:
    """A captured launch obeys the buffers as they are when it is replayed."""
    replays = 0
    for dtype in DTYPES:
        for width, tokens in GRAPH_SHAPES:
            for pair in (True, False):
                graph = GraphOfOneSite(dtype, width, tokens, pair=pair)
                for turn in range(4 if ASKED.tiny else 12):
                    families = tuple(RANDOM) if turn % 2 else EXACT
                    case = random_case(
                        secrets.randbits(32),
                        dtype=dtype,
                        width=width,
                        tokens=tokens,
                        pair=pair,
                        families=families,
                    )
                    if turn % 4 == 3:
                        case = Case(
                            SitePlan(width),
                            case.hidden,
                            case.stream,
                            case.ring_rows,
                            case.capacity,
                            f"{case.name}, idle",
                        )
                    compare(case, graph, graph)
                    replays += 1
    return replays


def check_far_offsets() -> bool:
    """The last rows of tensors with more than 2^31 elements.

    False where the GPU's memory does not hold them.
    """
    tokens = FAR // HIDDEN + 3
    if not ASKED.gpu or torch.cuda.mem_get_info()[0] < 3 * tokens * HIDDEN * DTYPE.itemsize:
        return False
    last = tokens - 1
    vector = torch.ones(1, HIDDEN)
    plan = SitePlan(
        HIDDEN,
        [{"add": Does(vector)}],
        {last: [1]},
        [last],
        [last - 1, last],
        before_row=last,
        after_row=last - 2,
    )
    stream = torch.zeros(tokens, HIDDEN, dtype=DTYPE, device=DEVICE)
    ring = torch.zeros(tokens, HIDDEN, dtype=DTYPE, device=DEVICE)
    stream[last] = 2.0
    stream[last - 1] = 5.0
    single_site(stream, ring, *plan.build(tokens, DTYPE, DEVICE))
    assert stream[last].eq(3).all(), "the edit of the last token is not there"
    assert ring[last].eq(2).all(), "the capture before the edit is not in the last ring row"
    assert ring[last - 2].eq(5).all(), "the capture after the edits is not where it should be"
    assert ring[last - 1].eq(3).all(), "the capture after the edits is not where it should be"
    assert not ring[: last - 2].any(), "a ring row that nothing names was written"
    return True


# -- times
# --------------------------------------------------------------------------------------------------


def seconds(work: Callable[[], Any], launches: int = LAUNCHES) -> float:
    """Median time of one `work`, from graphs that hold `launches` of them."""
    replay = captured(work, launches)
    replay()
    return statistics.median(timed(replay) for _ in range(REPLAYS)) / launches


def timed(replay: Callable[[], Any]) -> float:
    """Seconds of one replay, on the device."""
    if not ASKED.gpu:
        began = time.perf_counter()
        replay()
        return time.perf_counter() - began
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy far larger than the caches."""
    source = torch.empty(2**20 if ASKED.tiny else 2**30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), 5)


def to_all(**does: Does) -> Callable[[int], SitePlan]:
    """Every token has the one configuration."""
    return lambda tokens: SitePlan(HIDDEN, [does], {token: [1] for token in range(tokens)})


def low_rank(rank: int) -> Does:
    rotation, weight = torch.randn(2, rank, HIDDEN) / HIDDEN**0.5
    return lowrank(0.01, rotation, weight, torch.zeros(rank))


ONES = torch.ones(1, HIDDEN)
#: What a site does in a timed step → a plan for so many tokens, and the rows that must cross the
#: memory for one token: of a pair, of a single tensor. The vectors are few and stay in the cache.
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
    # likewise
    "feature": (
        to_all(
            feature=Does(
                torch.cat([ONES, torch.zeros(2, HIDDEN), ONES]), (1e-6, 1e3, 0.0, 0.0, 0.0)
            )
        ),
        4,
        2,
    ),
}


def time_sites(bandwidth: float) -> list[dict[str, Any]]:
    results = []
    for pair in (True, False):
        for tokens in TOKENS:
            written = [
                torch.zeros(tokens, HIDDEN, dtype=DTYPE, device=DEVICE) for _ in range(2 + pair)
            ]
            for step, (plan, *rows) in STEPS.items():
                planned = plan(tokens).build(tokens, DTYPE, DEVICE)
                op = pair_site if pair else single_site
                arguments = (*written, *planned)
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


def compile_ahead() -> None:
    """Fills Triton's cache from several processes, one for each width: the checks then compile
    nothing. What fails there is compiled here.
    """
    major, minor = torch.cuda.get_device_capability()
    program = [sys.executable, str(kit.ROOT / "tools" / "kernel_paper.py"), "--json"]
    program += ["--architecture", str(10 * major + minor), "--widths"]
    compiling = [
        subprocess.Popen(
            [*program, str(width)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for width in sorted({width for width, _ in SHAPES} | {HIDDEN})
    ]
    for process in compiling:
        process.wait()


def main() -> None:
    if ASKED.gpu:
        compile_ahead()
    result: dict[str, Any] = {"figures": {}, "tables": [], "notes": []}

    def keep(note: str, **figures: Any) -> None:
        result["notes"].append(note)
        result["figures"] |= {
            name: value if isinstance(value, dict) else {"value": value}
            for name, value in figures.items()
        }
        kit.so_far(ASKED, result)

    cases = check_against_reference(SHAPES, SPARE_S)
    keep(f"{cases} random sites as the reference", cases=cases)
    cases += check_shared_launches()
    keep("sites that share a launch", cases=cases)
    replays = check_graphs()
    keep(f"{replays} replays as the reference", graph_replays=replays)
    keep(f"far offsets: {'checked' if check_far_offsets() else 'no memory for them'}")
    bandwidth = copy_bandwidth()
    keep(f"a device copy of 1 GiB moves {bandwidth / 1e9:.0f} GB/s, read and written")
    rows = time_sites(bandwidth)
    columns = ["site", "tokens", "step", "us", "gb_per_s", "of_copy"]
    result["tables"].append(
        {
            "title": f"Sites of {HIDDEN} × bf16",
            "columns": columns,
            "rows": [[row[name] for name in columns] for row in rows],
        }
    )
    of_pairs = {
        f"{name}_{row['tokens']}": row["of_copy"] * 100
        for step, name in (("capture all", "gather"), ("add", "steer"))
        for row in rows
        if row["site"] == "pair" and row["step"] == step
    }
    keep("rates of one launch", **of_pairs)
    keep(f"{check_properties()} of {len(PROPERTIES)} properties")
    kit.finish(ASKED, result)


if __name__ == "__main__":
    main()

"""The Triton kernels on this GPU: right, also inside a CUDA graph, and as fast as a copy?

Checks every family, dtype and width against the reference, then times launches inside a replayed
graph, so that the host has no part in them. With `--device cpu` Triton interprets the kernels, and
the times say nothing.
"""

# ruff: noqa: E402 -- where our modules are is settled first, and whether Triton interprets

import os
import random
import secrets
import shutil
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
from site_properties import PROPERTIES

from midstream.kernels import reference, triton_site
from midstream.kernels.plan import NO_SLOT, Does, Planned, SitePlan, lowrank

#: What the stage launches: not the ops of `midstream.kernels`, which on the CPU are the reference.
pair_site, single_site = triton_site.pair_site, triton_site.single_site
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
    HIDDEN, TOKENS = 64, (1, 2)
#: Launches in one timed graph, and replays of which the median is taken.
LAUNCHES, REPLAYS = (1, 1) if ASKED.tiny else (20, 15)
#: Sites of a 32-layer model with all six hooks.
SITES = 2 if ASKED.tiny else 192
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
    chosen = [*PROPERTIES.items()][: 3 if ASKED.tiny else None]
    for sentence, property_ in chosen:
        property_(*on_gpu)
        print(f"  {sentence.replace('_', ' ')}")
    return len(chosen)


def compare(case: Case, pair: Op, single: Op) -> None:
    """Of families that sum over the row, with the truth; else with the reference, bit for bit."""
    found = run(case, pair, single)
    if not {name for configuration in case.plan.configurations for name in configuration} <= set(
        EXACT
    ):
        check(case, found)
        return
    expected = run(case, reference.pair_site, reference.single_site)
    assert same_bits(found.stream, expected.stream), f"{case.name}: stream"
    assert same_bits(found.ring, expected.ring), f"{case.name}: ring"
    assert found.hidden is None or same_bits(found.hidden, expected.hidden), f"{case.name}: hidden"


def check_against_reference(shapes: Sequence[tuple[int, int]]) -> int:
    """Every family alone, those without sums together, and all, in all dtypes."""
    cases = 0
    for dtype in DTYPES:
        for width, tokens in shapes:
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
    check_groups_against(
        *on_gpu, (reference.pair_site, reference.single_site), rounds=rounds, width=37
    )
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
        self._planned = Planned(*map(torch.zeros_like, largest))
        self._written = [
            torch.zeros(tokens, width, dtype=dtype, device=DEVICE) for _ in range(1 + pair)
        ]
        self._written.append(torch.zeros(4 * tokens + 16, width, dtype=dtype, device=DEVICE))
        op = pair_site if pair else single_site
        self._replay = captured(lambda: op(*self._written, *self._planned), 1)

    def __call__(self, *tensors: torch.Tensor) -> None:
        written, planned = tensors[: len(self._written)], Planned(*tensors[len(self._written) :])
        for buffer, values in zip(self._written, written, strict=True):
            buffer[: len(values)] = values.to(DEVICE)
        for name, buffer, values in zip(Planned._fields, self._planned, planned, strict=True):
            if name != "lists":  # the kernels read none
                buffer.fill_(NO_SLOT if name == "capture_slots" else 0)
                buffer[tuple(map(slice, values.shape))] = values.to(DEVICE)
        self._replay()
        for name, buffer, values in zip(Planned._fields, self._planned, planned, strict=True):
            if name in ("broken", "counts"):
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
        for width, tokens in ((37, 7),) if ASKED.tiny else ((37, 7), (4096, 33)):
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
    stream[last], stream[last - 1] = 2.0, 5.0
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
    times = []
    for _ in range(REPLAYS):
        if ASKED.gpu:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / launches)
        else:
            began = time.perf_counter()
            replay()
            times.append((time.perf_counter() - began) / launches)
    return statistics.median(times)


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
    """Microseconds that all the sites of a large model add to one step in which nobody asks for
    anything: tokens → µs.
    """
    found = {}
    for tokens in TOKENS:
        written = [torch.zeros(tokens, HIDDEN, dtype=DTYPE, device=DEVICE) for _ in range(3)]
        planned = SitePlan(HIDDEN).build(tokens, DTYPE, DEVICE)
        found[tokens] = round(
            SITES
            * 1e6
            * seconds(
                lambda written=written, planned=planned: pair_site(*written, *planned), SITES
            ),
            1,
        )  # type: ignore[misc]
    return found


def sanitized() -> str:
    """What compute-sanitizer says of a few launches."""
    tool = shutil.which("compute-sanitizer")
    if tool is None or not ASKED.gpu:
        return "not there"
    command = [
        tool,
        "--tool",
        "memcheck",
        "--error-exitcode",
        "9",
        sys.executable,
        __file__,
        "--tiny",
        "--model",
        "sanitized",
    ]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=max(10.0, ASKED.seconds / 2),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "did not end in time"
    assert done.returncode != 9, f"compute-sanitizer found errors:\n{done.stdout[-3000:]}"
    return (
        "no errors"
        if done.returncode == 0
        else f"ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]}"
    )


def main() -> None:
    if ASKED.model == "sanitized":
        check_against_reference(SHAPES)
        return
    if not ASKED.gpu:
        from site_interpreter import _round_as_gpus_do

        _round_as_gpus_do()
    checks: dict[str, Any] = {
        "properties": check_properties(),
        "cases": check_against_reference(SHAPES) + check_shared_launches(),
    }
    checks |= {
        "graph_replays": check_graphs(),
        "far_offsets": check_far_offsets(),
        "sanitizer": sanitized(),
    }
    figures = {name: {"value": checks[name]} for name in ("cases", "graph_replays")}
    notes = [f"{name}: {found}" for name, found in checks.items()]
    bandwidth = copy_bandwidth()
    notes.append(f"a device copy of 1 GiB moves {bandwidth / 1e9:.0f} GB/s, read and written")
    rows = time_sites(bandwidth)
    for step, name in (("capture all", "gather"), ("add", "steer")):
        for row in rows:
            if row["site"] == "pair" and row["step"] == step:
                figures[f"{name}_{row['tokens']}"] = {"value": row["of_copy"] * 100}
    idle = time_idle_sites()
    notes.append(
        f"{SITES} idle launches: "
        + ", ".join(f"{us} µs at {tokens} tokens" for tokens, us in idle.items())
    )
    columns = ["site", "tokens", "step", "us", "gb_per_s", "of_copy"]
    table = {
        "title": f"Sites of {HIDDEN} × bf16",
        "columns": columns,
        "rows": [[row[name] for name in columns] for row in rows],
    }
    kit.finish(ASKED, {"figures": figures, "tables": [table], "notes": notes})


if __name__ == "__main__":
    main()

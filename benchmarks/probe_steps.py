"""What do a rank's own parts of a step cost, with and without probes, and with policies?

A whole data plane and its sites, without a model.

    python benchmarks/probe_steps.py [--hidden 576] [--layers 30] [--steps 200]

Prints the CPU time of one thread, in µs, that a step takes with probes and would not take without:
admission and planning, the sites that record, and scoring. Steps in which so many requests generate
one token, and steps that compute prompts.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from midstream import __version__
from midstream.schemas.artifacts.conditions import Condition, StoredPolicy
from midstream.schemas.artifacts.probes import ProbeContent, StoredProbe
from midstream.schemas.base.tensors import content_hash, from_numpy
from midstream.schemas.requests.specs import RankSpec, probe_captures
from midstream.workers.runner.base.config import PlaneConfig, RankPlace
from midstream.workers.runner.base.engine_step import Finish, NewRequest, StepView
from midstream.workers.runner.hooks.sites import RankSite, Sizes, buffers_of, visit_of
from midstream.workers.runner.plane.data_plane import DataPlane

#: Reads each probe that has a policy: stops at a mean that nothing reaches.
POLICY = StoredPolicy(
    name="p",
    version=1,
    digest="d",
    condition=Condition(at_least=1e30, aggregation="mean", window=16),
    actions=["stop"],
    mode="active",
    acts=True,
)
CAPACITY = 2048
#: Bytes that are more than the processor's caches hold.
_CACHES = 1 << 27
#: Of a long request: positions grow from step to step.
PROMPT = 32
#: Of a step of the model's thread.
PARTS = ("begin", "choose", "plan", "forward", "drain")


def made(
    probes: int, layers: int, hidden: int, plane: DataPlane, policies: bool
) -> list[StoredProbe]:
    """Random ones, in turn at `layers` layers, whose thresholds nothing reaches; their weights are
    put into `plane`. `policies`: each is read by one that stops, too.
    """
    found = []
    for number in range(probes):
        rng = np.random.default_rng(number)
        tensors = [
            from_numpy(rng.standard_normal((1, hidden)).astype(np.float32)),
            from_numpy(np.zeros(1, dtype=np.float32)),
        ]
        plane.rank_state.vectors.put({content_hash(tensor): tensor for tensor in tensors})
        content = ProbeContent(
            hook="post_block",
            layer=8 + number % layers,
            tensors=list(map(content_hash, tensors)),
            labels=["x"],
            thresholds=[1e30],
        )
        found.append(
            StoredProbe(
                name=f"p{number}",
                digest=content.digest,
                content=content,
                actions=["stop"],
                policy=POLICY if policies else None,
            )
        )
    return found


class Stand:
    """A data plane whose forward only visits its sites."""

    def __init__(self, folder: Path, layers: int, hidden: int) -> None:
        config = PlaneConfig(
            version=__version__,
            worker="w",
            boot="b",
            relay_url="tcp://127.0.0.1:9",
            outbox_dir=str(folder / "outbox"),
            capture_root=str(folder / "captures"),
            hooks=[],
            steering_rows=3,
            steering_entries=48,
            step_tokens=CAPACITY,
            step_rows=0,
            capture_queue_mib=256,
            capture_window_mib=64,
            capture_overload="block",
            spill_dir=str(folder / "spill"),
            row_store_mib=0,
            sweep_entry=True,
            writer_threads=1,
            segment_limit_kib=64,
            segment_mib=1,
            memory_limit_kib=64,
            capture_quota_mib=0,
            cores=[0],
            fault="",
        )
        sites = [RankSite("post_block", layer, "pair") for layer in range(layers)]
        sizes = Sizes(
            ring_rows=0,
            capacity=CAPACITY,
            lists=(4 * layers + 1) * CAPACITY,
            patterns=2,
            configurations=3,
            entries=48,
        )
        buffers = buffers_of(layers, sizes, hidden, torch.bfloat16, torch.device("cpu"))
        self.plane = DataPlane(
            config,
            RankPlace(rank=0, world=1, tp=0, pp=0, stages=1),
            sites,
            buffers,
            num_layers=layers,
            traced=False,
        )
        modules = [torch.nn.Module() for _ in sites]
        self._visits = [
            visit_of(module, [site], n, buffers, False)
            for n, (module, site) in enumerate(zip(modules, sites, strict=True))
        ]
        self._streams = torch.randn(2, CAPACITY, hidden).bfloat16()
        self._weights = torch.zeros(_CACHES // 4)

    def forward(self, rows: int) -> None:
        """Visit all sites with so many rows."""
        for visit in self._visits:
            visit(self._streams[0, :rows], self._streams[1, :rows])

    def parts(
        self, new: list[NewRequest], ended: dict[str, Finish], windows: list[tuple[str, int, int]]
    ) -> list[float]:
        """Run a step; return the seconds of `PARTS`. `windows`: request, first position, count."""
        ids, firsts, counts = zip(*windows, strict=True) if windows else ((), (), ())
        view = StepView(ids, counts, firsts, [1] * len(ids))
        times = []
        for part in (
            lambda: self.plane.begin(new, ended, 0),
            lambda: self.plane.choose(windows),
            lambda: self.plane.plan(view),
            lambda: self.forward(view.num_rows),
            lambda: self.plane.drain(None),
        ):
            began = time.thread_time()
            part()
            times.append(time.thread_time() - began)
        return times

    def step(
        self, new: list[NewRequest], ended: dict[str, Finish], windows: list[tuple[str, int, int]]
    ) -> list[float]:
        """Seconds of admission and planning, of the sites, of what follows the forward."""
        # as a model's weights, it leaves nothing of the step before in the caches
        self._weights.add_(1.0)
        *planning, forward, drain = self.parts(new, ended, windows)
        return [sum(planning), forward, drain]


def spec_of(prompt: int, **wish: Any) -> RankSpec:
    """The spec of a request with so many prompt tokens. `wish`: captures, steering, probes."""
    return RankSpec(version=__version__, job="", request=0, attempt=1, prompt_tokens=prompt, **wish)


def arriving(ids: list[str], spec: RankSpec, generated: int) -> list[NewRequest]:
    """Requests with this spec, each of a job of its own."""
    return [
        NewRequest(one, msgspec.structs.replace(spec, job=f"j{one}"), 0, generated) for one in ids
    ]


def cost(
    requests: int,
    tokens: int,
    probes: int,
    at: int,
    policies: bool,
    *,
    hidden: int,
    layers: int,
    steps: int,
) -> list[float]:
    """Median µs of a step's parts, with `probes` in turn at `at` layers, or as many policies.

    `tokens`: of each request in a step; 1: it generates; more: each step computes new prompts, and
    those of the step before end.
    """
    with tempfile.TemporaryDirectory(prefix="midstream-bench-") as folder:
        stand = Stand(Path(folder), layers, hidden)
        probed = made(probes, at, hidden, stand.plane, policies)
        prompt = PROMPT if tokens == 1 else tokens
        spec = spec_of(prompt, captures=probe_captures(probed), probes=probed)

        def new(step: int) -> list[NewRequest]:
            return arriving(names(step), spec, 1000) if probes else []

        def names(step: int) -> list[str]:
            return [f"{step}.{number}" for number in range(requests)]

        def windows(step: int, first: int, count: int) -> list[tuple[str, int, int]]:
            return [(name, first, count) for name in names(step)]

        times = []
        if tokens == 1:
            stand.step(new(0), {}, windows(0, 0, PROMPT - 1))
            for step in range(steps):
                times.append(stand.step([], {}, windows(0, PROMPT - 1 + step, 1)))
        else:
            ended: dict[str, Finish] = {}
            for step in range(steps // 10):
                times.append(stand.step(new(step), ended, windows(step, 0, tokens)))
                ended = {name: Finish(list(range(tokens + 1)), False) for name in names(step)}
        stand.plane.close()
    return [statistics.median(each) * 1e6 for each in zip(*times, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for requests, tokens in ((1, 1), (8, 1), (64, 1), (1, 512), (32, 36)):
        for probes, at, policies in (
            (0, 0, False),
            (1, 1, False),
            (1, 1, True),
            (16, 1, False),
            (16, 1, True),
            (16, 16, False),
        ):
            parts = cost(requests, tokens, probes, at, policies, **vars(options))
            names = ("plan", "sites", "drain")
            results.append({"requests": requests, "tokens": tokens, "probes": probes, "layers": at})
            results[-1]["policies"] = policies
            results[-1] |= {name: round(part) for name, part in zip(names, parts, strict=True)} | {
                "sum": round(sum(parts))
            }
            print("  ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
    print(json.dumps({"benchmark": "probe_steps", **vars(options), "results": results}))


if __name__ == "__main__":
    main()

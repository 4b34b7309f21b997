"""What Midstream adds to a served model: the same prompts through stock vLLM and through ours, in
turns, both with graphs.

`--model 8b`, `70b-shard` or `30b-a3b`: random weights, one GPU. Both engines live at the same time.
A pair is one run of stock and one of ours of the same round; the order changes from round to round.
Captured rows count until the last receipt says that they are durable.
"""

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kit
import shares
from engines import EngineProcess

ROUNDS = 12
#: Batches with graphs: few, because each takes its time at the start, twice for ours.
GRAPH_SIZES = [1, 8, 16, 32, 64]
#: Files larger than this are deleted between runs.
KEPT_BYTES = 64 << 10
#: Share of the GPU's memory that the weights of both engines may take.
WEIGHTS_SHARE = 0.65


@dataclass(frozen=True)
class Workload:
    """So many requests at once, all of one length."""

    requests: int
    prompt: int
    generated: int


@dataclass(frozen=True)
class Condition:
    """What every request of ours asks for.

    `capture`: sites `one` or `all` layers, positions, and where the files go.
    """

    workload: str
    steered: int = 0  # distinct configurations, each an addition at every layer
    capture: tuple[str, str, str] | None = None


WORKLOADS = {"decode": Workload(64, 32, 128), "prefill": Workload(64, 512, 16)}
TINY = {"decode": Workload(4, 6, 4), "prefill": Workload(4, 20, 1)}
#: Bytes of rows that a run may capture: fewer requests for larger models.
MOST_BYTES = 9 << 30
CONDITIONS = {
    "idle": Condition("decode"),
    "one_layer": Condition("decode", capture=("one", "all", "memory")),
    "steer_64": Condition("decode", steered=64),
    "both": Condition("decode", 64, ("all", "all", "memory")),
    "prompt_memory": Condition("prefill", capture=("all", "all_prompt", "memory")),
    "prompt_disk": Condition("prefill", capture=("all", "all_prompt", "disk")),
}


def fitted(config: dict[str, Any], memory_gib: float) -> tuple[dict[str, Any], str]:
    """The config with as many layers as two engines have room for, and what was left out."""
    layers = int(config["num_hidden_layers"])
    head = 2 * config["vocab_size"] * config["hidden_size"] * 2
    room = WEIGHTS_SHARE * memory_gib * 2**30 / 2 - head
    fits = max(1, min(layers, int(room / (2 * layer_parameters(config)))))
    return config | {
        "num_hidden_layers": fits
    }, "" if fits == layers else f"{fits} of its {layers} layers, so that two engines fit"


def layer_parameters(config: dict[str, Any]) -> int:
    hidden, heads = (
        config["hidden_size"],
        config["num_attention_heads"] + config["num_key_value_heads"],
    )
    experts, width = (
        config.get("num_experts", 1),
        config.get("moe_intermediate_size", config["intermediate_size"]),
    )
    return int(2 * heads * config["head_dim"] * hidden + 3 * experts * width * hidden)


def workloads_of(config: dict[str, Any], *, tiny: bool) -> dict[str, Workload]:
    """As many requests as the files have room for, when every layer is captured at every
    position.
    """
    position = 2 * config["num_hidden_layers"] * config["hidden_size"]
    found = {}
    for name, work in (TINY if tiny else WORKLOADS).items():
        fits = max(
            1,
            MOST_BYTES // (position * (work.prompt + (work.generated if name == "decode" else 0))),
        )
        found[name] = Workload(min(work.requests, fits), work.prompt, work.generated)
    return found


def memory_folder(out: Path, *, tiny: bool) -> tuple[Path, str]:
    """A folder whose files are in memory, and what is wrong with it."""
    shared = Path("/dev/shm")
    found = kit.memory_folder(out)
    shutil.rmtree(found, ignore_errors=True)
    if shared.is_dir() and shutil.disk_usage(shared).free > (
        MOST_BYTES * 5 // 4 if not tiny else 1 << 20
    ):
        return found, ""
    return out / "memory", "files 'in memory' were on the disk: /dev/shm is too small"


class Pair:
    """Both engines, and where captured rows go."""

    def __init__(
        self, asked: kit.Options, model: Path, config: dict[str, Any], memory: Path, **more: Any
    ) -> None:
        self.config = config
        self.sink = kit.Sink()
        self.root = asked.out / "ours" / "captures"
        self.memory = memory
        for tag, target in (("memory", memory), ("disk", asked.out / "disk")):
            target.mkdir(parents=True, exist_ok=True)
            self.root.mkdir(parents=True, exist_ok=True)
            (self.root / tag).unlink(missing_ok=True)
            (self.root / tag).symlink_to(target.resolve())
        extra = kit.without_weights(asked) | more
        if asked.gpu:
            tokens = max(
                work.requests * (work.prompt + work.generated + 16) for work in WORKLOADS.values()
            )
            per_token = (
                4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
            )
            extra["kv_cache_memory_bytes"] = int(1.5 * tokens * per_token) + (256 << 20)
            extra["cudagraph_capture_sizes"] = GRAPH_SIZES
        common = {"relay_url": self.sink.url}
        with ThreadPoolExecutor(2) as starting:
            started = {
                kind: starting.submit(
                    EngineProcess,
                    kind,
                    kit.serving_settings(asked, asked.out / kind, model, **common),
                    extra,
                    timed=asked.out / "shares" if kind == "ours" else None,
                )
                for kind in ("stock", "ours")
            }
        self.engines = {kind: engine.result() for kind, engine in started.items()}

    def run(
        self,
        kind: str,
        prompts: list[list[int]],
        generated: int,
        condition: Condition | None = None,
    ) -> dict[str, float]:
        """`seconds` until the last token, `durable` until the last receipt, `bytes` of files."""
        layers = list(range(int(self.config["num_hidden_layers"])))
        steering = capture = None
        if condition is not None and condition.steered:
            steering = {"layers": layers, "distinct": condition.steered, "seed": 1}
        if condition is not None and condition.capture:
            which, positions, tag = condition.capture
            chosen = layers if which == "all" else layers[len(layers) // 2 :][:1]
            capture = {"sites": {"post_block": chosen}, "positions": positions, "tag": tag}
        receipts, written = self.sink.count, self.sink.bytes
        began = time.perf_counter()
        answer = self.engines[kind].run(prompts, generated, len(prompts), steering, capture)
        assert answer["tokens"] == len(prompts) * generated, answer["tokens"]
        if steering or capture:
            self.sink.wait(receipts + len(prompts), 120)
            assert not self.sink.failed, self.sink.failed[:3]
        durable = max(answer["seconds"], self.sink.at - began) if capture else answer["seconds"]
        if capture:
            self.clear()
        return {
            "seconds": answer["seconds"],
            "durable": durable,
            "bytes": self.sink.bytes - written,
            **answer["ours"],
        }

    def clear(self) -> None:
        for folder, _, names in os.walk(self.root, followlinks=True):
            for name in names:
                path = Path(folder) / name
                if path.stat().st_size > KEPT_BYTES:
                    path.unlink()

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
        shutil.rmtree(self.memory, ignore_errors=True)
        shutil.rmtree(self.root.parent.parent / "disk", ignore_errors=True)


def measure(pair: Pair, asked: kit.Options, notes: list[str]) -> dict[str, Any]:
    """Rounds until the time is over: in each every condition once, beside stock with the same
    prompts. What is found is left after each round.
    """
    workloads = workloads_of(pair.config, tiny=asked.tiny)
    vocabulary = int(pair.config["vocab_size"])
    prompts = {
        name: kit.token_ids(work.requests, work.prompt, vocabulary)
        for name, work in workloads.items()
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in (*CONDITIONS, *workloads)}
    rates: list[float] = []

    def once(name: str) -> dict[str, float]:
        condition = CONDITIONS.get(name)
        work = condition.workload if condition else name
        return pair.run(
            "ours" if condition else "stock", prompts[work], workloads[work].generated, condition
        )

    for name in runs:
        once(name)  # graphs, vectors, pages: all is there when the time counts
    result: dict[str, Any] = {}
    took = 0.0  # the last round
    while len(rates) < (2 if asked.tiny else ROUNDS) and (len(rates) < 2 or asked.left > took):
        began = time.monotonic()
        rates.append(kit.disk_rate(asked.out / "disk", 1 << 20 if asked.tiny else 2 << 30))
        order = list(runs) if len(rates) % 2 else list(runs)[::-1]
        for name in order:
            runs[name].append(once(name))
        result = figures_of(runs, rates, workloads)
        result["notes"] += notes
        kit.so_far(asked, result)
        took = time.monotonic() - began
    return result


def figures_of(
    runs: dict[str, list[dict[str, float]]], rates: list[float], workloads: dict[str, Workload]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rows = []
    for name, condition in CONDITIONS.items():
        stock = [run["seconds"] for run in runs[condition.workload]]
        taken = [run["durable"] for run in runs[name]]
        found[name] = kit.figure(kit.added(taken, stock), 100)
        rows.append(
            [
                name,
                *(
                    round(kit.figure(values)["value"], 4)
                    for values in (stock, [run["seconds"] for run in runs[name]], taken)
                ),
            ]
        )
    rate = [run["bytes"] / run["durable"] for run in runs["prompt_disk"]]
    found["disk_share"] = kit.figure(
        [mine / disk for mine, disk in zip(rate, rates, strict=True)], 100
    )
    notes = [
        (
            f"the disk's own rate: {kit.figure(rates)['value'] / 1e9:.2f} GB/s with two "
            "threads and fsync"
        ),
        (
            f"captured to the disk: {kit.figure(rate)['value'] / 1e9:.2f} GB/s, "
            f"{runs['prompt_disk'][0]['bytes'] / 1e9:.2f} GB a run"
        ),
        f"{len(rates)} rounds",
        *(f"{name}: {work}" for name, work in workloads.items()),
    ]
    table = {
        "title": "Median seconds",
        "columns": ["condition", "stock", "ours", "ours, until durable"],
        "rows": rows,
    }
    return {"figures": found, "tables": [table, host_times(runs)], "notes": notes}


def host_times(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Where the thread that runs the model was in our code, from its first step to its last."""
    parts = [name for part in shares.PARTS[:-1] for name in (part, f"{part} in all")]
    rows = [
        [
            name,
            *(
                round(kit.figure([run[part] for run in runs[name]], 1e3)["value"], 1)
                for part in parts
            ),
        ]
        for name in CONDITIONS
    ]
    return {
        "title": "Median milliseconds of a run in our parts of a step, on the CPU and in all",
        "columns": ["condition", *parts],
        "rows": rows,
    }


def main() -> None:
    asked = kit.options(__doc__)
    if asked.gpu and asked.model == "30b-a3b" and not kit.has_operators("_moe_C"):
        kit.finish(asked, {"skipped": "this vLLM lacks its fused MoE operators (vllm/_moe_C*.so)"})
        return
    memory_gib = kit.machine(asked.device).get("gpu_memory_gib", 1)
    config, note = kit.shape("tiny-experts" if asked.model == "30b-a3b" else "tiny"), ""
    if not asked.tiny:
        config, note = fitted(kit.shape(asked.model, memory_gib), memory_gib)
    model = kit.write_model(asked.out / "model", config, "bfloat16" if asked.gpu else "float32")
    memory, missing = memory_folder(asked.out, tiny=asked.tiny)
    pair = Pair(asked, model, config, memory)
    notes = [*filter(None, [note, missing])]
    notes += [f"{kind}: {engine.facts}" for kind, engine in pair.engines.items()]
    kit.so_far(asked, {"figures": {}, "notes": notes})
    try:
        kit.finish(asked, measure(pair, asked, notes))
    finally:
        pair.close()


if __name__ == "__main__":
    main()

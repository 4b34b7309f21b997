"""What does a harvest cost beside the model, do several workers scale, and does memory stay flat?

    python benchmarks/harvest.py speed    # service, stock vLLM and a transformers loop, in turns
    python benchmarks/harvest.py scale    # 1, 2 and 4 fake workers
    python benchmarks/harvest.py memory   # resident memory over --tokens tokens; then `read`
    python benchmarks/harvest.py read     # rows/s of RowDataset beside the disk's own rate
    python benchmarks/harvest.py stream   # rows/s of a stream beside a harvest

Prints JSON. A rate counts the tokens of sequences; for the service, from the planned source to the
last unit that counts.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "system"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fake_engine"))

from engines import DEMO_MODEL, EngineProcess, bench_prompts, settings_for, tokenised
from stack import Stack

from midstream.client import Client
from midstream.client.harvest import RowDataset, open, verify
from midstream.schemas.jobs.harvests import HarvestView

LENGTH = 256
ENGINE = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "max_model_len": 2048,
    "kv_cache_gib": 1.0,
}
SLOW = {"lease_s": 15.0, "tuning.visibility_timeout_s": 30}


def sequences(count: int, seed: int) -> list[list[int]]:
    """Documentation cut into pieces of `LENGTH` tokens, each begun by random tokens so that no two
    share a prefix.
    """
    stream = [token for ids in tokenised(bench_prompts(), DEMO_MODEL) for token in ids]
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        start = int(rng.integers(0, len(stream) - LENGTH))
        found.append([*rng.integers(1000, 20000, 8).tolist(), *stream[start : start + LENGTH - 8]])
    return found


def harvest(client: Client, model: str, lines: list[Any], **fields: Any) -> HarvestView:
    view = client.harvests.submit(
        model=model, source={"lines": lines}, positions={"skip_bos": False}, **fields
    )
    while (view := client.harvests.get(view)).state not in ("succeeded", "failed", "cancelled"):
        time.sleep(0.1)
    assert view.state == "succeeded", view
    return view


def computed_s(view: HarvestView) -> float:
    """From the first part that computes to the end, sealing included."""
    assert view.started is not None
    assert view.finished is not None
    return view.finished - view.started


def speed(arguments: argparse.Namespace) -> dict[str, Any]:
    os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = (
        "1"  # all compute with as many threads: one fewer than cores
    )
    os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) - 1))
    found: dict[str, Any] = {
        "length": LENGTH,
        "sequences": arguments.sequences,
        "rounds": arguments.rounds,
        "engine": ENGINE,
    }
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        stock, loop = (
            EngineProcess("stock", settings_for(root / "stock", DEMO_MODEL, **ENGINE)),
            TransformersLoop(root),
        )
        try:
            options = {
                "engine": "vllm",
                "model": str(DEMO_MODEL),
                "model_name": "demo",
                "certify": False,
                **ENGINE,
                **SLOW,
            }
            with (
                Stack(root / "ours", api=True, start_timeout_s=300, **options) as stack,
                Client(stack.url) as client,
            ):
                for layers in ([15], [2, 7, 12, 17, 22, 27]):
                    rounds = [
                        turn(stock, loop, client, layers, number, arguments.sequences)
                        for number in range(arguments.rounds + 1)
                    ][1:]
                    found[f"{len(layers)} layers"] = {
                        f"{kind}_tokens_s": [round(rates[kind]) for rates in rounds]
                        for kind in ("stock", "loop", "harvest")
                    } | {
                        f"harvest_to_{peer}": round(
                            statistics.median(rates["harvest"] / rates[peer] for rates in rounds), 3
                        )
                        for peer in ("stock", "loop")
                    }
        finally:
            stock.close()
    return found


class TransformersLoop:
    """What a researcher writes by hand: batches of the model's own library, hidden states of some
    layers, a file for each batch.
    """

    BATCH = 8

    def __init__(self, folder: Path):
        import torch
        from transformers import AutoModel

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self._model = AutoModel.from_pretrained(DEMO_MODEL, dtype=torch.bfloat16).eval()
        self._folder = folder

    def run(self, lines: list[list[int]], layers: list[int]) -> float:
        """Seconds."""
        import torch
        from safetensors.torch import save_file

        start = time.perf_counter()
        for first in range(0, len(lines), self.BATCH):
            with torch.inference_mode():
                states = self._model(
                    torch.tensor(lines[first : first + self.BATCH]), output_hidden_states=True
                ).hidden_states
            rows = {
                str(layer): states[layer + 1].reshape(-1, states[0].shape[-1]).contiguous()
                for layer in layers
            }
            save_file(rows, self._folder / f"{first}.safetensors")
        return time.perf_counter() - start


def turn(
    stock: EngineProcess,
    loop: TransformersLoop,
    client: Client,
    layers: list[int],
    number: int,
    count: int,
) -> dict[str, float]:
    """Tokens/s of each on the same sequences; who is first changes."""
    lines = sequences(count, 1000 * len(layers) + number)
    tokens = sum(map(len, lines))

    def ours() -> float:
        view = harvest(client, "demo", lines, layers=layers, shards={"mib": 16})
        client.harvests.delete(view)
        return computed_s(view)

    order = ["stock", "loop", "harvest"]
    order = order[number % 3 :] + order[: number % 3]
    kinds = {
        "stock": lambda: float(stock.run(lines, 1, 64)["seconds"]),
        "loop": lambda: loop.run(lines, layers),
        "harvest": ours,
    }
    rates = {kind: tokens / kinds[kind]() for kind in order}
    print(f"{len(layers)} layers, turn {number}: {rates}", file=sys.stderr)
    return rates


def scale(arguments: argparse.Namespace) -> dict[str, Any]:
    rates: dict[int, list[float]] = {}
    for workers in arguments.workers:
        with tempfile.TemporaryDirectory() as folder:
            options = {
                "engine": "fake",
                "engine_options": {"token_s": 0.08},
                "max_num_seqs": 4,
                "tuning.harvest_requests_in_flight": 8,
                "tuning.worker_concurrency": 8,
            }
            with (
                Stack(Path(folder), api=True, workers=workers, **options, **SLOW) as stack,
                Client(stack.url) as client,
            ):
                for _ in range(arguments.rounds):
                    hooks = dict.fromkeys(
                        ("pre_attn", "attn_out", "mlp_out", "post_block"), "all"
                    )  # wide rows: many units to share
                    lines = [f"{number} " + "x" * 200 for number in range(500 * workers)]
                    view = harvest(client, "fake-model", lines, hooks=hooks, shards={"mib": 1})
                    rates.setdefault(workers, []).append(view.tokens / computed_s(view))
    first = statistics.median(rates[arguments.workers[0]])
    return {
        str(workers): {
            "tokens_s": [round(rate) for rate in each],
            "times_one": round(statistics.median(each) / first, 2),
        }
        for workers, each in rates.items()
    }


def memory(arguments: argparse.Namespace) -> dict[str, Any]:
    fake = arguments.engine == "fake"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        corpus = root / "corpus"
        corpus.mkdir()
        rng = np.random.default_rng(0)
        with (corpus / "tokens.jsonl").open("w") as file:
            for _ in range(arguments.tokens // 900):
                file.write(json.dumps({"ids": rng.integers(2, 250, 1000).tolist()}) + "\n")
        options: dict[str, Any] = (
            {"engine": "fake"}
            if fake
            else {
                "engine": "vllm",
                "model": str(arguments.model),
                "certify": False,
                **ENGINE,
                "kv_cache_gib": 0.25,
            }
        )
        options |= {"model_name": "m", "harvest_sources": str(corpus), **SLOW}
        with (
            Stack(root / "data", api=True, start_timeout_s=300, **options) as stack,
            Client(stack.url) as client,
        ):
            with sampled(
                {name: process.pid for name, process in stack.processes.items()}
            ) as samples:
                view = client.harvests.submit(
                    model="m",
                    source={"path": "tokens.jsonl", "kind": "tokens", "field": "ids"},
                    layers=[1, 2],
                    cut={"max_length": 256, "fit": "split"},
                    shards={"mib": 8},
                    max_tokens=arguments.tokens,
                )
                view = client.harvests.wait(view)
            found = verify(view.uri)
            parts = {
                name: [
                    round(max(part)) for part in np.array_split(np.array(values), 8) if len(part)
                ]
                for name, values in samples.items()
            }
            return {
                "tokens": view.tokens,
                "rows": found.rows,
                "faults": found.faults,
                "bytes": found.bytes,
                "seconds": round(computed_s(view), 1),
                "tokens_s": round(view.tokens_s),
                "rss_mib_by_eighth": parts,
                "read": reading(view.uri, arguments.rounds),
            }


def stream(arguments: argparse.Namespace) -> dict[str, Any]:
    """From the submission until the last row has been read."""
    fake = arguments.engine == "fake"
    options: dict[str, Any] = (
        {"engine": "fake"}
        if fake
        else {"engine": "vllm", "model": str(DEMO_MODEL), "certify": False, **ENGINE}
    )
    lines = (
        [f"{number} " + "x" * 1000 for number in range(2000)]
        if fake
        else sequences(arguments.sequences, 7)
    )
    fields: dict[str, Any] = {
        "model": "m",
        "source": {"lines": lines},
        "layers": [1, 2],
        "shards": {"mib": 4 if fake else 16},
    }
    rates: dict[str, list[int]] = {"harvest": [], "stream": [], "stream_window_2": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        Stack(
            Path(folder), api=True, start_timeout_s=300, model_name="m", **options, **SLOW
        ) as stack,
        Client(stack.url) as client,
    ):

        def harvested() -> int:
            view = client.harvests.wait(client.harvests.submit(**fields))
            return sum(len(shard.rows("post_block", 1)) for shard in open(view.uri).shards)

        def streamed(window: int) -> int:
            view = client.harvests.submit(**fields, to={"window": window})
            return sum(len(unit.rows(1)) for unit in client.harvests.stream(view))

        kinds = [lambda: harvested(), lambda: streamed(32), lambda: streamed(2)]
        harvested()
        for number in range(arguments.rounds):
            for place in range(3):
                which = (number + place) % 3
                start = time.perf_counter()
                rows = kinds[which]()
                list(rates.values())[which].append(round(rows / (time.perf_counter() - start)))
    return {
        "rows": rows,
        **{f"{kind}_rows_s": each for kind, each in rates.items()},
        **{
            f"{kind}_to_harvest": round(
                statistics.median(
                    mine / whole for mine, whole in zip(each, rates["harvest"], strict=True)
                ),
                3,
            )
            for kind, each in rates.items()
            if kind != "harvest"
        },
    }


@contextmanager
def sampled(pids: dict[str, int]) -> Iterator[dict[str, list[float]]]:
    """Resident MiB of each process and of those below it, twice a second."""
    found: dict[str, list[float]] = {}
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.5):
            for name, pid in pids.items():
                sizes: dict[str, float] = {}
                for member in _family(pid):
                    with suppress(OSError):
                        command = Path(f"/proc/{member}/comm").read_text().strip()
                        pages = int(Path(f"/proc/{member}/statm").read_text().split()[1])
                        sizes[command] = sizes.get(command, 0) + pages * 4096 / 2**20
                for command, size in sizes.items():
                    found.setdefault(f"{name}: {command}", []).append(size)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


def _family(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            child, _, rest = stat.read_text().partition(" ")
            parents.setdefault(int(rest.rpartition(") ")[2].split()[1]), []).append(int(child))
        except OSError:
            continue
    found, at = [pid], 0
    while at < len(found):
        found += parents.get(found[at], [])
        at += 1
    return found


def read(arguments: argparse.Namespace) -> dict[str, Any]:
    """A harvest that exists: `--uri`."""
    return reading(arguments.uri, arguments.rounds)


def reading(uri: str, rounds: int) -> dict[str, Any]:
    """Files as they are, and rows by RowDataset, in turns; as root with empty page caches too."""
    made = open(uri)
    site = made.sites[0]
    files = [Path(uri) / file.key for shard in made.shards for file in shard.entry.files]
    size = sum(path.stat().st_size for path in files)

    def disk() -> int:
        return round(sum(len(path.read_bytes()) for path in files) / 2**20)  # MiB

    def rows() -> int:
        return sum(len(batch) for batch in RowDataset(uri, [site], batch_size=4096))

    def rate(what: Callable[[], int], *, cached: bool) -> int:
        if not cached:
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("3")
        start = time.perf_counter()
        return round(what() / (time.perf_counter() - start))

    disk()
    found: dict[str, Any] = {
        "rows": len(made),
        "width": made.manifest.widths[site[0]],
        "dtype": made.manifest.dtype,
        "bytes": size,
    }
    for cached in (True, False) if os.geteuid() == 0 else (True,):
        each = [(rate(disk, cached=cached), rate(rows, cached=cached)) for _ in range(rounds)]
        found["cached" if cached else "not cached"] = {
            "disk_mib_s": [mib for mib, _ in each],
            "rows_s": [count for _, count in each],
        }
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["speed", "scale", "memory", "read", "stream"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument(
        "--workers", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2]
    )
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--engine", choices=["fake", "vllm"], default="fake")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="of `memory --engine vllm`")
    parser.add_argument("--uri")
    chosen = parser.parse_args()
    print(
        json.dumps(
            {"speed": speed, "scale": scale, "memory": memory, "read": read, "stream": stream}[
                chosen.what
            ](chosen),
            indent=1,
        )
    )

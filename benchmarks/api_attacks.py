"""How long does one large request hold up the API, and how much memory does it take?

Each in turn, beside a probe of /healthz.

    python benchmarks/api_attacks.py [--rounds 3] [--only NAME …]

A service with a fake engine, beside which a model with the demo model's tokenizer and shape is
published that no worker serves: requests are checked, tokenised and queued. A separate process
requests /healthz every 20 ms over one connection. For each request: what it is answered with; the
longest that the probe waited while it was under way (the median and the worst of the rounds; in
brackets the median just before); by how much the API's peak of resident memory rose (the largest of
the rounds) and that of its helper processes; both to the size of the body where that is 1 MiB or
more. Goal: no request within the limits delays the probe by more than 250 ms, or adds more than
four times its size.
"""

import argparse
import asyncio
import base64
import json
import math
import multiprocessing
import os
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx2
import msgspec
from services import service

from midstream.broker.ledger.jobs.inputs import LedgerInputs
from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.client.sdk.discovery import written
from midstream.schemas.jobs.models import TokenizerBundle, encode_bundle
from midstream.schemas.settings.settings import Settings

FAKE = "fake-model"
MODEL = "of-demo-size"
LAYERS = 30
HIDDEN = 576
LENGTH = 8192
#: The template that small chat models come with.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ "
    "message['content'] }}{% for call in message.tool_calls or [] %}{{ call.function | tojson }}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
MIB = 1 << 20
#: As long as the worker that serves nothing counts as alive.
LEASE_S = 3600.0
#: Just within the largest JSON body.
FULL = 8 * MIB - 64 * 1024
JSON = "application/json"
FILE = "application/octet-stream"


class Attack(NamedTuple):
    name: str
    make: Callable[[], bytes]
    path: str = "/v1/jobs"
    method: str = "POST"
    media: str = JSON


def job(**fields: Any) -> bytes:
    return json.dumps(
        {"model": MODEL, "prompts": ["hello"], **fields}, separators=(",", ":")
    ).encode()


def repeated(before: str, item: str, size: int, after: str) -> bytes:
    """`size` bytes of items in a list of a job."""
    count = (size - len(before) - len(after)) // (len(item) + 1)
    return (before + ",".join([item] * count) + after).encode()


def in_job(field: str, item: str, size: int, count: int | None = None) -> Callable[[], bytes]:
    prompts = "" if field == "prompts" else '"prompts":["hello"],'
    before = f'{{"model":"{MODEL}",{prompts}"{field}":['
    return lambda: repeated(
        before, item, size if count is None else (len(item) + 1) * count + len(before) + 2, "]}"
    )


def words(characters: int) -> str:
    return ("the quick brown fox jumps over a lazy dog, 1234 times. " * (characters // 55 + 1))[
        :characters
    ]


def vector(number: int) -> dict[str, Any]:
    """A vector of its own for each number."""
    return {
        "dtype": "float32",
        "shape": [HIDDEN],
        "data": base64.b64encode(struct.pack("<f", 0.5 + number / MIB) * HIDDEN).decode(),
    }


def edits(count: int) -> list[dict[str, Any]]:
    return [
        {"layers": index % LAYERS, "op": "add", "vector": vector(index), "positions": "all"}
        for index in range(count)
    ]


def module(entries: int) -> bytes:
    return json.dumps({"model": MODEL, "steering": edits(entries)}).encode()


def tensors(shapes: dict[str, list[int]]) -> bytes:
    """A safetensors file of zeros: name → shape."""
    header = {}
    at = 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        offsets = [at, at + size]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        at += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + bytes(at)


def lowrank(mib: int) -> bytes:
    """A legal file of so many MiB: rotations and weights of each layer."""
    rank = mib * MIB // (LAYERS * 2 * HIDDEN * 4 + LAYERS * 4)
    fields = {"rotation": [rank, HIDDEN], "weight": [rank, HIDDEN], "bias": [rank]}
    return tensors(
        {
            f"post_block.{layer}.{field}": shape
            for layer in range(LAYERS)
            for field, shape in fields.items()
        }
    )


def pairs(count: int, characters: int) -> bytes:
    """Pairs whose prompts all differ."""
    texts = [f"{index} {words(characters)}" for index in range(2 * count)]
    made = [
        {"clean": clean, "corrupt": corrupt, "answer": " a", "foil": " b", "positions": [-1]}
        for clean, corrupt in zip(texts[::2], texts[1::2], strict=True)
    ]
    return json.dumps({"model": MODEL, "pairs": made, "layers": "all"}).encode()


def chat(count: int, characters: int) -> bytes:
    messages = [{"role": "user", "content": words(characters)}] * count
    return json.dumps({"model": MODEL, "messages": messages}).encode()


def conversations(count: int, size: int) -> bytes:
    """Conversations of about so many bytes, none of which are the same."""
    texts = [f"{index} {words(size - 40)}" for index in range(count)]
    return json.dumps(
        {"model": MODEL, "messages": [[{"role": "user", "content": text}] for text in texts]},
        separators=(",", ":"),
    ).encode()


PATCH = {"layers": 0, "positions": [0], "source": {"zeros": True}}
MODULE = f"/v1/artifacts/modules/m?model={MODEL}"
ATTACKS = [
    Attack("nothing", lambda: b"", "/v1/models", "GET"),
    Attack("prompt that fits the model", lambda: job(prompts=[words(25_000)])),
    Attack("prompt, 400 kB", lambda: job(prompts=[words(400_000)])),
    Attack("prompt, 7.9 MiB", lambda: job(prompts=[words(FULL)])),
    Attack("prompt, 7.9 MiB of one letter", lambda: job(prompts=["a" * FULL])),
    Attack("prompt, 60 MB", lambda: job(prompts=[words(60_000_000)])),
    Attack("messages, 7.9 MiB in one", lambda: chat(1, FULL), "/v1/chat/completions"),
    Attack("messages, 250 that fit", lambda: chat(250, 100), "/v1/chat/completions"),
    Attack("messages, 7.9 MiB in short ones", lambda: chat(FULL // 40, 1), "/v1/chat/completions"),
    Attack("prompts, 250 × 30 kB", lambda: job(prompts=[words(30_000)] * 250)),
    Attack("prompts, 330 × 24 kB, the same", lambda: job(prompts=[words(24_000)] * 330)),
    Attack(
        "prompts, 330 × 24 kB that differ",
        lambda: job(prompts=[f"{index} {words(24_000)}" for index in range(330)]),
    ),
    Attack(
        "prompts, 4,000 × 2 kB that differ",
        lambda: job(prompts=[f"{index} {words(1990)}" for index in range(4000)]),
    ),
    Attack("conversations, 4,096 × 1.9 kB that differ", lambda: conversations(4096, 1900)),
    Attack("conversations, 4,096 × 300 bytes that differ", lambda: conversations(4096, 300)),
    Attack("prompts, 4096 short", lambda: job(prompts=["hello there"] * 4096)),
    Attack("prompts, 7.9 MiB of empty ones", in_job("prompts", '""', FULL)),
    Attack("prompts, 7.9 MiB of token ids", lambda: job(prompts=[[7] * 8000] * (FULL // 16_100))),
    Attack("prompts, 20 MB of lists", in_job("prompts", "[1]", 20_000_000)),
    Attack(
        "tokenize, 400 kB",
        lambda: json.dumps({"model": MODEL, "prompt": words(400_000)}).encode(),
        "/v1/tokenize",
    ),
    Attack(
        "detokenize, 7.9 MiB",
        lambda: json.dumps({"model": MODEL, "tokens": [7] * (FULL // 3)}).encode(),
        "/v1/detokenize",
    ),
    Attack(
        "detokenize, 131,000",
        lambda: json.dumps({"model": MODEL, "tokens": [7] * 131_000}).encode(),
        "/v1/detokenize",
    ),
    Attack("steering, 64 edits", lambda: job(steering=edits(64))),
    Attack("steering, 2,500 edits with vectors", lambda: job(steering=edits(2500))),
    Attack("steering, 7.9 MiB of {}", in_job("steering", "{}", FULL)),
    Attack("steering, 60 MB of {}", in_job("steering", "{}", 60_000_000)),
    Attack("layers, a text of 1 kB", lambda: job(capture={"layers": "0," * 500 + "0"})),
    Attack("layers, a text of 1 MB", lambda: job(capture={"layers": "0," * 500_000 + "0"})),
    Attack(
        "positions, 7.9 MiB of them",
        lambda: job(capture={"layers": 0, "positions": [0] * (FULL // 3)}),
    ),
    Attack(
        "mask, 4 MB",
        lambda: job(
            patch=[
                {
                    "layers": 0,
                    "positions": [0],
                    "mask": "0," * 2_000_000 + "0",
                    "source": {"zeros": True},
                }
            ]
        ),
    ),
    Attack("stop, 1,000 strings", lambda: job(sampling={"stop": ["abc"] * 1000})),
    Attack("stop, 7.9 MiB", lambda: job(sampling={"stop": ["abc"] * (FULL // 7)})),
    Attack("stop_token_ids, 7.9 MiB", lambda: job(sampling={"stop_token_ids": [1] * (FULL // 3)})),
    Attack(
        "metadata, 7.9 MiB", lambda: job(metadata={str(index): "a" for index in range(FULL // 13)})
    ),
    Attack("unknown field of 7.9 MiB", lambda: job(**{"a" * FULL: 1})),
    Attack("nested, 7.9 MiB", lambda: b"[" * FULL),
    Attack("steering, 32,000 × {}", in_job("steering", "{}", 0, 32_000)),
    Attack(
        "edits, 16 for 4,096 prompts", lambda: job(prompts=["a"] * 4096, steering=edits(1) * 16)
    ),
    Attack(
        "edits, 127 for 4,096 prompts", lambda: job(prompts=["a"] * 4096, steering=edits(1) * 127)
    ),
    Attack("spans, 32,000", lambda: job(capture={"positions": [{"start": 0, "stop": 1}] * 32_000})),
    Attack("positions, 65,536", lambda: job(capture={"positions": [0] * 65_536})),
    Attack(
        "masks, 256 of 512 parts", lambda: job(patch=[PATCH | {"mask": "0," * 511 + "0"}] * 256)
    ),
    Attack(
        "masks, 4,096 of 512 parts", lambda: job(patch=[PATCH | {"mask": "0," * 511 + "0"}] * 4096)
    ),
    Attack(
        "masks, 256 that differ",
        lambda: job(patch=[PATCH | {"mask": index} for index in range(256)]),
    ),
    Attack("prompt of 262,000 token ids", lambda: job(prompts=[[257] * 262_000])),
    Attack("prompts, 4,096 × 60 token ids", lambda: job(prompts=[[7] * 60] * 4096)),
    Attack("prompt of commas, 7.9 MiB", lambda: job(prompts=["," * FULL])),
    Attack("stop, 7.9 MiB of texts with commas", in_job("stop", '"a,"', FULL)),
    Attack("tools, 500,000 × {}", in_job("tools", "{}", 0, 500_000), "/v1/completions"),
    Attack(
        "safetensors?layers= of 1,000 characters",
        lambda: b"",
        "/v1/captures/job_x/safetensors?layers=" + "0-9999," * 142 + "0",
        "GET",
    ),
    Attack("module, JSON of 7.7 MiB", lambda: module(2500), MODULE, "PUT"),
    Attack("module, JSON of 20 MB", lambda: module(6500), MODULE, "PUT"),
    Attack("module file, 60 MiB", lambda: lowrank(60), MODULE, "PUT", FILE),
    Attack(
        "module file, 4,096 tensors",
        lambda: tensors({f"mlp_out.{n}": [HIDDEN] for n in range(4096)}),
        MODULE,
        "PUT",
        FILE,
    ),
    Attack(
        "module file, 300,000 tensors",
        lambda: tensors({f"post_block.{n}": [1] for n in range(300_000)}),
        MODULE,
        "PUT",
        FILE,
    ),
    Attack("module file, 80 MiB", lambda: lowrank(80), MODULE, "PUT", FILE),
    Attack(
        "safetensors?layers= of 56 kB",
        lambda: b"",
        "/v1/captures/job_x/safetensors?layers=" + "0-9999," * 8000 + "0",
        "GET",
    ),
    Attack("sweep, 64 pairs of 400 characters", lambda: pairs(64, 400), "/v1/sweeps"),
    Attack("sweep, 34 pairs of 15 kB", lambda: pairs(34, 15_000), "/v1/sweeps"),
    Attack("sweep, 256 pairs of 15 kB", lambda: pairs(256, 15_000), "/v1/sweeps"),
]


# --- The probe
# --------------------------------------------------------------------------------------------------


def probe(host: str, port: int, pipe: Connection) -> None:
    """From each `begin` to the next message, request /healthz every 20 ms; then send (when,
    seconds) of each answer.
    """
    ask = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection((host, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pipe.send("ready")
        while pipe.recv() == "begin":
            samples: list[tuple[float, float]] = []
            while not pipe.poll(0.02):
                began = time.perf_counter()
                connection.sendall(ask)
                answer = b""
                while not answer.endswith(b"}"):
                    answer += connection.recv(4096)
                samples.append((began, time.perf_counter() - began))
            pipe.recv()
            pipe.send(samples)


class Probe:
    """A process that requests /healthz; `samples` are those of the last `probing`."""

    def __init__(self, url: str):
        parts = urlsplit(url)
        self._pipe, there = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=probe, args=(parts.hostname, parts.port, there)
        )
        self._process.start()
        self._pipe.recv()
        self.samples: list[tuple[float, float]] = []

    @contextmanager
    def probing(self) -> Iterator[None]:
        self._pipe.send("begin")
        time.sleep(0.3)
        try:
            yield
        finally:
            time.sleep(0.3)
            self._pipe.send("enough")
            self.samples = self._pipe.recv()

    def close(self) -> None:
        self._pipe.send("end")
        self._process.join()


# --- Memory
# --------------------------------------------------------------------------------------------------


def memory(pid: int, field: str) -> int:
    """`VmRSS` or `VmHWM` of a process, in bytes; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/status").read_text().split(f"{field}:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return 0


def children(pid: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def mark(pid: int) -> int:
    """Reset the peak of resident memory; returns the current value."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return memory(pid, "VmRSS")


# --- Altogether
# --------------------------------------------------------------------------------------------------


async def publish(settings: Settings, length: int = LENGTH) -> None:
    """A model of the demo model's shape with its tokenizer, beside the fake one; `length`: in
    tokens.
    """
    folder = Path(settings.cache_dir).expanduser() / "models" / "SmolLM2-135M-Instruct"
    bundle = TokenizerBundle(
        tokenizer_json=(folder / "tokenizer.json").read_text(),
        chat_template=TEMPLATE,
        special_tokens={},
        eos_token_ids=[2],
    )
    name, raw = encode_bundle(bundle)
    ledger = Ledger.connect(settings)
    try:
        fake = await ledger.model(FAKE)
        assert fake is not None
        facts = {
            "name": MODEL,
            "num_layers": LAYERS,
            "hidden_size": HIDDEN,
            "max_model_len": length,
            "vocab_size": 49152,
            "tokenizer": name,
            "steering_rows": 0,  # not reported: entries at thousands of positions are accepted
            "steering_entries": 0,
        }
        await ledger.put_blob(name, raw)
        (worker,) = await ledger.workers()
        absent = msgspec.structs.replace(worker, worker="absent", model=MODEL)
        await ledger.publish_model(msgspec.structs.replace(fake, **facts), absent)
        await LedgerInputs(ledger).sign(absent.worker, absent.boot)
    finally:
        await ledger.close()


def one(http: httpx2.Client, pid: int, prober: Probe, attack: Attack) -> dict[str, Any]:
    body = attack.make()
    helpers = children(pid)
    before = mark(pid)
    before_helpers = sum(map(mark, helpers))
    with prober.probing():
        began = time.perf_counter()
        try:
            answer = http.request(
                attack.method,
                attack.path,
                content=body or None,
                headers={"Content-Type": attack.media},
            )
            status: int | str = answer.status_code
        except httpx2.TransportError as error:
            status = type(error).__name__
        ended = time.perf_counter()
    samples = prober.samples
    worst = max((took for at, took in samples if at < ended and at + took > began), default=0.0)
    quiet = max((took for at, took in samples if at + took <= began), default=0.0)
    added = memory(pid, "VmHWM") - before
    helped = sum(memory(child, "VmHWM") for child in {*helpers, *children(pid)}) - before_helpers
    return {
        "status": status,
        "s": ended - began,
        "delay": worst,
        "quiet": quiet,
        "bytes": len(body),
        "added": added,
        "helpers": max(0, helped),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    chosen = [
        attack
        for attack in ATTACKS
        if not options.only or any(part in attack.name for part in options.only)
    ]
    with service(engine="fake", model=FAKE, log_level="WARNING", lease_s=LEASE_S) as stack:
        asyncio.run(publish(stack.settings))
        pid = written(stack.data).processes["api"][0]
        with httpx2.Client(base_url=stack.url, timeout=300) as http:
            # reads the tokenizer, starts a helper
            http.post("/v1/jobs", json={"model": MODEL, "prompts": [words(5000)]})
            prober = Probe(stack.url)
            for attack in chosen:
                rounds = [one(http, pid, prober, attack) for _ in range(options.rounds)]
                print(row(attack, rounds), flush=True)
            prober.close()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


def row(attack: Attack, rounds: list[dict[str, Any]]) -> str:
    size = rounds[0]["bytes"]
    delay, quiet = (
        statistics.median(found[name] for found in rounds) * 1000 for name in ("delay", "quiet")
    )
    worst = max(found["delay"] for found in rounds) * 1000
    added, helped = (max(found[name] for found in rounds) for name in ("added", "helpers"))
    times = f"{added / size:.1f} × + {helped / size:.1f} ×" if size >= MIB else "-"
    took = statistics.median(found["s"] for found in rounds)
    statuses = "/".join(sorted({str(found["status"]) for found in rounds}))
    return (
        f"| {attack.name} | {size / MIB:.1f} | {statuses} | {took:.2f} | {delay:.0f} / "
        f"{worst:.0f} ({quiet:.0f}) "
        f"| {added / MIB:.0f} + {helped / MIB:.0f} | {times} |"
    )


if __name__ == "__main__":
    main()

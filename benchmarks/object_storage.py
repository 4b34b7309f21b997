"""How fast are captures in a bucket, beside the same bytes by plain obstore?

    python benchmarks/object_storage.py [--rounds 5]

A moto server in a process of its own (over HTTP on the loopback, every body hashed) takes (a) large
objects in parts, (b) files of captures, of 1 MiB each, with their indices, (c) small captures that
share segments. `midstream` goes through the store's own writer: an index after what it describes,
every object confirmed by HEAD. `obstore` puts the same objects with as many requests at a time,
without indices and confirmations; in (c) it puts each capture as an object of its own. Both in
turns; the ratio is the median of the rounds' ratios, above 1 where `midstream` is faster. The
server is Python and takes most of the time: what is measured is what our requests cost beside those
that are needed, not what a bucket carries. `client` is processor time of this process per object.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import obstore
import s3_kit

from midstream.schemas.jobs.captures import Manifest
from midstream.storage import blobs
from midstream.storage.s3_client import REQUESTS
from midstream.storage.s3_store import PART, S3Store, open_store

SERVER = """
import sys, threading
sys.path.insert(0, {tests!r})
import s3_kit
print(s3_kit.moto(), flush=True)
threading.Event().wait()
"""


def manifest(job: str) -> Manifest:
    return Manifest(
        format=1,
        version="0.1.0",
        job=job,
        request=0,
        attempt=1,
        worker="w",
        rank=0,
        pp=0,
        stages=1,
        sites={"post_block": [0]},
        stage_sites={"post_block": [0]},
        at="output",
        dtype="bfloat16",
        hidden_size=4,
        prompt_tokens=1,
        positions=[0],
        token_ids=[0],
    )


def large(store: S3Store, size: int, ours: bool, name: str) -> int:
    content = os.urandom(size)
    if ours:
        writer = store.writer()
        writer.append(f"t/{name}", [content])
        writer.commit()
    else:
        pieces = (content[at : at + PART] for at in range(0, size, PART))
        obstore.put(
            store.client,
            f"t/{name}",
            pieces,
            use_multipart=True,
            chunk_size=PART,
            max_concurrency=4,
        )
    return 1


def files(store: S3Store, count: int, size: int, ours: bool, name: str) -> int:
    rows = os.urandom(size)
    made = [
        blobs.make_blob(manifest(f"job_{n}"), [("rows", "int64", [size // 8], [rows])])
        for n in range(count)
    ]
    keys = [f"t/job_{name}_{n}/p0000.safetensors" for n in range(count)]
    if ours:
        blobs.publish(store, list(zip(keys, made, strict=True)))
    else:
        _put_all(
            store, [(key, b"".join(blob.buffers)) for key, blob in zip(keys, made, strict=True)]
        )
    return count


def segments(store: S3Store, count: int, size: int, ours: bool, name: str) -> int:
    rows = os.urandom(size)
    made = [
        blobs.make_blob(manifest(f"job_{n}"), [("rows", "int64", [size // 8], [rows])])
        for n in range(count)
    ]
    if ours:
        blobs.append(store.segment(f"t/segments/w.{name}.seg"), made)
    else:
        _put_all(
            store, [(f"t/small_{name}_{n}", b"".join(blob.buffers)) for n, blob in enumerate(made)]
        )
    return count


def _put_all(store: S3Store, objects: list[tuple[str, bytes]]) -> None:
    with ThreadPoolExecutor(REQUESTS) as pool:
        list(
            pool.map(
                lambda each: obstore.put(store.client, each[0], each[1], use_multipart=False),
                objects,
            )
        )


CASES: dict[str, tuple[int, Callable[..., int], dict[str, int]]] = {
    "one object of 256 MiB, in parts": (256 << 20, large, {"size": 256 << 20}),
    "64 files of 1 MiB": (64 << 20, files, {"count": 64, "size": 1 << 20}),
    "256 captures of 40 KiB": (256 * 40 << 10, segments, {"count": 256, "size": 40 << 10}),
}


def run(store: S3Store, rounds: int) -> list[dict[str, Any]]:
    found = []
    for name, (size, write, arguments) in CASES.items():
        taken: dict[bool, list[float]] = {True: [], False: []}
        client: dict[bool, list[float]] = {True: [], False: []}
        for number in range(rounds + 1):  # the first is not counted
            for ours in (True, False) if number % 2 else (False, True):
                began, spent = time.perf_counter(), time.process_time()
                count = write(store, **arguments, ours=ours, name=f"{number}.{ours}")
                if number:
                    taken[ours].append(time.perf_counter() - began)
                    client[ours].append((time.process_time() - spent) / count)
                store.delete("t/")
        ratios = [plain / own for own, plain in zip(taken[True], taken[False], strict=True)]
        found.append(
            {
                "case": name,
                "ratio": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
                "midstream_mib_s": size / statistics.median(taken[True]) / (1 << 20),
                "obstore_mib_s": size / statistics.median(taken[False]) / (1 << 20),
                "midstream_client_ms": 1e3 * statistics.median(client[True]),
                "obstore_client_ms": 1e3 * statistics.median(client[False]),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ |= s3_kit.ENVIRONMENT
    program = SERVER.format(tests=str(Path(s3_kit.__file__).parent))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            store = open_store(f"s3://bench/x?endpoint=http://{address}&region={s3_kit.REGION}")
            s3_kit.make_bucket(address, "bench")
            load = os.getloadavg()[0]
            found = run(store, options.rounds)
        finally:
            server.terminate()
    for each in found:
        print(
            f"{each['case']:<34} midstream {each['midstream_mib_s']:6.0f} MiB/s "
            f"({each['midstream_client_ms']:.2f} ms of ours per object), "
            f"obstore {each['obstore_mib_s']:6.0f} MiB/s ({each['obstore_client_ms']:.2f}): "
            f"{each['ratio']:.2f} "
            f"({each['least']:.2f} to {each['most']:.2f})"
        )
    print(json.dumps({"load": load, "cases": found}))


if __name__ == "__main__":
    main()

"""Requests of every kind for a rank that is killed, and what their files and receipts must hold."""

import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plane_kit import steered
from rank_kit import Request, stream_of

from midstream.schemas.jobs.captures import Manifest
from midstream.schemas.jobs.receipts import Receipt
from midstream.schemas.prompts.selectors import HOOKS
from midstream.schemas.readings.lens import LensPart, StoredLens
from midstream.schemas.readings.readings import part_decoder
from midstream.schemas.readings.stored import READER
from midstream.schemas.requests.specs import StoredCapture
from midstream.storage.blobs import read_entries
from midstream.storage.formats.capture_blobs import read_header
from midstream.storage.store import open_store

#: A tag whose folder cannot be made.
BLOCKED = "blocked"
_captured = partial(StoredCapture, sites={"post_block": [0, 1]}, positions="all", tag="t")
#: Kind → the request of this number.
KINDS: dict[str, Callable[[int], Request]] = {
    "one layer": lambda n: Request(
        n, 6, 9, [_captured(layout="packed", sites={"post_block": [1]})]
    ),
    "a stream": lambda n: Request(n, 12, 36, [_captured(layout="packed")], max_tokens=40),
    "two captures": lambda n: Request(
        n,
        8,
        12,
        [
            _captured(layout="per_file"),
            _captured(layout="segment", positions="all_generated", tag="u"),
        ],
    ),
    "steered": lambda n: steered(
        n, captures=[_captured(layout="packed", sites={"pre_attn": [0]}, at="after")]
    ),
    "every site": lambda n: Request(
        n, 6, 10, [_captured(layout="segment", sites={hook: [0, 1] for hook in HOOKS})]
    ),
    "no folder": lambda n: Request(n, 6, 8, [_captured(layout="packed", tag=BLOCKED)]),
    "a reading": lambda n: Request(
        n,
        7,
        9,
        [
            _captured(
                tag="r",
                sites={"post_block": [1]},
                consumers=[READER],
                reading=StoredLens(top_k=1),
            ),
            _captured(layout="packed"),
        ],
    ),
    "a stream for a segment": lambda n: Request(
        n, 5, 20, [_captured(layout="segment")], max_tokens=15
    ),
    "chunks": lambda n: Request(n, 45, 47, [_captured(layout="auto", positions="all_prompt")]),
    "no such layer": lambda n: Request(n, 6, 8, [_captured(sites={"post_block": [7]})]),
}
#: Kind → what the receipt of its failure says.
FAILS = {"no folder": "write failed", "no such layer": "layer"}


def kind_of(number: int) -> str:
    return list(KINDS)[number % len(KINDS)]


def request_of(number: int) -> Request:
    """Return the request of this number, from 1."""
    return KINDS[kind_of(number)](number)


def read(capture: Any, index: int) -> LensPart:
    """Compute a reading: the "logit" of each row is its first element."""
    rows = np.frombuffer(b"".join(capture.rows("post_block", 1)), "<f4")
    logits = rows.reshape(len(capture.positions), -1)[:, 0].tobytes()
    return LensPart(
        capture=index,
        shard=0,
        shards=1,
        hook="post_block",
        layers=[1],
        positions=capture.positions,
        token_ids=capture.token_ids,
        named=[],
        top=logits,
        logits=logits,
        total=logits,
    )


def _rows(request: Request, capture: StoredCapture, hook: str, layer: int) -> np.ndarray:
    """Return what a capture must hold, float32 `[positions, hidden]`."""
    positions = list(capture.select(0, request.total - 1, request.prompt_tokens))
    # after the edit of a steered request, which adds 2
    edit = np.float32(2 if capture.at == "after" else 0)
    return stream_of(request.number, hook, layer, 0, request.total)[positions] + edit


def check_blob(raw: bytes, where: str) -> Manifest:
    """Check that a blob is whole and has the known rows, to the bit; return its manifest."""
    header = read_header(lambda start, count: raw[start : start + count], len(raw))
    manifest = header.manifest
    request = request_of(int(header.manifest.job[1:]))
    (capture,) = (each for each in request.captures if each.tag == manifest.tag)
    positions = list(capture.select(0, request.total - 1, request.prompt_tokens))
    assert header.end == len(raw), f"{where}: {len(raw)} bytes"
    assert manifest.positions == positions, f"{where}: {manifest.positions}"
    assert manifest.token_ids == [1000 + position for position in positions], where
    for tensor in header.tensors.values():
        if tensor.site is not None:
            held = raw[tensor.start : tensor.start + tensor.length]
            wanted = _rows(request, capture, *tensor.site).tobytes()
            assert held == wanted, f"{where}: other rows at {tensor.name}"
    return manifest


def check_receipt(receipt: Receipt, root: Path) -> None:
    """Check what a receipt says, and the files that it names."""
    number = int(receipt.job[1:])
    request = request_of(number)
    kind = kind_of(number)
    status = ("error", "capture_failed") if kind in FAILS else ("ok", "")
    assert (receipt.status, receipt.kind) == status, receipt
    assert FAILS.get(kind, "") in receipt.message, receipt
    held: dict[str, dict[str, list[int]]] = {}
    for file in receipt.files:
        raw = (root / file.path).read_bytes()[file.offset :][: file.bytes]
        assert zlib.crc32(raw) == file.crc32, f"{receipt.job}: {file}"
        found = check_blob(raw, f"{receipt.job}: {file}")
        assert found.job == receipt.job
        assert found.attempt == receipt.attempt
        for hook, layers in found.sites.items():
            held.setdefault(file.tag, {}).setdefault(hook, []).extend(layers)
    stored = [each for each in request.captures if each.reading is None and kind not in FAILS]
    assert held == {each.tag: each.sites for each in stored}, receipt
    if kind == "a reading":
        (raw,) = (each.rows for each in receipt.consumed if each.name == READER)
        wanted = _rows(request, request.captures[0], "post_block", 1)[:, 0].tobytes()
        assert part_decoder.decode(raw).logits == wanted, f"{receipt.job}: a reading of other rows"
    largest = pytest.approx(2 / stream_of(number, "pre_attn", 0, 0, 1)[0, 0], rel=1e-5)
    sizes = [(each.hook, each.layer, each.rows, each.largest) for each in receipt.sizes]
    steered = [("pre_attn", 0, request.total - 1, largest)]
    assert sizes == (steered if kind == "steered" else []), receipt


def check_files(root: Path) -> None:
    """Check everything under a final name, whether a receipt names it or not."""
    store = open_store(str(root))
    for path in root.rglob("[!.]*.safetensors"):
        check_blob(path.read_bytes(), str(path))
    for path in root.rglob("[!.]*.json*"):
        for entry in read_entries(store, str(path.relative_to(root))):
            raw = (path.parent / entry.file).read_bytes()[entry.offset :][: entry.bytes]
            assert zlib.crc32(raw) == entry.crc32, f"{path}: {entry.offset}"
            check_blob(raw, f"{path}: {entry.offset}")

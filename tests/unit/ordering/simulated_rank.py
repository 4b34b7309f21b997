"""A rank's real data plane on the late device: a scheduler drawn from a seed drives it, and every
receipt and file is compared with what the requests asked for.
"""

import contextlib
import random
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn_requests import (
    BLOCK,
    SHAPE,
    SITES,
    SOURCE,
    WIDTHS,
    Asked,
    Decides,
    draw,
    junk,
    probe_tensors,
    rows_at,
    vector,
)
from late_device import KIND, Device
from rank_kit import nearby, plane_config, view_of
from visited_site import visit

from midstream.broker.receipts.outbox import Outbox
from midstream.kernels import STREAM, WHOLE
from midstream.schemas.base.records import from_msgpack
from midstream.schemas.base.tensors import content_hash
from midstream.schemas.jobs.receipts import BY_REQUEST, STORE_UNAVAILABLE, CapturedFile, Receipt
from midstream.schemas.model.banks import RESIDUAL
from midstream.schemas.requests.source_runs import RunFile, RunFiles, is_row, run_key
from midstream.schemas.requests.specs import StoredCapture
from midstream.storage.formats.capture_blobs import read_header
from midstream.storage.store import open_store
from midstream.workers.runner.base.config import RankPlace
from midstream.workers.runner.base.engine_step import Finish, NewRequest
from midstream.workers.runner.base.row_index import Keeping, RequestCaptures, RowIndex
from midstream.workers.runner.files import desk
from midstream.workers.runner.files.finished_rows import BankColumns
from midstream.workers.runner.hooks.sites import RankSite, Sizes, buffers_of
from midstream.workers.runner.plane.data_plane import DataPlane
from midstream.workers.runner.rows.banks import BankPart

#: Token rows of a step, requests that run together, and requests of a simulation.
CAPACITY = 40
TOGETHER = 5
REQUESTS = 12
#: Seconds that a source run's receipt may take, which only a deadlock reaches.
PATIENCE_S = 20.0
#: Kinds of failed receipts.
KINDS = {
    BY_REQUEST,
    STORE_UNAVAILABLE,
    *("capture_failed", "intervention_failed", "probe_failed", "reading_failed"),
}
#: What a request is told whose cached prompt's rows were lost with another request's failure.
_LOST = "served by the prefix cache, are not available"


@dataclass
class _Life:
    """A running request in the scheduler."""

    asked: Asked
    captures: RequestCaptures
    computed: int = 0  # tokens whose rows are computed and count
    surplus: bool = False  # a step after the end was computed, as asynchronous scheduling does
    preempted: bool = False


@dataclass
class Delivered:
    """A receipt when it was appended to the outbox, with the bytes of its files at that time."""

    receipt: Receipt
    blobs: list[bytes]
    wrong: list[str] = field(default_factory=list)  # what is wrong about the files


class Simulation:
    """One seed: a rank, its device, its scheduler and its requests."""

    def __init__(
        self, seed: int, folder: Path, patch: pytest.MonkeyPatch, *, decides: Decides
    ) -> None:
        self.seed = seed
        self.folder = folder
        self._draws = random.Random(seed)
        draws = self._draws
        self._decides = decides
        self.policy = ("block", "spill", "block", "drop")[seed % 4]
        # most steps repeat the one before: all requests generate one token in each
        self._calm = seed % 3 == 2
        self.device = Device(
            seed,
            haste=draws.choice([0.05, 0.3, 0.6]),
            behind=draws.choice(["any", "copies", "copies", "forward"]),
        )
        self.device.install(patch)
        patch.setattr(desk, "FLUSH_S", 0.0)
        self._store = open_store(str(folder / "captures"))
        self.delivered: list[Delivered] = []
        self._changed = threading.Condition()
        self._note_receipts(patch)
        self._traced = draws.random() < 0.7
        self._shares = self.policy != "drop" and draws.random() < 0.8
        self.asked = draw(draws, REQUESTS, shares=self._shares, calm=self._calm, decides=decides)
        self.step = 0
        self.findings: list[str] = []
        #: The step in which an injected failure happened; 0: none did.
        self.failed_at = 0
        self._contents = 0
        self._index = RowIndex(draws.choice([600, 3000, 20000]), 4 * WIDTHS[RESIDUAL], BLOCK)
        self._cached: set[bytes] = set()
        self._waiting = list(self.asked)
        self._running: list[_Life] = []
        self._begun: dict[int, int] = {}
        self._late_ends: list[tuple[str, int]] = []
        with self.device.calls():
            self._make_plane()

    def _make_plane(self) -> None:
        draws = self._draws
        banks = {
            RESIDUAL: [
                RankSite(hook, layer, "single", group=STREAM if hook == "post_block" else WHOLE)  # type: ignore[arg-type]
                for hook, layer in SITES[RESIDUAL]
            ],
            "query": [RankSite(hook, layer, "single") for hook, layer in SITES["query"]],  # type: ignore[arg-type]
        }
        self._sites = banks
        self._buffers = {
            name: buffers_of(
                len(sites),
                Sizes(
                    ring_rows=2 * 2 * len(sites) * CAPACITY,
                    capacity=CAPACITY,
                    lists=(2 * len(sites) + 1) * CAPACITY,
                    patterns=2 * len(sites),
                    configurations=14,
                    entries=20,
                ),
                WIDTHS[name],
                torch.float32,
                KIND,
            )
            for name, sites in banks.items()
        }
        self._hidden = self.device.full((CAPACITY, WIDTHS[RESIDUAL]), 0.0, torch.float32)
        config = plane_config(
            self.folder,
            steering_rows=14,
            steering_entries=20,
            step_tokens=CAPACITY,
            capture_queue_mib=int((self.policy == "block" and draws.random() < 0.5) or self._calm),
            capture_window_mib=0 if draws.random() < 0.5 else 64,
            capture_overload=self.policy,
            row_store_mib=1 if self._shares else 0,
            writer_threads=draws.choice([1, 2]),
            segment_limit_kib=1,
        )
        self.plane = DataPlane(
            config,
            RankPlace(rank=0, world=1, tp=0, pp=0, stages=1),
            banks[RESIDUAL],
            self._buffers[RESIDUAL],
            num_layers=2,
            traced=self._traced,
            inside=[
                BankPart(
                    "query",
                    banks["query"],
                    self._buffers["query"],
                    BankColumns(SHAPE, 0, SHAPE.size),
                )
            ],
            connect=nearby,
        )
        if self._shares:
            self.plane.block_size = BLOCK
        tensors = [vector(1, RESIDUAL), vector(1, "query"), *probe_tensors()]
        self.plane.rank_state.vectors.put({content_hash(tensor): tensor for tensor in tensors})

    # --- Receipts

    def _note_receipts(self, patch: pytest.MonkeyPatch) -> None:
        """Look at each receipt's files when it enters the outbox: a reader may do so then."""
        append = Outbox.append

        def noting(outbox: Outbox, receipt: Receipt, *more: Callable[[], object]) -> None:
            found = Delivered(receipt, [])
            for file in receipt.files:
                try:
                    found.blobs.append(self._read(file))
                except Exception as error:
                    found.wrong.append(f"{file.path} is not there with its receipt: {error!r}")
            append(outbox, receipt, *more)
            with self._changed:
                self.delivered.append(found)
                self._changed.notify_all()

        patch.setattr(Outbox, "append", noting)

    def _read(self, file: CapturedFile) -> bytes:
        with self._store.open(file.path) as handle:
            blob = bytes(handle.read(file.offset, file.bytes))
        if zlib.crc32(blob) != file.crc32:
            raise ValueError("its checksum is wrong")
        return blob

    def _load_source(self) -> bool:
        """Load the source run once its receipt is there; return whether it was captured."""
        with self._changed:
            job = f"j{SOURCE}"
            arrived = self._changed.wait_for(
                lambda: any(item.receipt.job == job for item in self.delivered), PATIENCE_S
            )
        if not arrived:
            raise TimeoutError(f"no receipt of {job}")
        receipt = next(item.receipt for item in self.delivered if item.receipt.job == job)
        if receipt.status != "ok":
            return False
        (source,) = self.asked[SOURCE].captures
        self.plane.runs.put(
            RunFiles(
                key=run_key(job, 0, source.tag),
                sites=source.sites,
                positions=self.asked[SOURCE].positions(source),
                hidden_size=WIDTHS[RESIDUAL],
                bytes=0,
                files=[
                    RunFile(file.path, file.offset, file.bytes, file.crc32)
                    for file in receipt.files
                ],
            )
        )
        return True

    # --- Steps

    def run(self) -> list[str]:
        """Run all requests to their end; return what is wrong."""
        with self.device.calls():
            self._advance(first=True)
            while self._running:
                self._advance(first=True)
            if not self._load_source():
                self._waiting = [
                    item
                    for item in self._waiting
                    if not any(is_row(name) for entry in item.steering for name in entry.tensors)
                ]
            while self._waiting or self._running:
                self._advance()
            for _ in range(2):
                self._advance()
            status = self.plane.status()
            self.findings += [
                f"{name} is {status[name]} when all requests are over"
                for name in ("requests", "rows_used", "entries_used")
                if status[name]
            ]
            self.plane.close()
        self._compare()
        return self.findings

    def _advance(self, *, first: bool = False) -> None:
        """Run one step. `first`: only the source's request begins."""
        draws = self._draws
        keeping = Keeping()
        self.step += 1
        finished, ends = self._ended()
        resumed: dict[str, int] = {}
        new: list[NewRequest] = []
        preempted = 0
        for life in self._running:
            if life.preempted and draws.random() < 0.6:
                life.preempted = False
                life.computed = cached = self._served(life, keeping)
                if draws.random() < 0.5:
                    resumed[life.asked.id] = cached
                else:  # as the v2 runner does
                    new.append(self._arrival(life.asked, cached, 0))
            elif not life.preempted and life.computed and not life.surplus:
                life.preempted = draws.random() < (0.01 if self._calm else 0.04)
                preempted += life.preempted
        while (
            self._waiting
            and len(self._running) < TOGETHER
            and (not self._begun if first else draws.random() < 0.7)
        ):
            asked = self._waiting.pop(0)
            life = _Life(asked, RequestCaptures(asked.spec))
            self._running.append(life)
            self._begun[asked.number] = self.step
            life.computed = self._served(life, keeping)
            new.append(self._arrival(asked, life.computed, asked.max_tokens))
        windows = self._windows(keeping)
        keeping.drop = self._index.dropped()
        self.plane.begin(new, finished, preempted, keeping, resumed, ends)
        placed = [(life.asked.id, start, count) for life, start, count, _ in windows]
        family = self.plane.choose(placed)
        contents = [content for *_, tokens in windows for content in tokens]
        inputs = torch.tensor(contents, dtype=torch.int32)
        self.plane.plan(view_of(*placed, inputs=inputs))
        hidden = None
        if contents:
            broken = [
                life.asked.breaks_at == start + place
                for life, start, count, _ in windows
                for place in range(count)
            ]
            self._forward(contents, broken, family=family)
            hidden = self._hidden
        self.plane.drain(hidden)
        if draws.random() < 0.1:  # a forward of no request
            self.plane.plan_nothing()
            self._contents += 1
            self._forward([junk(self._contents)] * CAPACITY, [False] * CAPACITY, family=WHOLE)

    @staticmethod
    def _arrival(asked: Asked, cached: int, max_tokens: int) -> NewRequest:
        prompt = asked.tokens[: asked.prompt]
        return NewRequest(asked.id, asked.spec, cached, max_tokens, token_ids=prompt)

    def _ended(self) -> tuple[dict[str, Finish], list[tuple[str, int]]]:
        """Return the requests that ended before this step, and the ends that the worker reports."""
        draws = self._draws
        finished = {}
        ends = [*self._late_ends]
        self._late_ends = []
        for life in list(self._running):
            asked = life.asked
            cancelled = asked.ending == "cancel" and life.computed >= asked.cancelled_after
            if not cancelled and life.computed < asked.total - 1:
                continue
            if not cancelled and not life.surplus and draws.random() < 0.4:
                life.surplus = True
                continue
            self._running.remove(life)
            finished[asked.id] = Finish(
                asked.tokens, cancelled or (asked.ending == "stop" and draws.random() < 0.7)
            )
            if cancelled or asked.ending == "stop":
                end = asked.spec.key, -1 if cancelled else asked.kept
                (ends if draws.random() < 0.6 else self._late_ends).append(end)
        return finished, ends

    def _served(self, life: _Life, keeping: Keeping) -> int:
        """Return how many tokens the prefix cache serves a request that begins or resumes."""
        asked = life.asked
        if not self._shares or asked.steering:
            return 0
        blocks = 0
        for name in asked.hashes:
            if name not in self._cached:
                break
            blocks += 1
        reach = self._index.reach(life.captures, asked.hashes)
        cached = min(blocks * BLOCK, reach, asked.prompt - 1) // BLOCK * BLOCK
        keeping.serve += self._index.serve(asked.id, life.captures, asked.hashes, cached)
        return cached

    def _windows(self, keeping: Keeping) -> list[tuple[_Life, int, int, list[int]]]:
        """Return (request, first position, count, tokens) of this step."""
        draws = self._draws
        room = CAPACITY
        windows = []
        for life in self._running:
            asked = life.asked
            start = life.computed
            skips = draws.random() < (0.002 if self._calm else 0.1)
            if life.preempted or skips or room < 4:
                continue
            if start < asked.prompt:
                count = min(asked.prompt - start, draws.choice([2, 5, 20]), room)
                tokens = [asked.content(position) for position in range(start, start + count)]
                life.computed = start + count
            else:
                drafts = 0 if self._calm else draws.choice([0, 0, 1, 2])
                drafts = 0 if asked.gate is not None else drafts  # an engine with drafts has none
                accepted = 0 if life.surplus else draws.randint(0, drafts)
                accepted = max(0, min(accepted, asked.total - 2 - start))
                count = 1 + drafts
                right = 0 if life.surplus else 1 + accepted
                tokens = [asked.content(start + place) for place in range(right)]
                for place in range(right, count):
                    self._contents += 1
                    # a token that comes later may open a trigger too early
                    later = self._decides == "tokens" and start + place + 1 < asked.total
                    tokens.append(
                        asked.content(start + place + 1) if later else junk(self._contents)
                    )
                life.computed = start + right
            room -= count
            windows.append((life, start, count, tokens))
            if self._shares and not asked.steering:
                keeping.keep += self._index.keep(
                    asked.id, life.captures, asked.hashes, start, start + count
                )
                full = min(start + count, asked.prompt) // BLOCK
                self._cached |= set(asked.hashes[:full])
        return windows

    def _forward(self, contents: list[int], broken: list[bool], *, family: int) -> None:
        tokens = np.array(contents)
        for name, sites in self._sites.items():
            for number, site in enumerate(sites):
                if site.group >= family and (self._traced or site.busy):
                    rows = rows_at((site.hook, site.layer), tokens)
                    self.device.launch(partial(visit, self._buffers[name], number, rows))
        left = torch.zeros(len(contents), WIDTHS[RESIDUAL])
        left[torch.tensor(broken)] = float("nan")
        content = self._hidden.content
        self.device.launch(lambda: content.__setitem__(slice(len(left)), left))

    # --- The comparison

    def _compare(self) -> None:
        self.findings += [f"the device: {error!r}" for error in self.device.errors]
        if sorted(self._stored_receipts()) != sorted(item.receipt.job for item in self.delivered):
            self.findings.append("the outbox has other receipts than were appended")
        for asked in self.asked:
            if asked in self._waiting or asked.number not in self._begun:
                continue
            mine = [item for item in self.delivered if item.receipt.job == asked.spec.job]
            self.findings += [f"{asked.spec.job}: {wrong}" for wrong in self._wrong(asked, mine)]

    def _stored_receipts(self) -> list[str]:
        (file,) = (self.folder / "outbox").glob("*.sqlite")
        with contextlib.closing(sqlite3.connect(file)) as database:
            rows = database.execute("SELECT payload FROM receipts ORDER BY seq").fetchall()
        return [from_msgpack(row[0], Receipt).job for row in rows]

    def _wrong(self, asked: Asked, mine: list[Delivered]) -> Iterator[str]:
        if len(mine) > 1:
            yield f"{len(mine)} receipts"
        if not mine:
            if asked.ending != "cancel":
                yield "no receipt"
            return
        found, *_ = mine
        receipt = found.receipt
        if receipt.status == "error":
            yield from self._wrong_failure(asked, receipt)
            return
        if asked.ending == "cancel":
            yield "a receipt of a cancelled request"
            return
        if asked.breaks_at >= 0:
            yield "a row after its edits is not finite, and it did not fail"
        if receipt.status == "partial" and self.policy != "drop":
            yield f"partial: {receipt.message}"
        yield from found.wrong
        if not found.wrong:
            yield from self._wrong_rows(asked, found)
        sizes = {(size.hook, size.layer, size.rows): size.largest for size in receipt.sizes}
        # of what the engine computed until a stop string was found, the last step alone is left out
        if sizes != (wanted := pytest.approx(asked.sizes(), rel=1e-5)):
            yield f"sizes {sizes} instead of {wanted}"
        if asked.probed:
            scores = np.frombuffer(receipt.scores[0].tokens, dtype="<f4")
            wanted = asked.scores(asked.stop)
            if scores.shape != (asked.stop,) or not np.allclose(scores, wanted, rtol=1e-5):
                yield f"scores {scores} instead of {wanted}"
            if receipt.scores[0].gated != (is_open := len(asked.open(asked.stop))):
                yield f"{receipt.scores[0].gated} gated positions instead of {is_open}"

    def _wrong_failure(self, asked: Asked, receipt: Receipt) -> Iterator[str]:
        if receipt.kind not in KINDS or not receipt.message:
            yield f"a failure without a reason: {receipt.kind!r} {receipt.message!r}"
        if asked.breaks_at >= 0 and receipt.kind == "intervention_failed":
            return
        concerned = self.failed_at and (
            self._begun[asked.number] <= self.failed_at or _LOST in receipt.message
        )
        if not concerned:
            yield f"failed without a cause: {receipt.kind} {receipt.message}"

    def _wrong_rows(self, asked: Asked, found: Delivered) -> Iterator[str]:
        held: dict[str, dict[tuple[str, int], torch.Tensor]] = {}
        places: dict[str, tuple[list[int], list[int], list[int]]] = {}
        for blob in found.blobs:
            header = read_header(
                lambda start, count, blob=blob: blob[start : start + count], len(blob)
            )
            manifest = header.manifest
            if manifest.job != asked.spec.job:
                yield f"its file is of {manifest.job}"
            places[manifest.tag] = manifest.positions, manifest.token_ids, manifest.dropped
            for tensor in header.tensors.values():
                if tensor.site is not None:
                    raw = bytearray(blob[tensor.start : tensor.start + tensor.length])
                    dtype = getattr(torch, manifest.dtype)
                    held.setdefault(manifest.tag, {})[tensor.site] = (
                        torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
                    ).view(tensor.shape)
        for capture in asked.captures:
            if capture.tag not in places:
                yield f"no file of {capture.tag}"
                continue
            yield from self._wrong_capture(
                asked, capture, held.get(capture.tag, {}), *places[capture.tag]
            )

    def _wrong_capture(
        self,
        asked: Asked,
        capture: StoredCapture,
        held: dict[tuple[str, int], torch.Tensor],
        positions: list[int],
        token_ids: list[int],
        dropped: list[int],
    ) -> Iterator[str]:
        wanted = asked.positions(capture)
        if sorted({*positions, *dropped}) != wanted or (dropped and self.policy != "drop"):
            yield f"{capture.tag} has positions {positions}, dropped {dropped}, of {wanted}"
            return
        if token_ids != [asked.content(position) for position in positions]:
            yield f"{capture.tag} has tokens {token_ids}"
        kept = np.isin(wanted, positions)
        for site, rows in asked.wanted(capture).items():
            right = torch.from_numpy(rows[kept])
            if site not in held:
                yield f"{capture.tag} lacks {site}"
            elif not torch.equal(held[site], right.to(held[site].dtype)):
                bad = (held[site].float() != right).any(dim=1).nonzero().flatten().tolist()
                yield (
                    f"{capture.tag} has other rows at {site}, positions "
                    f"{[positions[place] for place in bad]}: {held[site][bad[0]].tolist()} instead "
                    f"of {right[bad[0]].tolist()}"
                )


def simulate(
    seed: int,
    folder: Path,
    fault: Callable[[pytest.MonkeyPatch, Simulation], None] = lambda patch, simulation: None,
    *,
    decides: Decides = "nothing",
) -> Simulation:
    """Run one seed; its findings are in the result. `fault` changes the code before. `decides`:
    what decides where steering is applied.
    """
    with pytest.MonkeyPatch.context() as patch:
        simulation = Simulation(seed, folder, patch, decides=decides)
        fault(patch, simulation)
        simulation.run()
    return simulation

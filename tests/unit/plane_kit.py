"""A rank's whole data plane with real files and a real outbox, and requests for it; the forward
only visits the sites.
"""

import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from midstream_fake_engine.rank_faults import Faults, inject
from rank_kit import HIDDEN, Rank, Request, make_buffers, nearby, plane_config, steering, view_of

from midstream import __version__
from midstream.broker.receipts.outbox import Outbox
from midstream.client.captures.reader import CaptureReader
from midstream.kernels import WHOLE, in_family
from midstream.schemas.artifacts.probes import ProbeAction, ProbeContent, StoredProbe
from midstream.schemas.base.records import from_msgpack
from midstream.schemas.base.tensors import content_hash, from_numpy
from midstream.schemas.jobs.receipts import Receipt
from midstream.schemas.prompts.selectors import lowest_position
from midstream.schemas.requests.specs import (
    RankSpec,
    StoredCapture,
    occurrences,
    probe_captures,
    steering_digest,
)
from midstream.schemas.requests.steering import GlobalSteering, SteeringTemplate
from midstream.workers.runner.base.config import RankPlace
from midstream.workers.runner.base.engine_step import Finish, NewRequest
from midstream.workers.runner.base.row_index import Keeping
from midstream.workers.runner.plane.data_plane import DataPlane
from midstream.workers.runner.plane.layer_gate import LayerGate
from midstream.workers.runner.rows.delivery import RowConnection

CAPACITY = 64
VECTOR = from_numpy(np.full(HIDDEN, 2.0, dtype=np.float32))


class Adapters:
    """Adapters of a rank on which every row is computed as its request needs."""

    def names(self) -> list[str]:
        return []

    def used(self, *_: Any) -> tuple[int, ...]:
        return ()

    def account(self, *_: Any) -> None:
        return


class Rig:
    """One rank's data plane with real files and a real outbox; the forward only visits the
    sites.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int = 0,
        world: int = 1,
        traced: bool = False,
        gate: LayerGate | None = None,
        loras: Any = None,
        connect: RowConnection = nearby,
        **options: Any,
    ) -> None:
        """`world` ranks are one stage.

        `traced`: its forward does not ask whether a site is busy. `gate`, `loras`, `connect`: see
        `DataPlane`; by default this process writes the files.
        """
        self.directory = directory
        usual: dict[str, Any] = {
            "steering_rows": 3,
            "steering_entries": 16,
            "step_tokens": CAPACITY,
            "sweep_entry": True,
            "fault": "rpc",
        }
        config = plane_config(directory, **(usual | options))
        self._rank = Rank(capacity=CAPACITY, traced=traced)
        sizes = {
            "configurations": config.steering_rows,
            "entries": config.steering_entries,
        }
        self._rank.buffers = make_buffers(len(self._rank.sites), capacity=CAPACITY, **sizes)
        self.plane = DataPlane(
            config,
            RankPlace(rank=rank, world=world, tp=rank, pp=0, stages=1),
            self._rank.sites,
            self._rank.buffers,
            num_layers=2,
            traced=traced,
            gate=gate,
            loras=loras,
            connect=connect,
        )
        self.plane._delivery.held[0] = ()  # a step does what it does while writers work
        self.desk = self.plane._delivery._near.desk
        self.writer = self.desk.writer
        self.faults = Faults(config.fault, rank)
        inject(self.plane, self.faults)
        self.family = WHOLE  # of the last forward
        #: The tokens of each request, by its number, of which a test may have drafts.
        self.tokens: dict[int, list[int]] = {}
        self.plane.rank_state.vectors.put({content_hash(VECTOR): VECTOR})

    def left(self, hook: str, layer: int) -> np.ndarray:
        """The stream behind a site in the last forward: float32 `[rows, HIDDEN]`."""
        return self._rank.left[hook, layer]

    def vector(self, number: float) -> str:
        """The name of a vector `[number, …]`, which is on the rank."""
        tensor = from_numpy(np.full(HIDDEN, number, dtype=np.float32))
        self.plane.rank_state.vectors.put({content_hash(tensor): tensor})
        return content_hash(tensor)

    def step(
        self,
        *windows: tuple[Request, int, int],
        new: Sequence[Request] = (),
        finished: Sequence[Request] = (),
        aborted: Sequence[Request] = (),
        keeping: Keeping | None = None,
        hidden: Sequence[float] = (),
        cached: int = 0,
        told: Sequence[tuple[Request, int, int]] = (),
    ) -> None:
        """`hidden`: of each row what leaves the last layer, in every element; empty: this is not
        the last stage.

        `cached`: tokens of the last new request that the prefix cache serves. `told`: the windows
        that the scheduler sends, where they are others than the runner's.
        """
        ends = {
            str(r.number): Finish(list(range(1000, 1000 + r.total)), r in aborted)
            for r in (*finished, *aborted)
        }
        arrived = [
            NewRequest(
                str(r.number),
                spec_of(r, self._tokens(r)),
                cached if r is new[-1] else 0,
                r.max_tokens,
                token_ids=self._tokens(r)[: r.prompt_tokens],
            )
            for r in new
        ]
        self.plane.begin(arrived, ends, 0, keeping)
        self.family = self.plane.choose(
            (str(request.number), first, count) for request, first, count in told or windows
        )
        tokens = [self._tokens(r)[first + n] for r, first, count in windows for n in range(count)]
        ids = torch.tensor(tokens, dtype=torch.int32)
        of_step = ((str(r.number), first, count) for r, first, count in windows)
        self.plane.plan(view_of(*of_step, inputs=ids))
        if windows:
            with in_family(self.family):
                self._rank.forward(*windows)
        self.plane.drain(torch.tensor(hidden)[:, None].expand(-1, HIDDEN) if hidden else None)

    def _tokens(self, request: Request) -> list[int]:
        return self.tokens.setdefault(request.number, list(range(1000, 2000)))

    def receipts(self) -> list[Receipt]:
        """All so far; closes the plane."""
        if isinstance(self.desk.outbox, Outbox):
            self.writer.close()
            self.desk.outbox.close()
        else:
            self.plane.close()
        (file,) = (self.directory / "outbox").glob("*.sqlite")
        with contextlib.closing(sqlite3.connect(file)) as database:
            return [
                from_msgpack(row[0], Receipt)
                for row in database.execute("SELECT payload FROM receipts ORDER BY seq")
            ]

    def ended(self, request: Request) -> Receipt:
        """The only receipt, of a request that ends here; closes the plane."""
        self.step(finished=[request])
        (receipt,) = self.receipts()
        return receipt

    def told(self) -> dict[str, Receipt]:
        """Job → its receipt; closes the plane."""
        return {receipt.job: receipt for receipt in self.receipts()}

    def reader(self, request: Request) -> CaptureReader:
        return CaptureReader(self.directory / "captures", f"j{request.number}")


def spec_of(request: Request, tokens: Sequence[int] = ()) -> RankSpec:
    """`tokens`: with which its prompt begins."""
    spec = request.tracked.spec
    return msgspec.structs.replace(
        spec,
        version=__version__,
        occurrences=occurrences(spec.steering, tokens[: spec.prompt_tokens]),
        digest=steering_digest(spec.steering),
        first_affected=min(
            (lowest_position(entry.positions, spec.prompt_tokens) for entry in spec.steering),
            default=-1,
        ),
        global_version=request.everyone.version,
    )


def capturing(number: int, prompt: int = 6, total: int = 8, **options) -> Request:
    return Request(
        number,
        prompt,
        total,
        [StoredCapture(sites={"post_block": [0, 1]}, positions="all", tag="t", **options)],
    )


def steered(
    number: int,
    scale: float = 1.0,
    captures: Sequence[StoredCapture] = (),
    vector: str = content_hash(VECTOR),
    everyone: GlobalSteering | None = None,
) -> Request:
    return Request(
        number,
        6,
        8,
        captures,
        [steering(vector, [0], "pre_attn", scale=scale)],
        everyone or GlobalSteering(),
    )


def for_everyone(version: int, *entries: SteeringTemplate) -> GlobalSteering:
    return GlobalSteering(version=version, entries=list(entries))


def template(
    vector: str = content_hash(VECTOR),
    *,
    scale: float = 1.0,
    positions: Any = "all",
    layers: Sequence[int] = (0,),
) -> SteeringTemplate:
    return SteeringTemplate(
        layers=list(layers),
        hook="pre_attn",
        positions=positions,
        family="add",
        tensors=[vector],
        scale=scale,
    )


def run(rig: Rig, *requests: Request) -> None:
    """Prefill of all, one step of decoding, and the end."""
    rig.step(*((request, 0, 6) for request in requests), new=requests)
    rig.step(*((request, 6, 1) for request in requests))
    rig.step(finished=requests)


#: The weights of the probe of `probed`.
WEIGHT = np.random.default_rng(0).normal(size=(1, HIDDEN)).astype(np.float32)


def probed(
    rig: Rig,
    action: ProbeAction,
    number: int = 1,
    *,
    weight: np.ndarray = WEIGHT,
    threshold: float = 1e9,
    total: int = 8,
) -> Request:
    """A request of 6 prompt tokens, with a probe at layer 1."""
    tensors = [from_numpy(weight), from_numpy(np.full(1, 0.5, dtype=np.float32))]
    rig.plane.rank_state.vectors.put({content_hash(tensor): tensor for tensor in tensors})
    content = ProbeContent(
        hook="post_block",
        layer=1,
        tensors=[content_hash(tensor) for tensor in tensors],
        labels=["x"],
        thresholds=[threshold],
    )
    probe = StoredProbe(
        name="p",
        digest=content.digest,
        content=content,
        actions=[] if action == "none" else [action],
        tokens=True,
    )
    request = Request(number, 6, total, probe_captures([probe]))
    request.tracked.spec.probes.append(probe)
    return request

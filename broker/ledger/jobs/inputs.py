"""Keeps what a job brings with it, tensors and images, if it is large: one object of the artifact
store for each job, because Redis takes every byte, and writes it to its log, on the one thread that
all jobs wait for.

Where a worker of the model has another store, as on several machines without a shared folder, and
where none is there, Redis takes all.

The object is durable before the job is accepted, and the job names its size and hash. It is removed
once the job has ended; so is one whose job was not accepted, as soon as nothing can accept it any
more. See docs/decisions/0050-inputs.md.
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

import msgspec

from ....schemas.base.errors import MidstreamError, Translated
from ....schemas.base.records import from_msgpack, to_msgpack
from ....schemas.base.tensors import PackedBlobs
from ....schemas.jobs.jobs import TERMINAL, Inputs, Job
from ....schemas.jobs.models import WorkerInfo
from ....storage.store import below, committed, open_store
from .ledger import Ledger, LedgerPart, accepted_at, of_each, reachable

log = logging.getLogger(__name__)

#: Bytes that a job's tensors and images take above which they are an object of the store.
LARGE = 1 << 18
#: Seconds after which nothing accepts a job whose object is there.
GRACE_S = 600.0
#: Seconds between two looks for objects that nobody needs.
SWEEP_AGAIN_S = 30.0
#: The folder in the artifact store, which no tag of captures can be.
FOLDER = ".inputs"
#: The folder in it with the last start of each worker that has it.
SIGNS = "workers"


class LedgerInputs(LedgerPart):
    """Keeps what the ledger's jobs bring, in the artifact store of its settings."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self.store = open_store(below(ledger.settings.artifacts, FOLDER))
        self._again = 0.0  # when the store is looked at again

    @asynccontextmanager
    async def kept(self, job: Job, blobs: PackedBlobs) -> AsyncIterator[tuple[Job, PackedBlobs]]:
        """Yield the job and the blobs for the ledger to accept: large ones are in the store, if the
        workers have it, and the job says so. They are removed if the block refuses the job.

        Raises MidstreamError("unavailable") if the store takes nothing.
        """
        inputs = None
        if sum(map(len, blobs.values())) >= LARGE:
            with Translated(OSError, _away):
                if await self._reaches(job):
                    inputs = await asyncio.to_thread(self._write, job.id, blobs)
        if inputs is None:
            yield job, blobs
            return
        try:
            yield msgspec.structs.replace(job, inputs=inputs), {}
        except MidstreamError as error:
            if error.kind != "unavailable":  # else the job may have been accepted
                await self.discard(job.id)
            raise

    async def sign(self, worker: str, boot: str) -> None:
        """Let those who accept jobs know that this worker reads and writes the store that they do.

        Raises OSError.
        """
        await asyncio.to_thread(self._put, _sign_of(worker), boot.encode())

    async def read(self, job: Job) -> PackedBlobs:
        """Return what `kept` wrote for the job.

        Raises OSError if the store cannot be read, MidstreamError("intervention_failed") if the
        object is gone or is not what was written.
        """
        if job.inputs is None:
            return {}
        with Translated(
            FileNotFoundError,
            lambda error: MidstreamError(
                "intervention_failed",
                f"the tensors of {job.id} are no longer in the artifact store: {error}",
            ),
        ):
            return await asyncio.to_thread(self._read, job.id, job.inputs)

    async def discard(self, job_id: str) -> None:
        """Remove what the job brought, if anything; what cannot be removed is left to `sweep`."""
        try:
            await asyncio.to_thread(self._remove, [job_id])
        except OSError as error:
            log.warning("inputs of %s are left in %s: %s", job_id, self.store.uri, error)

    @reachable
    async def sweep(self, at: float) -> list[str]:
        """Remove what jobs brought that have ended or were never accepted; return their ids.

        Raises MidstreamError("unavailable") if Redis is unreachable, OSError.
        """
        if at < self._again:
            return []
        self._again = at + SWEEP_AGAIN_S
        names = await asyncio.to_thread(self._names)
        states = await of_each(
            self._redis, names, lambda pipe, name: pipe.hget(f"ms:job:{name}", "state")
        )
        ended = [
            name
            for name, state in zip(names, states, strict=True)
            if (accepted_at(name) + GRACE_S < at if state is None else state.decode() in TERMINAL)
        ]
        await asyncio.to_thread(self._remove, ended)
        return ended

    async def _reaches(self, job: Job) -> bool:
        """Return whether all workers that serve the job's model have signed in this store: on
        several machines, a folder may be another on each. False if none serves it.
        """
        live = await self._ledger.workers(queue=None)
        serving = [info for info in live if info.model == job.model]
        return bool(serving) and await asyncio.to_thread(lambda: all(map(self._signed, serving)))

    def _signed(self, info: WorkerInfo) -> bool:
        with suppress(FileNotFoundError), self.store.open(_sign_of(info.worker)) as sign:
            return sign.read(0, sign.size) == info.boot.encode()
        return False

    def _put(self, key: str, raw: bytes) -> None:
        with committed(self.store) as writer:
            writer.append(key, [raw])

    def _write(self, job_id: str, blobs: PackedBlobs) -> Inputs:
        raw = to_msgpack(blobs)
        self._put(_key(job_id), raw)
        return Inputs(bytes=len(raw), digest=hashlib.sha256(raw).hexdigest())

    def _read(self, job_id: str, inputs: Inputs) -> PackedBlobs:
        with self.store.open(_key(job_id)) as stored:
            raw = stored.read(0, inputs.bytes)
        if hashlib.sha256(raw).hexdigest() != inputs.digest:
            raise MidstreamError(
                "intervention_failed",
                f"the tensors of {job_id} in the artifact store do not match their hash",
            )
        return from_msgpack(raw, dict[str, bytes])

    def _names(self) -> list[str]:
        """Return the jobs of which something is in the store, or is being removed."""
        folders = {key.rstrip("/") for key in self.store.children()}
        return sorted((folders | {*self.store.marks()}) - {SIGNS})

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            self.store.delete(f"{name}/")
            self.store.unmark(name)


def _away(error: OSError) -> MidstreamError:
    return MidstreamError(
        "unavailable", f"the job's tensors cannot be written to the artifact store: {error}"
    )


def _sign_of(worker: str) -> str:
    return f"{SIGNS}/{worker}"


def _key(job_id: str) -> str:
    # in a folder, with which the unfinished file of a killed writer is removed
    return f"{job_id}/tensors"

"""The tests' side of `engine_process`: start an engine, run jobs on it, read its receipts and
files.
"""

import atexit
import base64
import contextlib
import itertools
import sqlite3
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from engine_process import Answer, Command
from nursery import Nursery
from reference import Edit

from midstream.api.resolve.edits.steering import resolve_edits
from midstream.api.resolve.positions.captures import Bounds, PromptFacts
from midstream.broker.processes.leftovers import remove_left
from midstream.client.captures.reader import CaptureReader
from midstream.schemas.artifacts.loras import StoredLora
from midstream.schemas.artifacts.probes import StoredProbe
from midstream.schemas.base.records import from_json, from_msgpack, to_msgpack
from midstream.schemas.base.tensors import Tensor, content_hash, from_numpy, to_numpy
from midstream.schemas.jobs.jobs import Job, Output, Sampling, StoredPrompt
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.jobs.receipts import Receipt
from midstream.schemas.prompts.selectors import Hook, PositionSelector
from midstream.schemas.requests.interventions import STEERING_FIELDS
from midstream.schemas.requests.source_runs import RunFile, RunFiles, run_key
from midstream.schemas.requests.specs import PatchSpec, SteeringSpec, StoredCapture, StoredSteering
from midstream.schemas.settings.settings import load_settings, to_environment

_numbers = itertools.count()
#: Nobody listens there: receipts stay in the outbox, where the tests read them.
NO_RELAY = "tcp://127.0.0.1:9"
#: Of every engine here, unless a test says otherwise. Block boundaries are spelled out in tests:
#: 128 tokens.
DEFAULTS: dict[str, Any] = {
    "engine.dtype": "float32",
    "engine.max_model_len": 512,
    "kv_cache_gib": 0.25,
    "engine.max_num_seqs": 32,
    "engine.block_size": 128,
    "certify": False,
}


def capture_of(
    layers: list[int],
    positions: PositionSelector,
    tag: str = "default",
    hook: Hook = "post_block",
    **options: Any,
) -> StoredCapture:
    """`layers` at one hook; `sites` instead for several."""
    return StoredCapture(
        **({"sites": {hook: layers}, "positions": positions, "tag": tag} | options)
    )


def steer(
    vector: str,
    layers: list[int],
    scale: float = 1.0,
    positions: PositionSelector = "all",
    hook: Hook = "post_block",
    limit: float = 0.0,
) -> StoredSteering:
    """Add `scale` times a vector."""
    return StoredSteering(
        layers=layers,
        hook=hook,
        positions=positions,
        family="add",
        tensors=[vector],
        scale=scale,
        limit=limit,
    )


#: Variables that count when modules are imported; others reach the engine through its fork.
AT_IMPORT = (
    "PYTHONPATH",
    "HF_HUB_CACHE",
    "TRITON_INTERPRET",
    "HIDDEN_CPU_FLAGS",
    "ONEDNN_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
)


@cache
def nursery_with(env: tuple[tuple[str, str], ...]) -> Nursery:
    folder = tempfile.TemporaryDirectory()
    nursery = Nursery(Path(folder.name), dict(env))
    atexit.register(folder.cleanup)
    atexit.register(nursery.close)
    return nursery


def shared_nursery(env: Mapping[str, str]) -> Nursery:
    """The one of this test process that has imported everything under `env`."""
    return nursery_with(tuple((name, env[name]) for name in AT_IMPORT if name in env))


class Host:
    """One engine, in processes of its own; with `nursery` in a fork of it alone."""

    def __init__(
        self,
        directory: Path,
        model: Path,
        env: dict[str, str] | None = None,
        nursery: Nursery | None = None,
        **settings: Any,
    ):
        options: dict[str, Any] = {**DEFAULTS, **settings}
        self.settings = load_settings(
            {},
            model=str(model),
            data_dir=str(directory),
            relay_url=NO_RELAY,
            worker_id="test-worker",
            **options,
        )
        self.root = self.settings.capture_root
        self._log = open(directory / "engine.log", "wb")  # noqa: SIM115 - open as long as the process
        self._process = (nursery or shared_nursery(env or {})).fork(
            {**to_environment(self.settings), **(env or {})}, Path(self._log.name), not nursery
        )
        self._vectors: dict[str, Tensor] = {}
        self.runs: dict[str, RunFiles] = {}  # that jobs may be patched with
        self.files: dict[str, bytes] = {}  # images of jobs by their digests
        try:
            self.info = self._answer().info
        except BaseException:  # also of a test whose time is over
            self.close()
            raise

    def _answer(self) -> Answer:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the engine process ended:\n{self.log()[-3000:]}"
        return from_json(line, Answer)

    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def send(self, command: Command) -> Answer:
        assert self._process.stdin is not None
        self._process.stdin.write(base64.b64encode(to_msgpack(command)) + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def call(self, method: str, *arguments: Any) -> Any:
        """Of `midstream_…` every rank's answer; of other methods the engine's."""
        return self.send(Command(call=method, arguments=list(arguments))).result

    def vector(self, values: np.ndarray) -> str:
        """Register a steering vector; returns its content hash."""
        tensor = from_numpy(values.astype(np.float32))
        self._vectors[content_hash(tensor)] = tensor
        return content_hash(tensor)

    def array(self, name: str) -> np.ndarray:
        """The values of a registered vector."""
        return to_numpy(self._vectors[name])

    def steering(self, *specs: SteeringSpec | Edit) -> list[StoredSteering]:
        """As the API stores what a user writes; the tensors are registered.

        Positions count from the prompt's start.
        """
        wished = [_spec(spec) if isinstance(spec, Edit) else spec for spec in specs]
        bounds = Bounds(
            msgspec.convert(self.info, ModelInfo),
            [PromptFacts(self.settings.vllm.max_model_len or 0)],
        )
        per_prompt, blobs = resolve_edits([], wished, bounds)
        self._vectors |= {name: from_msgpack(blob, Tensor) for name, blob in blobs.items()}
        return per_prompt[0] if per_prompt else []

    def patches(self, specs: Sequence[PatchSpec], bounds: Bounds) -> list[StoredSteering]:
        """Likewise patches with vectors of one prompt, which `bounds` describe."""
        (entries,), blobs = resolve_edits(specs, [], bounds)
        self._vectors |= {name: from_msgpack(blob, Tensor) for name, blob in blobs.items()}
        return entries

    def job(
        self,
        *prompts: list[int],
        max_tokens: int = 4,
        capture: StoredCapture | list[StoredCapture] | None = None,
        steering: list[StoredSteering] | None = None,
        lora: StoredLora | None = None,
        probes: list[StoredProbe] | None = None,
        **sampling: Any,
    ) -> Job:
        """A job with a new id; the capture's positions are resolved against each prompt."""
        captures = [capture] if isinstance(capture, StoredCapture) else capture or []
        return Job(
            id=f"job{next(_numbers):05d}",
            kind="generate",
            model=self.settings.served_model,
            prompts=[StoredPrompt(token_ids=prompt) for prompt in prompts],
            sampling=Sampling(max_tokens=max_tokens, ignore_eos=True, **sampling),
            created=0.0,
            steering=[steering for _ in prompts] if steering else [],
            captures=[[_resolved(each, prompt) for each in captures] for prompt in prompts]
            if captures
            else [],
            lora=lora,
            probes=probes or [],
        )

    def run(
        self, *jobs: Job, cancel_after: dict[str, int] | None = None
    ) -> dict[str, list[Output]]:
        """Run all at once; raises AssertionError with the reason when one fails."""
        answer = self.run_any(*jobs, cancel_after=cancel_after)
        assert not answer.errors, answer.errors
        return answer.outputs

    def run_any(
        self, *jobs: Job, cancel_after: dict[str, int] | None = None, **options: Any
    ) -> Answer:
        """`options`: fields of `Command`."""
        return self.send(
            Command(
                jobs=list(jobs),
                vectors=self._vectors,
                runs=self.runs,
                files=self.files,
                cancel_after=cancel_after or {},
                **options,
            )
        )

    def run_together(self, *jobs: Job, **options: Any) -> dict[str, list[Output]]:
        """As `run`, all requests in one step, in this order: the same jobs give the same numbers
        bit for bit.
        """
        answer = self.run_any(*jobs, together=True, **options)
        assert not answer.errors, answer.errors
        return answer.outputs

    def keep(self, job: Job, request: int = 0) -> str:
        """Make the first capture of a finished job's prompt a source run; its key."""
        reader = self.capture(job)
        tag = job.captures[request][0].tag
        files = [
            file
            for receipt in self.receipts(job)
            if receipt.request == request
            for file in receipt.files
            if file.tag == tag
        ]
        key = run_key(job.id, request, tag)
        self.runs[key] = RunFiles(
            key=key,
            sites={
                hook: layers
                for capture in job.captures[request]
                if capture.tag == tag
                for hook, layers in capture.sites.items()
            },
            positions=reader.positions(request),
            hidden_size=self.info["hidden_size"],
            bytes=sum(file.bytes for file in files),
            files=[RunFile(file.path, file.offset, file.bytes, file.crc32) for file in files],
        )
        return key

    def receipts(self, job: Job, timeout: float = 180.0) -> list[Receipt]:
        """The job's receipts of all ranks, when all are there; sorted by request and rank."""
        world = self.settings.vllm.ranks
        deadline = time.monotonic() + timeout
        while True:
            found = sorted(
                (r for r in self.all_receipts() if r.job == job.id),
                key=lambda r: (r.request, r.rank),
            )
            if len(found) >= world * len(job.prompts):
                return found
            assert time.monotonic() < deadline, (
                f"{len(found)} of {world * len(job.prompts)} receipts came"
            )
            time.sleep(0.02)

    def all_receipts(self) -> list[Receipt]:
        receipts = []
        for file in sorted((Path(self.settings.data_dir) / "outbox").glob("*.sqlite")):
            with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
                receipts += [
                    from_msgpack(row[0], Receipt)
                    for row in database.execute("SELECT payload FROM receipts ORDER BY seq")
                ]
        return receipts

    def capture(self, job: Job, number: int = 0) -> CaptureReader:
        """The job's files of its `number`-th capture, once every rank has reported that it is
        done.
        """
        for receipt in self.receipts(job):
            assert receipt.status == "ok", receipt
        assert job.captures
        return CaptureReader(self.root / job.captures[0][number].tag, job.id)

    def close(self) -> None:
        """At once: the ranks end with their parent.

        How an engine stops in order is tested with the service.
        """
        self._process.kill()
        self._process.wait()
        self._log.close()
        remove_left(Path(self.settings.data_dir))  # as a worker does at its end


def _spec(edit: Edit) -> SteeringSpec:
    """What the reference is told, in a user's words: a field is said where its op takes it."""
    takes = STEERING_FIELDS[edit.op]  # type: ignore[index]
    given: dict[str, Any] = {
        name: from_numpy(np.asarray(getattr(edit, name), dtype=np.float32))
        for name in takes.tensors
    }
    given |= {name: getattr(edit, name) for name in takes.options}
    positions = "all" if edit.positions is None else edit.positions
    return SteeringSpec(layers=edit.layer, hook=edit.hook, positions=positions, op=edit.op, **given)  # type: ignore[arg-type]


def _resolved(capture: StoredCapture, prompt: list[int]) -> StoredCapture:
    positions = capture.positions
    if isinstance(positions, list):
        positions = sorted({position % len(prompt) for position in positions})
    return msgspec.structs.replace(capture, positions=positions)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids of the tiny checkpoints' vocabulary, special tokens left out."""
    return np.random.default_rng(seed).integers(4, 500, size=length).tolist()


def relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    """Largest row error, relative to the row's own length."""
    return float((np.linalg.norm(got - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)).max())

"""An API as its own process, and a worker by hand beside it: what the tests of the HTTP edge stand
on.

The ledger, the settler, Redis and HTTP are the real ones. `Hand` takes the place of worker and
ranks: it claims jobs, stores outputs and settles receipts when the test says so, which makes every
moment in between observable.
"""

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import forks
import httpx2
import redis
from capture_kit import finished, write
from ledger_kit import IDENTITY
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from wait_kit import wait_until

import midstream
from midstream.broker.ledger.jobs.ledger import Claim, Ledger
from midstream.broker.ledger.jobs.settlement import Settler
from midstream.schemas.base.errors import Problem
from midstream.schemas.base.records import now
from midstream.schemas.jobs.jobs import Event, Job, JobView, Output, TokenLogprob
from midstream.schemas.jobs.models import ModelInfo, TokenizerBundle, WorkerInfo, encode_bundle
from midstream.schemas.jobs.receipts import CapturedFile, Receipt
from midstream.schemas.requests.specs import StoredCapture
from midstream.schemas.settings.settings import Settings, load_settings, to_environment
from midstream.workers.runner.files.finished_rows import FinishedCapture

T = TypeVar("T")

MODEL = "tiny"
LAYERS = 4
HIDDEN = 8
LONGEST = 32
WORDS = [
    "<unk>",
    "<bos>",
    "hello",
    "there",
    "world",
    "user",
    "system",
    "assistant",
    ":",
    "a",
    "b",
    "c",
    "d",
]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }} : {{ "
    "message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
    "{% if messages[0]['role'] == 'assistant' %}{{ raise_exception('the user begins') }}{% endif %}"
)
#: These only end what hangs: a machine with other things to do takes its time.
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 60.0


def bundle() -> TokenizerBundle:
    """One token per word of `WORDS`, and `<bos>` before plain text.

    Its saved truncation must not cut prompts.
    """
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    tokenizer.add_special_tokens(["<bos>"])
    tokenizer.enable_truncation(3)
    return TokenizerBundle(
        tokenizer_json=tokenizer.to_str(),
        chat_template=TEMPLATE,
        special_tokens={"bos_token": "<bos>"},
        eos_token_ids=[],
    )


def refused(
    answer: httpx2.Response,
    status: int = 400,
    field: str | None = None,
    *says: str,
    kind: str | None = None,
) -> dict[str, Any]:
    """Return the problem that was answered: it names `field`, its detail has the words of `says`,
    and it is of `kind`.
    """
    problem = dict(answer.json())
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert field is None or problem.get("field") == field, problem
    assert kind is None or problem["type"] == f"urn:midstream:{kind}", problem
    assert all(words in problem["detail"] for words in says), problem
    return problem


def model_info(**changes: Any) -> ModelInfo:
    facts: dict[str, Any] = {
        "name": MODEL,
        "version": midstream.__version__,
        "architecture": "TinyForCausalLM",
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "vocab_size": len(WORDS),
        "max_model_len": LONGEST,
        "dtype": "float32",
        # as a model whose attention and MLP run side by side
        "hooks": ["pre_attn", "attn_out", "mlp_out", "post_block"],
        "consumers": ["filesystem", "memory"],
        "memory_limit_kib": 1,
        "step_tokens": 16,
        "capture_row_limit": 15,
        "tokenizer": encode_bundle(bundle())[0],
        "identity": IDENTITY,
    }
    return ModelInfo(**(facts | changes))


class Api:
    """`python -m midstream.api` on a free port, and a client of it."""

    def __init__(self, settings: Settings, log: Path):
        self.settings = settings
        self._log = log
        self.start()

    def start(self) -> None:
        """Start (again, on the same port) and wait for the ready line."""
        self._log.touch()
        mark = self.said
        self.process = forks.start(
            "midstream.api", to_environment(self.settings), self._log.parent, self._log
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            # asked first: a log that is read after the end is whole
            ended = self.process.poll() is not None
            if "api ready " in (text := self.log(mark)):
                break
            assert not ended, text
            assert time.monotonic() < deadline, text
            time.sleep(0.02)
        self.url = text.split("api ready ")[1].split()[0]
        self.http = httpx2.Client(base_url=self.url, timeout=CALL_TIMEOUT_S)

    def log(self, mark: int = 0) -> str:
        """What it has said since the log had `mark` bytes: see `said`."""
        return self._log.read_bytes()[mark:].decode(errors="replace")

    @property
    def said(self) -> int:
        """How long the log is. Other tests have used this API before."""
        return self._log.stat().st_size

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.http.close()
        self.process.terminate()
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        finally:
            self.process.kill()
            self.process.wait()

    def kill(self) -> None:
        self.http.close()
        self.process.kill()
        self.process.wait()

    def until_held(self, count: int) -> None:
        """Wait until it holds so many responses."""
        held = f"\nmidstream_held_responses {count}.0\n"
        wait_until(lambda: held in self.http.get("/metrics").text, CALL_TIMEOUT_S)

    def submit(self, **body: Any) -> str:
        """`POST /v1/jobs` of the tiny model; the new job's id."""
        answer = self.http.post(
            "/v1/jobs", json={"model": MODEL, "prompts": ["hello there"], **body}
        )
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def view(self, job_id: str, **parameters: Any) -> dict[str, Any]:
        return dict(self.http.get(f"/v1/jobs/{job_id}", params=parameters).json())


@contextmanager
def running(directory: Path, redis_url: str, api_port: int = 0, **settings: Any) -> Iterator[Api]:
    """An API over `redis_url`; its captures and log lie in `directory`."""
    # nobody renews the sign of life of a worker by hand
    given: dict[str, Any] = {"lease_s": 300.0, **settings}
    api = Api(
        load_settings({}, data_dir=str(directory), redis_url=redis_url, api_port=api_port, **given),
        directory / "api.log",
    )
    try:
        yield api
    finally:
        if api.process.poll() is None:
            api.stop()


class Hand:
    """A worker with `ranks` ranks, every move of which the test makes.

    Its ledger lives on a loop in a thread of its own.
    """

    worker = "hand"
    layout = "packed"  # of capture files

    def __init__(
        self, settings: Settings, ranks: Sequence[tuple[int, int]] = ((0, 0),), **served: Any
    ):
        """`served`: what its model has other than `model_info`."""
        self.settings = settings
        self._served = served
        self.ranks = ranks  # (tp, pp) of each rank
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.ledger = Ledger.connect(settings)
        self._redis = redis.Redis.from_url(settings.redis_url)
        self._settler = Settler(self._redis, settings)
        self._sequence = [0] * len(ranks)
        self._epoch = os.urandom(8).hex()
        self._events = Counter[tuple[str, int]]()  # how many each attempt has emitted

    def close(self) -> None:
        self.do(self.ledger.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._redis.close()

    def __enter__(self) -> "Hand":
        self.serve(**self._served)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CALL_TIMEOUT_S)

    # What a worker publishes

    def serve(self, **changes: Any) -> None:
        """Publish the model and its tokenizer, and a sign of life."""
        name, raw = encode_bundle(bundle())
        info = model_info(**changes)
        self.do(self.ledger.put_blob(name, raw))
        self.do(self.ledger.publish_model(info, self.sign(model=info.name)))

    def sign(self, **changes: Any) -> WorkerInfo:
        facts = {
            "worker": self.worker,
            "boot": "b1",
            "model": MODEL,
            "version": midstream.__version__,
            "host": "here",
            "pid": 1,
            "started": now(),
            "tp": 1,
            "pp": 1,
            "identity": IDENTITY,
        }
        return WorkerInfo(**(facts | changes))

    # What a worker does with a job

    def claim(self, job_id: str) -> Claim:
        claim = self.do(self.ledger.claim(job_id, self.worker, "b1", len(self.ranks), IDENTITY))
        assert claim is not None
        return claim

    def claim_next(self, timeout: float = CALL_TIMEOUT_S) -> Claim:
        """The newest queued job, once there is one: for endpoints that do not say an id before they
        answer.
        """
        (job,) = wait_until(
            lambda: [
                job for job in self.do(self.ledger.list(limit=1)).jobs if job.state == "queued"
            ],
            timeout,
            why="no job came",
            pause_s=0.01,
        )
        return self.claim(job.id)

    def answered(
        self, asked: Future[T], texts: Sequence[str] | None = None, *, receipts: bool = False
    ) -> tuple[Claim, T]:
        """Give the newest queued job its outputs; returns its claim, and what `asked` then has."""
        claim = self.claim_next()
        self.store(claim, texts)
        if receipts:
            self.receipts(claim)
        return claim, asked.result()

    def say_next(self, *texts: str) -> Claim:
        """Claim the newest queued job, which streams, and say `texts`."""
        claim = self.claim_next()
        for text in texts:
            self.say(claim, text)
        return claim

    def say(self, claim: Claim, text: str, index: int = 0) -> None:
        """A token event, as of a job that streams."""
        data: Any = {"index": index, "text": text, "token_ids": [2], "finish_reason": None}
        assert self.emit(claim, Event(event="token", data=data, attempt=claim.attempt))

    def emit(self, claim: Claim, event: Event) -> bool:
        self._events[claim.job.id, claim.attempt] += 1
        return self.do(
            self.ledger.emit(
                claim.job.id, claim.attempt, self._events[claim.job.id, claim.attempt], event
            )
        )

    def store(self, claim: Claim, texts: Sequence[str] | None = None) -> None:
        """Outputs of every prompt, with an `output` event each, as the worker does."""
        outputs = outputs_of(claim.job, texts)
        for output in outputs:
            self.emit(
                claim, Event(event="output", data={"index": output.index}, attempt=claim.attempt)
            )
        assert self.do(self.ledger.store_outputs(claim.job.id, claim.attempt, outputs))

    def fail(self, claim: Claim, problem: Problem) -> None:
        assert self.do(self.ledger.fail(claim.job.id, claim.attempt, problem))

    def receipt(self, claim: Claim, request: int = 0, rank: int = 0, **changes: Any) -> None:
        """One rank's receipt, settled as the relay settles it."""
        tp, pp = self.ranks[rank]
        facts: dict[str, Any] = {
            "version": midstream.__version__,
            "worker": self.worker,
            "boot": "b1",
            "job": claim.job.id,
            "request": request,
            "attempt": claim.attempt,
            "rank": rank,
            "world": len(self.ranks),
            "tp": tp,
            "pp": pp,
            "step": 7,
            "actions": 3,
            "checksum": "00000000deadbeef",
            "status": "ok",
        }
        self._sequence[rank] += 1
        self._settler.settle(
            self.worker, rank, self._epoch, [(self._sequence[rank], Receipt(**(facts | changes)))]
        )

    def receipts(self, claim: Claim) -> None:
        """Every rank's receipt for every prompt, with the files of what was captured."""
        for request in range(len(claim.job.prompts)):
            for rank in range(len(self.ranks)):
                wanted = claim.job.captures[request] if claim.job.captures else []
                files = [self.capture(claim, request, rank, capture) for capture in wanted]
                self.receipt(claim, request, rank, files=files)

    def rows(
        self, claim: Claim, request: int = 0, rank: int = 0, wanted: StoredCapture | None = None
    ) -> FinishedCapture:
        """This stage's share of the layers at every prompt position, whatever positions were asked
        for.
        """
        wanted = wanted or claim.job.captures[request][0]
        pp = self.ranks[rank][1]
        stages = 1 + max(stage for _, stage in self.ranks)
        shares = {
            str(hook): [layer for layer in layers if layer * stages // LAYERS == pp]
            for hook, layers in wanted.sites.items()
        }
        ids = claim.job.prompts[request].token_ids
        return finished(
            claim.job.id,
            request,
            {hook: layers for hook, layers in shares.items() if layers},
            range(len(ids)),
            all_sites={str(hook): layers for hook, layers in wanted.sites.items()},
            layout=self.layout,
            tag=wanted.tag,
            attempt=claim.attempt,
            pp=pp,
            stages=stages,
            dtype="float32",
            token_ids=ids,
        )

    def capture(
        self, claim: Claim, request: int = 0, rank: int = 0, wanted: StoredCapture | None = None
    ) -> CapturedFile:
        """A real file of `rows`."""
        rows = self.rows(claim, request, rank, wanted)
        owner = f"hand.{claim.job.id}.{request}"
        (file,) = write(self.settings.capture_root, rows, owner=f"{owner}.{rank}")
        return file

    def finish(self, job_id: str, texts: Sequence[str] | None = None) -> None:
        """Claim, generate and settle: the job succeeds."""
        claim = self.claim(job_id)
        self.store(claim, texts)
        if claim.job.wants_receipts:
            self.receipts(claim)

    def view(self, job_id: str) -> JobView:
        return self.do(self.ledger.view(job_id))

    def job(self, job_id: str) -> Job:
        return self.do(self.ledger.job(job_id))

    def count_jobs(self) -> int:
        return len(self.do(self.ledger.list(limit=200)).jobs)


def outputs_of(job: Job, texts: Sequence[str] | None = None) -> list[Output]:
    told = texts or ["hello world"] * len(job.prompts)
    logprobs = None
    if job.sampling.logprobs is not None:
        other = TokenLogprob(token_id=3, token="there", logprob=-2.0)
        own = TokenLogprob(token_id=2, token="hello", logprob=-0.5)
        logprobs = [
            TokenLogprob(
                token_id=2, token="hello", logprob=-0.5, top=[own, other][: job.sampling.logprobs]
            )
        ]
    return [
        Output(
            index=index,
            text=text,
            token_ids=[2, 4],
            finish_reason="stop",
            prompt_tokens=len(prompt.token_ids),
            logprobs=logprobs,
        )
        for index, (prompt, text) in enumerate(zip(job.prompts, told, strict=True))
    ]

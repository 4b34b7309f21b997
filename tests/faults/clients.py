"""What do the service's clients request, and which answers do they get while its parts die?

Each job has a client of its own that does what the guide tells clients to do: it sends an
Idempotency-Key, repeats what was answered 503 or broke, at whichever replica answers, and follows
the job to its end. All answers are recorded.
"""

import asyncio
import base64
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from midstream_fake_engine.model import HIDDEN_SIZE

from midstream.schemas.prompts.selectors import HOOKS

MODEL = "fake-model"
#: Ways of asking and how often each is chosen.
WAYS = {
    "job": 30,  # 202, then a long poll
    "held job": 15,  # Prefer: wait
    "completion": 12,  # held until its outputs are stored
    "captured completion": 25,  # held until its captures are durable: capture_wait
    "streamed completion": 8,
    "steered job": 5,
    "cancelled job": 4,
    "sweep": 1,
}
#: And of those that a gradient worker begins, where there is one.
GRADIENT_WAYS = {"attribution": 4, "cancelled attribution": 1, "fit": 1}
#: And with policies, which belong to the weights for which they were registered.
POLICY_WAYS = {"guarded job": 20}
#: And under `EVERYONE`.
WATCHED_WAYS = {"dose": 5}
#: Policy → its fields. The scores are the ids of the tokens: 64 to 89 for the letters that are
#: generated, 220 for the blank.
POLICIES: dict[str, dict[str, Any]] = {
    "latch": {
        "condition": {
            "at_least": 128.0,
            "aggregation": "mean",
            "window": 3,
            "latch": "conversation",
            "latch_s": 2,
            "schedule": {"tokens": "generated"},
        },
        "actions": ["flag"],
        "mode": "active",
    },
    "turns": {
        "condition": {
            "at_least": 84.0,
            "release_below": 68.0,
            "cool_down": 1,
            "schedule": {"tokens": "all"},
        },
        "actions": [],
        "mode": "active",
    },
    "shadow": {
        "condition": {
            "at_least": 80.0,
            "latch": "conversation",
            "schedule": {"tokens": "generated"},
        },
        "actions": ["flag"],
    },
}
#: A policy of all traffic, without a webhook. Under it, each prompt has a receipt.
EVERYONE: dict[str, Any] = {
    "condition": {"at_least": 86.0, "schedule": {"tokens": "all"}},
    "actions": ["flag"],
    "mode": "active",
    "all_traffic": True,
}
#: A text that occurs many times in the prompts of some captured jobs, whose windows are around it.
REPEATED = "aaa"
#: So many consecutive jobs share so many conversations: some are sent when others are over.
CONVERSING = 400
CONVERSATIONS = 6
#: Kind of job → where it is requested.
PATHS = {
    "job": "/v1/jobs",
    "completion": "/v1/completions",
    "sweep": "/v1/sweeps",
    "harvest": "/v1/harvests",
    "attribution": "/v1/attributions",
    "fit": "/v1/modules/fit",
    "dose": "/v1/doses",
}
#: The fields of a dose beside its prompts and steering: two cells.
DOSE: dict[str, Any] = {
    "scales": [3.0],
    "effect": {"words": ["a"]},
    "held_out": ["numbers"],
    "max_tokens": 4,
}
#: Kind of job with a grid → its fields beside its pairs. All choices of an attribution have cells,
#: so that it has both phases.
GRIDS: dict[str, dict[str, Any]] = {
    "sweep": {"layers": [0, 1], "positions": "last_prompt", "metric": "logit_diff", "noise": 2},
    "attribution": {
        "layers": [0, 1, 2, 3],
        "alignment": "left",
        "metric": "logit_diff",
        "noise": 2,
        "verify": {"top": 4, "random": 3, "doubtful": 2, "tolerance": 0.5},
    },
}
#: A short fit. Those with the same seed must learn the same module.
FIT: dict[str, Any] = {
    "method": "vector",
    "layers": [1],
    "examples": [{"prompt": f"number {n} is", "target": " even"} for n in range(8)],
    "steps": 3,
    "learning_rate": 0.1,
    "register": "always",
}
FIT_SEEDS = 3
#: Each job with a number that is a multiple of this is a harvest instead: it lasts for many jobs.
HARVEST_EVERY = 100
#: How a file is rewritten while it is harvested: another file of its name, or the same one with
#: other documents; also with one more in front, or without the last ones.
REWRITES = ("replaced", "in place", "prepended", "shorter")
#: Seconds after a harvest was planned at which its file is rewritten, at most.
REWRITE_S = 2.0
HELD = {"held job", "completion", "captured completion"}
#: Text of a prompt: words that no other has.
WORDS = (
    "steer",
    "capture",
    "patch",
    "stream",
    "layer",
    "token",
    "receipt",
    "ledger",
    "relay",
    "worker",
)
#: Seconds after which a client has lost its patience, which is a failure of the service: a slow
#: machine does not take that long.
PATIENCE_S = 900.0
#: A held response may take this much longer than `max_wait_s`: it outlives a restart of Redis.
OUTAGE_S = 40.0
TERMINAL = {"succeeded", "failed", "cancelled", "aborted", "expired"}
#: Documents of a harvest, and of one that reads a file; and characters of each.
DOCUMENTS = 400
FILE_DOCUMENTS = 800
CHARACTERS = 60
JOB_HEADER = "x-midstream-job"


@dataclass(frozen=True)
class Plan:
    """One job, as its client wants it."""

    number: int
    way: str
    prompts: tuple[str, ...]
    max_tokens: int
    capture: dict[str, Any] | None = None
    callback: str | None = None
    when: str = ""  # of what is cancelled: `running` when it is to be cancelled then, else soon
    # of a harvest: the file in `Clients.sources` that its documents are read from; empty: they are
    # in the request
    file: str = ""
    rewrite: str = ""  # what becomes of that file while it is harvested, of `REWRITES`
    conversation: str = ""  # of a job with `POLICIES`
    watched: bool = False  # `EVERYONE` applies to it

    @property
    def hooks(self) -> dict[str, list[int]]:
        """What a harvest reads: of a file so much that it has many units, each of which is read
        when its turn comes.
        """
        return {hook: [0, 1, 2, 3] for hook in HOOKS} if self.file else {"post_block": [0, 3]}

    @property
    def sites(self) -> list[tuple[str, int]]:
        return [(hook, layer) for hook, layers in self.hooks.items() for layer in layers]

    @property
    def others(self) -> list[str]:
        """The documents that the file has once it is rewritten."""
        if self.rewrite == "prepended":
            return [self.prompts[-1], *self.prompts]
        if self.rewrite == "shorter":
            return list(self.prompts[:-7])
        return [document[::-1] for document in self.prompts]

    @property
    def kind(self) -> str:
        """The key of `PATHS`."""
        return self.way.rpartition(" ")[2]

    @property
    def is_cancelled(self) -> bool:
        return self.way.startswith("cancelled")

    @property
    def path(self) -> str:
        return PATHS[self.kind]

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"model": MODEL}
        if self.callback:
            body["callback_url"] = self.callback
        if self.way == "harvest":
            return body | {
                "source": {"path": self.file} if self.file else {"lines": list(self.prompts)},
                "hooks": self.hooks,
                "shards": {"mib": 1, "shuffle": self.number},
            }
        if self.kind in GRIDS:
            clean, corrupt = self.prompts
            pair = {"clean": clean, "corrupt": corrupt, "answer": "a", "foil": "b"}
            turned = pair | {"clean": corrupt, "corrupt": clean}
            pairs = [pair, turned] if self.kind == "attribution" else [pair]
            return body | GRIDS[self.kind] | {"pairs": pairs}
        if self.way == "fit":
            return body | FIT | {"name": f"gate-{self.number}", "seed": self.number % FIT_SEEDS}
        vector = np.full(HIDDEN_SIZE, self.number % 7 + 1, dtype=np.float32).tobytes()
        tensor = {
            "dtype": "float32",
            "shape": [HIDDEN_SIZE],
            "data": base64.b64encode(vector).decode(),
        }
        steering = [{"layers": [1], "vector": tensor}]
        if self.way == "dose":
            return body | DOSE | {"prompts": list(self.prompts), "steering": steering}
        if self.conversation:
            body |= {"policies": [*POLICIES], "conversation": self.conversation}
        if self.capture:
            body["capture"] = self.capture
        if self.path == "/v1/jobs":
            if self.way == "steered job":
                body["steering"] = steering
            return body | {
                "prompts": list(self.prompts),
                "sampling": {"max_tokens": self.max_tokens},
            }
        body |= {"prompt": list(self.prompts), "max_tokens": self.max_tokens, "temperature": 0}
        return body | {
            "capture_wait": self.way == "captured completion",
            "stream": self.way == "streamed completion",
        }


def plans(
    rng: random.Random,
    count: int,
    callback: str | None = None,
    files: bool = False,
    ways: Mapping[str, int] = WAYS,
) -> list[Plan]:
    """`count` different jobs; one in five has the callback URL `callback`.

    The first ones are one of each way: a rare way is missing from many draws of a few hundred jobs.
    `files`: every other harvest reads a file.
    """
    made = []
    first_ways = [*ways]
    for number in range(count):
        if number % HARVEST_EVERY == 0:
            from_file = files and number // HARVEST_EVERY % 2 == 1
            length = FILE_DOCUMENTS if from_file else DOCUMENTS
            harvest = Plan(
                number, "harvest", tuple(document(rng, number, place) for place in range(length)), 0
            )
            if from_file:
                rewrite = rng.choice(REWRITES) if number // HARVEST_EVERY % 4 == 1 else ""
                harvest = replace(harvest, file=f"{number}.jsonl", rewrite=rewrite)
            made.append(harvest)
            continue
        way = first_ways.pop() if first_ways else rng.choices(list(ways), list(ways.values()))[0]
        words = [
            " ".join(rng.choices(WORDS, k=rng.randint(1, 6)))
            for _ in range(rng.choice((1, 1, 2, 3)))
        ]
        prompts = tuple(f"{number} {text}"[:40].ljust(12, ".") for text in words)
        if way.rpartition(" ")[2] in GRIDS:
            prompts = (f"{number:06d} clean", f"{number:06d} wrong")
        captured = way == "captured completion" or (
            way in ("job", "held job") and rng.random() < 0.4
        )
        around = captured and rng.random() < 0.2
        if around:
            prompts = tuple(f"{number} {'a' * rng.randint(3, 33)}" for _ in words)
        if rng.random() < 0.02 or way == "cancelled job":
            max_tokens = rng.randint(60, 250)
        else:
            max_tokens = rng.randint(2, 16) * (4 if way in POLICY_WAYS else 1)
        if captured and way != "captured completion" and rng.random() < 0.25:
            max_tokens = 0  # its rows alone
        capture: dict[str, Any] | None = None
        if captured:
            capture = {
                "layers": [0, 3],
                "positions": {"around": {"text": REPEATED}} if around else "all",
                "layout": rng.choice(("auto", "packed")),
            }
        conversation = f"{number // CONVERSING}-{number % CONVERSATIONS}"
        made.append(
            Plan(
                number,
                way,
                prompts,
                max_tokens,
                capture=capture,
                callback=callback if callback and rng.random() < 0.2 else None,
                when=rng.choice(("soon", "running")),
                conversation=conversation if way == "guarded job" else "",
                watched=WATCHED_WAYS.keys() <= ways.keys(),
            )
        )
    return made


def document(rng: random.Random, number: int, place: int) -> str:
    return f"{number} {place} {' '.join(rng.choices(WORDS, k=CHARACTERS // 6))}"[:CHARACTERS]


@dataclass
class Observed:
    """Everything that one client received."""

    plan: Plan
    key: str
    # of jobs, in the order in which they were received
    ids: dict[str, None] = field(default_factory=dict)
    begun: float = 0.0  # when it was first sent
    accepted: float = 0.0  # when a 200 or 202 was first there
    finished: float = 0.0  # when its end was received
    answers: Counter[str] = field(default_factory=Counter)  # status or kind of break -> how often
    held_s: float = 0.0  # how long the answer that came was held
    texts: list[str] | None = None  # of each prompt, where the answer held them
    state: str = ""
    paused: str = ""  # the reason that a harvest gave last
    wrong: list[str] = field(default_factory=list)  # what must not have happened
    # of a job with policies, by its result: the jobs whose latch it found, and the webhooks that it
    # must have sent: id -> what is in it; by its events, in ms of Redis' clock: its first claim,
    # and when its triggers of the latch were recorded
    inherited: set[str] = field(default_factory=set)
    decided: dict[str, dict[str, Any]] = field(default_factory=dict)
    claimed: int = 0
    triggers: list[int] = field(default_factory=list)

    @property
    def id(self) -> str:
        return next(iter(self.ids), "")


class Clients:
    """All clients, over all replicas.

    `was_away(replica, start, end)`: whether a broken connection has its reason.
    """

    def __init__(
        self,
        urls: dict[str, str],
        run: str,
        rng: random.Random,
        max_wait_s: float,
        was_away: Callable[[str, float, float], bool],
        sources: Path | None = None,
    ):
        """`sources`: the folder of the files that harvests read."""
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=200)
        timeout = httpx2.Timeout(30.0, read=max_wait_s + OUTAGE_S)
        self._http = {
            name: httpx2.AsyncClient(base_url=url, limits=limits, timeout=timeout)
            for name, url in urls.items()
        }
        self._run = run
        self._rng = rng
        self._was_away = was_away
        self._wait_s = max_wait_s
        self._sources = sources

    async def close(self) -> None:
        for http in self._http.values():
            await http.aclose()

    async def follow(self, plan: Plan) -> Observed:
        """From the first request to the end of the job."""
        observed = Observed(plan, f"{self._run}-{plan.number}", begun=time.monotonic())
        try:
            await asyncio.wait_for(self._follow(observed), PATIENCE_S)
        except TimeoutError:
            observed.wrong.append(f"no end within {PATIENCE_S:.0f} s")
        return observed

    async def _follow(self, observed: Observed) -> None:
        plan = observed.plan
        headers = {"Idempotency-Key": observed.key}
        if plan.file and self._sources:
            _write(self._sources / plan.file, plan.prompts)
        if plan.way == "held job":
            headers["Prefer"] = f"wait={self._wait_s:.0f}"
        began = time.monotonic()
        answer = await self._ask(observed, "POST", plan.path, json=plan.body(), headers=headers)
        observed.held_s = time.monotonic() - began
        if answer.status_code not in (200, 202):
            observed.wrong.append(
                f"{plan.way} was answered {answer.status_code}: {answer.text[:300]}"
            )
            return
        if plan.way == "harvest":
            await self._harvested(observed)
            return
        if "completion" in plan.way and answer.status_code == 200:
            observed.texts = _texts(plan, answer)
        if plan.is_cancelled:
            await self._until_started(observed) if plan.when == "running" else await asyncio.sleep(
                self._rng.random() * 0.3
            )
            cancelled = await self._ask(observed, "POST", f"/v1/jobs/{observed.id}/cancel")
            if cancelled.status_code not in (200, 202, 409):
                observed.wrong.append(
                    f"cancel was answered {cancelled.status_code}: {cancelled.text[:200]}"
                )
        while observed.state not in TERMINAL:
            view = await self._ask(
                observed, "GET", f"/v1/jobs/{observed.id}", params={"wait": self._wait_s}
            )
            if view.status_code != 200:
                observed.wrong.append(
                    f"GET of {observed.id}, which was accepted, was answered {view.status_code}: "
                    f"{view.text[:200]}"
                )
                return
            observed.state = view.json()["state"]
        observed.finished = time.monotonic()
        if plan.kind == "job" and not plan.is_cancelled and observed.state == "succeeded":
            result = await self._ask(observed, "GET", f"/v1/jobs/{observed.id}/result")
            if result.status_code == 200:
                observed.texts = [output["text"] for output in result.json()["outputs"]]
            else:
                observed.wrong.append(
                    f"the result of {observed.id} was answered {result.status_code}"
                )

    async def _harvested(self, observed: Observed) -> None:
        rewrite_at = float("inf")
        rewrites = bool(observed.plan.rewrite)
        while observed.state not in TERMINAL:
            view = await self._ask(observed, "GET", f"/v1/harvests/{observed.id}")
            if view.status_code != 200:
                observed.wrong.append(
                    f"GET of {observed.id}, which was accepted, was answered {view.status_code}: "
                    f"{view.text[:200]}"
                )
                return
            observed.state = view.json()["state"]
            if observed.state == "paused":
                observed.paused = view.json()["reason"]
            if rewrites and observed.state != "planning":  # what is harvested is decided
                rewrites = False
                rewrite_at = time.monotonic() + self._rng.random() * REWRITE_S
            if time.monotonic() > rewrite_at and self._sources:
                rewrite_at = float("inf")
                _write(
                    self._sources / observed.plan.file,
                    observed.plan.others,
                    anew=observed.plan.rewrite != "in place",
                )
            await asyncio.sleep(0.5)
        observed.finished = time.monotonic()

    async def _until_started(self, observed: Observed) -> None:
        """A long poll for each change."""
        known = {"If-None-Match": '"0"'}  # without one the poll would wait for the end
        while True:
            view = await self._ask(
                observed,
                "GET",
                f"/v1/jobs/{observed.id}",
                params={"wait": self._wait_s},
                headers=known,
            )
            if view.status_code == 200 and view.json()["state"] != "queued":
                return
            known = {"If-None-Match": view.headers.get("etag", "")}

    async def _ask(
        self, observed: Observed, method: str, path: str, **more: Any
    ) -> httpx2.Response:
        """Until some replica gives an answer that is not to be repeated."""
        while True:
            replica = self._rng.choice(list(self._http))
            began = time.monotonic()
            try:
                answer = await self._http[replica].request(method, path, **more)
            except httpx2.TimeoutException as error:
                observed.answers["hung"] += 1
                observed.wrong.append(
                    f"{method} {path} hung for {time.monotonic() - began:.0f} s at {replica}: "
                    f"{error!r}"
                )
                continue
            except httpx2.TransportError as error:
                observed.answers["broken"] += 1
                if not self._was_away(replica, began, time.monotonic()):
                    observed.wrong.append(
                        f"{method} {path} broke at {replica}, which lived: {error!r}"
                    )
                await asyncio.sleep(0.05 + self._rng.random() * 0.2)
                continue
            observed.answers[str(answer.status_code)] += 1
            if (
                answer.status_code in (200, 202)
                and method == "POST"
                and not path.endswith("/cancel")
            ):
                observed.ids[answer.headers.get(JOB_HEADER) or answer.json()["id"]] = None
                observed.accepted = observed.accepted or time.monotonic()
            if answer.status_code in (429, 503):
                await asyncio.sleep(
                    min(float(answer.headers.get("retry-after", "1")), 0.5)
                    * (0.5 + self._rng.random())
                )
                continue
            return answer


def _write(path: Path, documents: Sequence[str], anew: bool = True) -> None:
    """Write a corpus of one document per line: as another file of this name, or into the file that
    is there.
    """
    text = "".join(json.dumps({"text": document}) + "\n" for document in documents)
    if not anew:
        path.write_text(text)
        return
    aside = path.with_suffix(".new")
    aside.write_text(text)
    aside.replace(path)


def _texts(plan: Plan, answer: httpx2.Response) -> list[str] | None:
    """Of each prompt; None when a stream says that it has to be asked for again."""
    if plan.way != "streamed completion":
        return [choice["text"] for choice in answer.json()["choices"]]
    texts = ["" for _ in plan.prompts]
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            chunk = json.loads(line[len("data: ") :])
            if "error" in chunk:
                return None
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
    return texts if answer.text.rstrip().endswith("[DONE]") else None

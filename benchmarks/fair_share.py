"""How much slower is a tenant's small job while another tenant keeps the engine busy, and what does
each of two busy tenants get?

    python benchmarks/fair_share.py [--samples 200] [--only NAME …] [--seconds 10]

A service with keys and a real engine with a tiny Llama of random weights. One process asks for
completions of 16 + 8 tokens one after the other, first alone and then while another tenant keeps
large jobs of a kind under way. For each kind: the median and the 99th percentile of the small jobs,
and both as multiples of those alone just before. Then two tenants send long prompts for so many
seconds, after one has sent as many alone: the share of each in the tokens, and the rate of both
together as a multiple of that of the one. Goal: at most 3 and 5 times, shares of 0.45 to 0.55, and
a rate of at least 0.95.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
from services import ADMIN, Busy, keys_of, report, service, small_jobs

sys.path.append(str(Path(__file__).parents[1] / "tests" / "engine"))
from tiny import HIDDEN, VOCABULARY, checkpoint

MODEL = "tiny"
LENGTH = 1900
SMALL = 16
GENERATED = 8
#: Of harvests and lenses, whose writers take longer than the model.
TERMINAL = ("succeeded", "failed", "cancelled", "aborted")

_random = random.Random(7)


def prompt(length: int = LENGTH) -> list[int]:
    """Tokens that no other prompt begins with."""
    return [_random.randrange(2, VOCABULARY) for _ in range(length)]


def jobs(prompts: int, **fields: Any) -> dict[str, Any]:
    asked = [prompt() for _ in range(prompts)]
    return {"model": MODEL, "prompts": asked, "sampling": {"max_tokens": 1}, **fields}


def harvest() -> dict[str, Any]:
    lines = [prompt(256) for _ in range(200)]
    return {"model": MODEL, "source": {"lines": lines}, "layers": "all", "positions": ANY}


#: The tokenizer has no token that begins a text.
ANY = {"skip_bos": False}
EDIT = {
    "layers": [1],
    "vector": [0.1] * HIDDEN,
    "trigger": {"token_ids": [[5, 6]]},
}
CAPTURE = {"layers": "all", "positions": "all"}
LENS = {"layers": "all", "positions": "all", "top_k": 1}


class Work(NamedTuple):
    """What the other tenant sends: `make` a body for `path`, at so many at once."""

    name: str
    make: Callable[[], dict[str, Any]]
    at_once: int = 4
    path: str = "/v1/jobs"


KINDS = [
    Work("nothing", dict, 0),
    Work("long captures", lambda: jobs(16, capture=CAPTURE)),
    Work("long prompts", lambda: jobs(32)),
    Work("60 prompts with triggers", lambda: jobs(60, steering=[EDIT]), 1),
    Work("harvest", harvest, 1, "/v1/harvests"),
    Work("lens of all rows", lambda: jobs(4, lens=LENS)),
]


def completion() -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt(SMALL), "max_tokens": GENERATED}


class Jobs(Busy):
    """Keeps jobs of a kind under way while it is open; `done` counts those that ended."""

    def __init__(self, url: str, key: str, work: Work) -> None:
        super().__init__(url, key, work.at_once)
        self._work = work
        self.done = 0
        self.states = set[str]()

    def _ask(self, http: httpx2.Client) -> None:
        answer = http.post(self._work.path, json=self._work.make())
        self.states.add(self._outcome(http, answer))
        self.done += 1

    def _outcome(self, http: httpx2.Client, answer: httpx2.Response) -> str:
        """Wait for the end of what was asked; cancel it when the kind is over."""
        if answer.status_code != 202:
            return f"{answer.status_code} {answer.text[:200]}"
        at = f"{self._work.path}/{answer.json()['id']}"
        while not self._over.wait(0.02):
            state = http.get(at).json()["state"]
            if state in TERMINAL:
                return state
        http.post(f"{at}/cancel")
        self.done -= 1  # what does not end is not counted
        return "cancelled"


@contextmanager
def serving() -> Iterator[tuple[str, dict[str, str]]]:
    """The service's URL, and a key for each of three tenants."""
    with (
        tempfile.TemporaryDirectory(prefix="midstream-tiny-") as folder,
        service(
            engine="vllm",
            model=str(checkpoint("llama", Path(folder) / "tiny")),
            model_name=MODEL,
            log_level="WARNING",
            auth="keys",
            admin_key=ADMIN,
            certify=False,
            compare="off",
            **{"engine.dtype": "float32", "engine.max_model_len": 2048, "kv_cache_gib": 1.0},
        ) as stack,
    ):
        yield stack.url, keys_of(stack.url, "small", "large", "other")


def beside(url: str, keys: dict[str, str], kinds: list[Work], samples: int) -> list[dict[str, Any]]:
    """Measure the small jobs beside each kind."""
    rows = []
    with small_jobs(url, keys["small"], samples, completion) as measured:
        for work in kinds:
            alone = measured()
            with Jobs(url, keys["large"], work) as busy:
                time.sleep(2)  # until its jobs are in the engine
                found = measured()
            rows.append(
                {
                    "beside": work.name,
                    "ended": busy.done,
                    "states": "/".join(sorted(busy.states)),
                    "alone p50/p99 ms": "{:.0f}/{:.0f}".format(*alone),
                    "beside p50/p99 ms": "{:.0f}/{:.0f}".format(*found),
                    "p50 ×": round(found[0] / alone[0], 1),
                    "p99 ×": round(found[1] / alone[1], 1),
                }
            )
            print(rows[-1], flush=True)
    return rows


def shared(url: str, keys: dict[str, str], seconds: float) -> dict[str, Any]:
    """Two tenants with long prompts, after one that sends as many."""
    work = Work("long prompts", lambda: jobs(4), 8)

    def rates(*tenants: str) -> list[float]:
        """Jobs each second of each."""
        all_busy = [Jobs(url, keys[tenant], work) for tenant in tenants]
        with ExitStack() as ending:
            for busy in all_busy:
                ending.enter_context(busy)
            time.sleep(2)
            before = [busy.done for busy in all_busy]
            began = time.perf_counter()
            time.sleep(seconds)
            after = [busy.done for busy in all_busy]
            took = time.perf_counter() - began
        return [(now - then) / took for now, then in zip(after, before, strict=True)]

    rates("large")
    alone = rates("large", "large")
    two = rates("large", "other")
    return {
        "beside": "each other",
        "share": round(two[0] / sum(two), 2),
        "prompt tokens/s": round(sum(two) * 4 * LENGTH),
        "rate ×": round(sum(two) / sum(alone), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    kinds = [
        work
        for work in KINDS
        if not options.only or any(part in work.name for part in options.only)
    ]
    with serving() as (url, keys):
        rows = beside(url, keys, kinds, options.samples)
        if options.seconds:
            rows.append(shared(url, keys, options.seconds))
    report("fair_share", rows, cores=os.cpu_count(), load=os.getloadavg()[0])


if __name__ == "__main__":
    main()

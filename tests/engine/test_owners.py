"""Do an operator's edits and policies do the same on the real engine, whatever requests wish?"""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest
from adapters import LLAMA, make_adapter
from host import prompt_of, relative_error
from stack import Stack
from tiny import HIDDEN

from midstream.client import Client
from midstream.client.sdk.wire import returned_rows
from midstream.schemas.access.keys import Limits
from midstream.schemas.artifacts.probes import ProbeResult
from midstream.schemas.base.edit_sizes import EditLimit

pytestmark = [pytest.mark.long, pytest.mark.slow("forty pairs over HTTP")]

PROMPT, OTHER = prompt_of(12, seed=5), prompt_of(12, seed=6)
SITE = {"layers": 1, "hook": "post_block"}
#: The operator's edit of each row, and a request's that undoes it.
PUSH = np.full(HIDDEN, 2.0, dtype=np.float32)
LATE = {"layers": 2, "vector": PUSH, "positions": "all_generated"}
ROWS = {**SITE, "positions": "all_prompt", "at": "after"}
#: What a request may wish, as fields of its body.
WISHES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "limit": {"steering": [{"module": "undo", "limit": {"relative": 1e-6}}]},
    "tenant's limit": {"steering": [{"module": "undo"}]},
    "edit": {"steering": [{"module": "late"}]},
    "patch": {"patch": [{"layers": 2, "positions": "last_prompt", "source": {"zeros": True}}]},
    "adapter": {"lora": "owners"},
    "memory": {"capture": {**ROWS, "consumers": ["memory"]}},
}


class Operated:
    """The service with global steering, and with a policy of all traffic that acts."""

    def __init__(self, stack: Stack) -> None:
        self.client = Client(stack.url)
        self.http = httpx2.Client(base_url=stack.url, timeout=120)
        make_adapter(
            Path(stack.settings.artifacts_of("loras")), "owners", Path(stack.settings.model), LLAMA
        )
        self.client.loras.put("owners", "owners")
        weight = np.random.default_rng(4).normal(size=(1, HIDDEN))
        self.client.probes.put("watch", weight=weight, layer=0, thresholds=[1e9])
        calm = {"layers": 3, "vector": PUSH, "positions": "all_generated"}
        for name, entry in (("undo", {**SITE, "vector": -PUSH}), ("late", LATE), ("calm", calm)):
            self.client.modules.put(name, [entry])
        self.plain = {lora: self.rows(self.run({"lora": lora})) for lora in (None, "owners")}
        self.client.global_steering.put([{**SITE, "vector": PUSH}])
        self.client.policies.put(
            "guard",
            probe="watch",
            condition={"at_least": 0.0, "schedule": {"tokens": "all"}},
            actions=["flag", {"action": "steer", "module": "calm"}],
            mode="active",
            all_traffic=True,
        )
        self.alone = {lora: told(self.run({"lora": lora}).probes) for lora in (None, "owners")}

    def close(self) -> None:
        self.client.policies.delete("guard")
        self.client.global_steering.delete()
        self.client.close()
        self.http.close()

    def run(self, fields: dict[str, Any]) -> Any:
        usual = {"prompts": [PROMPT], "capture": ROWS, "max_tokens": 4, "progress": False}
        return self.client.run(model="tiny", **(usual | fields))

    def rows(self, result: Any) -> np.ndarray:
        """Return the rows of the first prompt after the site, float32 `[tokens, HIDDEN]`."""
        memory = any(report.name == "memory" for report in result.capture_results.consumers)
        reader = returned_rows(result.capture_results) if memory else self.client.capture(result)
        array: np.ndarray = reader.array(1, request=0)
        return array


def told(probes: list[ProbeResult], request: int = 0) -> list[tuple[int, str]]:
    """Return what the policy decided about tokens of this prompt."""
    (score,) = [each for each in probes if each.request == request]
    return [(it.position, it.event) for it in score.decisions if it.position < len(PROMPT)]


# --- Kinds of requests: each returns what the policy decided about `PROMPT`, each time it is in one


def job(operated: Operated, fields: dict[str, Any]) -> list[Any]:
    result = operated.run(fields)
    edits = operated.rows(result) - operated.plain[fields.get("lora")]
    assert relative_error(edits, np.tile(PUSH, (len(PROMPT), 1))) <= 1e-3
    return [told(result.probes)]


def failing(operated: Operated, fields: dict[str, Any]) -> list[Any]:
    body = fields | {"steering": [{**LATE, "limit": {"relative": 1e-6, "then": "fail"}}]}
    view = operated.client.submit(model="tiny", prompts=[PROMPT], max_tokens=4, **body)
    operated.client.wait(view)
    problem = operated.http.get(f"/v1/jobs/{view.id}/result").json()
    assert problem["type"].endswith("edit_too_large")
    return [told(msgspec.convert(problem["probes"], list[ProbeResult]))]


def streamed(operated: Operated, fields: dict[str, Any]) -> list[Any]:
    """Two choices of each of two prompts."""
    body = {"model": "tiny", "prompt": [PROMPT, OTHER], "n": 2, "max_tokens": 4, "stream": True}
    body |= msgspec.to_builtins(fields, enc_hook=np.ndarray.tolist)
    answer = operated.http.post("/v1/completions", json=body)
    (name,) = {json.loads(line[6:])["id"] for line in answer.text.split("\n\n") if "{" in line}
    probes = operated.client.result(name).probes
    return [told(probes, choice) for choice in (0, 1)]


def dose(operated: Operated, fields: dict[str, Any]) -> list[Any]:
    """The prompt as text, without the request's edits and at two scales."""
    body = {"scales": [-1.0, 2.0], "effect": {"words": ["w40"]}, "held_out": ["w3 w4 w5"]}
    text = " ".join(f"w{token}" for token in PROMPT)
    result = operated.client.dose(model="tiny", prompts=[text], **(body | fields))
    alone = told(operated.run({"prompts": [text]}).probes)
    assert [told(result.probes, 2 * cell) for cell in range(3)] == [alone] * 3
    return []


def sweep(operated: Operated, fields: dict[str, Any]) -> list[Any]:
    pair = {"clean": OTHER, "corrupt": PROMPT, "answer": [40], "foil": [41], "alignment": "left"}
    body = {"metric": "logit_diff", "layers": "2,3", "positions": [3, 8], "pairs": [pair]}
    view = operated.client.sweeps.submit(model="tiny", **(body | fields))
    operated.client.wait(view)
    return [told(operated.client.result(view.id).probes)]


def harvest(operated: Operated, fields: dict[str, Any]) -> list[Any]:
    """Only the number of flagged sequences is shown."""
    view = operated.client.harvests.submit(
        model="tiny", source={"lines": [PROMPT, OTHER]}, layers=[1], **fields
    )
    operated.client.harvests.wait(view)
    flagged = operated.client.harvests.get(view).flagged
    lines = [operated.run({"prompts": [each], **fields}) for each in (PROMPT, OTHER)]
    assert flagged == sum(any(it.flagged for it in line.probes) for line in lines) > 0
    return []


def merged(*wishes: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for wish in wishes:
        for name, wished in WISHES[wish].items():
            fields[name] = fields.get(name, []) + wished if name == "steering" else wished
    return fields


#: Two wishes of a job, or a kind of request and a wish.
PAIRS: list[tuple[Callable[..., list[Any]], tuple[str, ...]]] = [
    *((job, pair) for pair in itertools.combinations(WISHES, 2)),
    *((failing, (wish,)) for wish in ("nothing", "patch", "adapter", "memory")),
    *(
        (streamed, (wish,))
        for wish in ("nothing", "limit", "edit", "adapter", "patch", "tenant's limit")
    ),
    *((dose, (wish,)) for wish in ("limit", "edit", "tenant's limit")),
    *((sweep, (wish,)) for wish in ("nothing", "adapter")),
    *((harvest, (wish,)) for wish in ("nothing", "limit", "adapter", "tenant's limit")),
]


@pytest.fixture(scope="module")
def operated(tiny_stack: Stack) -> Iterator[Operated]:
    made = Operated(tiny_stack)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("kind", "wishes"), PAIRS, ids=[f"{kind.__name__}: {' and '.join(w)}" for kind, w in PAIRS]
)
def test_no_wish_of_a_request_changes_what_the_operator_does(
    operated: Operated, kind: Callable[..., list[Any]], wishes: tuple[str, ...]
) -> None:
    fields = merged(*wishes)
    limits = EditLimit(relative=1e-6) if "tenant's limit" in wishes else None
    operated.client.tenants.put("default", Limits(edit_limit=limits))
    for found in kind(operated, fields):
        assert found == operated.alone[fields.get("lora")]

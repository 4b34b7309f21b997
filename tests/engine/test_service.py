"""The whole service on the real engine: what users send over HTTP arrives in the forward pass, and
what goes wrong there comes back. Captures may be in a bucket, and an operator may edit every
request.
"""

import base64
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest
import s3_kit
from adapters import LLAMA, make_adapter
from host import prompt_of, relative_error
from stack import Stack
from tiny import HIDDEN
from tolerances import BF16_BATCH, LOGPROB_MOVED

from midstream.client import CaptureReader, Client, returned_rows
from midstream.schemas.access.keys import Limits
from midstream.schemas.artifacts.probes import ProbeResult
from midstream.schemas.base.edit_sizes import EditLimit
from midstream.schemas.jobs.jobs import CaptureResults, SamplingRequest, State
from midstream.schemas.prompts.selectors import HOOKS as RESIDUAL
from midstream.schemas.requests.source_runs import RunRow, row_name, run_key
from midstream.schemas.requests.specs import StoredCapture, StoredSteering
from midstream.storage.store import open_store

CHAT = [{"role": "user", "content": "Name a colour."}]


@pytest.fixture(scope="module")
def service(demo_stack: Stack) -> Stack:
    return demo_stack


@pytest.fixture(scope="module")
def vector(service: Stack) -> np.ndarray:
    """A push that changes what the demo model says."""
    return (60 * np.random.default_rng(3).normal(size=576) / 24).astype(np.float32)


def packed(values: np.ndarray) -> dict:
    return {
        "dtype": "float32",
        "shape": list(values.shape),
        "data": base64.b64encode(values.astype("<f4").tobytes()).decode(),
    }


def ask(service: Stack, path: str, **body: Any) -> tuple[np.ndarray, dict[str, float]]:
    """The last layer's rows at the prompts' last tokens `[prompts, hidden]`, and how likely the
    next tokens are, where asked.
    """
    body = {
        "model": "demo",
        "temperature": 0,
        "max_tokens": 2,
        "capture": {"layers": [-1], "positions": "last_prompt", "consumers": ["memory"]},
        "capture_wait": True,
    } | body
    response = httpx2.post(f"{service.url}/v1/{path}", json=body, timeout=60).raise_for_status()
    parts = [
        json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")
    ] or [response.json()]
    results = next(
        part["capture_results"] for part in reversed(parts) if part.get("capture_results")
    )
    assert parts[-1].get("determinism", {}).get("consistent", True) is True
    reader = returned_rows(msgspec.convert(results, CaptureResults))
    rows = np.concatenate([reader.array(29, request=request) for request in reader.requests()])
    logprobs = parts[0]["choices"][0].get("logprobs")
    if logprobs is None:
        return rows, {}
    if "content" in logprobs:
        return rows, {
            each["token"]: each["logprob"] for each in logprobs["content"][0]["top_logprobs"]
        }
    return rows, logprobs["top_logprobs"][0]


# field case 11, field case 12
@pytest.mark.slow("a real model with 30 layers answers nine requests on one thread")
def test_every_endpoint_is_steered_on_the_real_engine(service: Stack, vector: np.ndarray) -> None:
    """Every way of asking gives the steered stream of the same prompt, and not the plain one: rows
    are compared, not tokens.
    """
    steering = [{"layers": [10], "vector": packed(vector)}]
    prompts = ["The sky is", "My favourite food is"]
    for path, asked in (
        ("chat/completions", [{"messages": CHAT}]),
        ("completions", [{"prompt": prompt} for prompt in prompts]),
    ):
        top: dict[str, Any] = (
            {"logprobs": True, "top_logprobs": 20} if path.startswith("chat") else {"logprobs": 20}
        )
        plain = [ask(service, path, **each, **top) for each in asked]
        alone = [ask(service, path, **each, steering=steering, **top) for each in asked]
        for (rows, logprobs), (steered, others) in zip(plain, alone, strict=True):
            assert relative_error(steered, rows) > 10 * BF16_BATCH
            moved = [
                abs(others[token] - logprobs[token]) for token in others.keys() & logprobs.keys()
            ]
            assert max(moved, default=np.inf) > LOGPROB_MOVED
        wanted = np.concatenate([rows for rows, _ in alone])
        together = {"prompt": prompts} if path == "completions" else asked[0]
        for ways in ({}, {"stream": True}):
            rows, _ = ask(service, path, **together, steering=steering, **ways)
            assert relative_error(rows, wanted) <= BF16_BATCH, (path, ways)


def test_a_streamed_capture_ends_with_its_results(service: Stack) -> None:
    body = {
        "model": "demo", "prompt": "The sky is", "max_tokens": 6, "temperature": 0, "stream": True,
        "capture": {"layers": [3], "positions": "all"}, "capture_wait": True,
    }  # fmt: skip
    with httpx2.stream("POST", f"{service.url}/v1/completions", json=body, timeout=60) as response:
        events = [
            json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")
        ]
    results = next(
        event["capture_results"] for event in reversed(events) if event.get("capture_results")
    )
    assert results["status"] == "ok"
    assert all((Path(results["root"]) / file["path"]).is_file() for file in results["files"])


END = 2  # the demo model's end of a message
DRAWN = {"temperature": 1.5, "seed": 1, "max_tokens": 12}
FEW = DRAWN | {"allowed_token_ids": [*range(300, 308)], "max_tokens": 24}
ENDING = {"logit_bias": {END: 100}}
#: Field of a job's `sampling` → the sampling beside it, and a value that changes the result.
EFFECTS: dict[str, tuple[dict[str, Any], Any]] = {
    "max_tokens": ({}, 3),
    "temperature": ({"seed": 1}, 2.0),
    "top_p": (DRAWN, 0.01),
    "top_k": (DRAWN, 1),
    "seed": (DRAWN, 2),
    "stop": ({}, [" "]),
    "stop_token_ids": ({"logit_bias": {5: 100}}, [5]),
    "ignore_eos": (ENDING, True),
    "logprobs": ({}, 1),
    "prompt_logprobs": ({}, 1),
    "min_tokens": (ENDING, 3),
    "min_p": (DRAWN, 1.0),
    "presence_penalty": (FEW, 2.0),
    "frequency_penalty": (FEW, 2.0),
    "repetition_penalty": ({}, 100.0),
    "logit_bias": ({}, {5: 100}),
    "allowed_token_ids": ({}, [5]),
    "bad_words": ({"allowed_token_ids": [260, 253], "logit_bias": {260: 100}}, [" the"]),
    "skip_special_tokens": (ENDING | {"ignore_eos": True}, False),
    "include_stop_str_in_output": ({"stop": [" "]}, True),
    "structured_outputs": ({}, {"choice": ["blue"]}),
}


#: A tokenizer of bytes, such as the demo model's, writes no space between special tokens.
OF_OTHERS = "spaces_between_special_tokens"


def test_every_field_of_sampling_has_an_effect_listed() -> None:
    assert EFFECTS.keys() | {OF_OTHERS} == set(SamplingRequest.__struct_fields__)


def test_vllm_is_told_what_only_other_tokenizers_do() -> None:
    from midstream.workers.engine.vllm_output import sampling_params

    given = {value: SamplingRequest(spaces_between_special_tokens=value) for value in (True, False)}
    told = {value: sampling_params(sampling, None) for value, sampling in given.items()}
    assert {value: params.spaces_between_special_tokens for value, params in told.items()} == {
        True: True,
        False: False,
    }


@pytest.mark.long
@pytest.mark.parametrize("field", EFFECTS)
def test_a_field_of_sampling_changes_the_result(service: Stack, field: str) -> None:
    beside, value = EFFECTS[field]
    with Client(service.url) as client:
        plain, changed = [
            client.run(prompts=["The sky is"], sampling=sampling).outputs[0]
            for sampling in (beside, {**beside, field: value})
        ]
    assert msgspec.structs.replace(changed, cached_tokens=plain.cached_tokens) != plain


@pytest.mark.long
def test_windows_store_the_rows_that_slicing_a_whole_capture_gives(service: Stack) -> None:
    """Over HTTP: the last rows, those around a text wherever it comes, and none around another."""

    def tokens_of(text: str) -> list[int]:
        body = {"model": "demo", "prompt": text, "add_special_tokens": False}
        answer = httpx2.post(f"{service.url}/v1/tokenize", json=body, timeout=60)
        return answer.raise_for_status().json()["tokens"]

    with Client(service.url) as client:

        def rows(positions: Any) -> tuple[list[int], list[int], np.ndarray]:
            done = client.run(
                model="demo",
                prompts=["Paris, Rome, Paris, Rome,"],
                sampling={"max_tokens": 8, "temperature": 0},
                capture={"layers": [3], "positions": positions},
                timeout=60,
            )
            reader = client.capture(done.id)
            return reader.positions(), reader.token_ids(), reader.array(3)

        places, tokens, whole = rows("all")
        sequences = [tokens_of("Paris"), tokens_of(" Paris")]
        hits = {
            at + more
            for sequence in sequences
            for at in places
            if tokens[at : at + len(sequence)] == sequence
            for more in range(len(sequence))
        }
        assert len(hits) >= 2
        wanted = {
            "last": ({"last": 5}, places[-5:]),
            "around": (
                {"around": {"text": "Paris", "before": 1}},
                [at for at in places if {at, at + 1} & hits],
            ),
            "nowhere": ({"around": {"text": "Reykjavik zebra"}}, []),
        }
        for positions, expected in wanted.values():
            found, _, values = rows(positions)
            assert found == expected
            np.testing.assert_allclose(values, whole[expected], atol=1e-4)


def test_rows_without_a_token_are_those_of_a_job_with_one(service: Stack) -> None:
    """Rows and readings of a few layers, over HTTP; the answer says how many were computed."""
    asked: dict[str, Any] = {
        "prompts": [prompt_of(40, seed=7), prompt_of(9, seed=8)],
        "capture": {"layers": [0, 5], "positions": "all_prompt"},
        "progress": False,
    }
    with Client(service.url) as client:
        none, one = (client.run(**asked, max_tokens=tokens) for tokens in (0, 1))
        rows, wanted = (client.capture(result) for result in (none, one))
        for request, layer in itertools.product((0, 1), (0, 5)):
            assert np.array_equal(
                rows.array(layer, request=request), wanted.array(layer, request=request)
            )
        deep = client.run(**asked | {"capture": {"layers": -1}}, max_tokens=0)
    assert [len(output.token_ids) for output in (*none.outputs, *one.outputs)] == [0, 0, 1, 1]
    assert [result.layers for result in (none, one, deep)] == [6, None, 30]
    for result, depth in ((none, 6), (one, 0), (deep, 30)):
        (stage,) = result.determinism.stages
        assert [rank.depth for rank in stage.ranks] == [depth] * 2


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"capture": {"layers": [30]}}, "capture.layers"),
        ({"steering": [{"layers": [0], "vector": packed(np.ones(575))}]}, "steering[0].vector"),
        ({"prompt": [5] * 1025}, "prompt"),
    ],
)
def test_bad_input_is_refused_by_field_and_the_engine_never_sees_it(
    service: Stack, change: dict, field: str
) -> None:
    with httpx2.Client(base_url=service.url, timeout=30) as http:  # field case 27
        before = len(http.get("/v1/jobs").json()["jobs"])
        answer = http.post(
            "/v1/completions",
            json={"model": "demo", "prompt": "The sky is", "max_tokens": 1, **change},
        )
        assert answer.status_code == 400, answer.text
        assert answer.json()["field"].startswith(field)
        assert len(http.get("/v1/jobs").json()["jobs"]) == before


@pytest.mark.long
def test_engine_load_is_reported_while_generating(service: Stack) -> None:
    body = {"model": "demo", "prompt": "The sky is", "max_tokens": 120, "ignore_eos": True}
    seen: dict[str, Any] = {"running": 0}
    for _ in range(5):  # on a busy machine a request may be over before the worker was asked
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(
                httpx2.post, f"{service.url}/v1/completions", json=body, timeout=60
            )
            while not answer.done() and not seen["running"]:
                (worker,) = httpx2.get(f"{service.url}/v1/steering/dynamic", timeout=30).json()[
                    "workers"
                ]
                (seen,) = worker["ranks"]
            assert answer.result().status_code == 200
        if seen["running"]:
            break
    assert seen["running"] == 1
    assert seen["queued"] == 0
    assert 0 < seen["kv_cache"] < 0.5


def test_ranks_and_engine_log_json_lines_like_the_worker(service: Stack) -> None:
    text = service.log("worker")
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    others = [line for line in text.splitlines() if not line.startswith(("{", "worker ready"))]
    assert [line for line in others if "INFO" in line or "WARNING" in line] == []
    assert {line["process"] for line in lines} >= {"worker", "engine", "rank"}
    assert {line["worker"] for line in lines} == {"w1"}
    of_rank = [line for line in lines if line["process"] == "rank"]
    assert {line["rank"] for line in of_rank} == {0}
    assert any(line["logger"].startswith("vllm.") for line in of_rank)


# --- With captures in a bucket --------------------------------------------------------------------


HOOKS = {"pre_attn": [0, 1], "post_block": [0, 1]}


@pytest.fixture(scope="module")
def stack(
    llama: Path, proxy: s3_kit.FaultProxy, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    engine = {
        "engine": "vllm",
        "model": str(llama),
        "model_name": "tiny",
        "engine.max_model_len": 4096,
        "kv_cache_gib": 0.1,
        "lease_s": 60,
    }
    engine["tuning.capture_window_mib"] = 1
    store = {
        "artifact_store": f"s3://{s3_kit.new_bucket()}/lab?endpoint={proxy.url}",
        "artifact_access_key": s3_kit.ACCESS_KEY,
        "artifact_secret_key": s3_kit.SECRET_KEY,
    }
    with Stack(tmp_path_factory.mktemp("stack"), start_timeout_s=400, **engine, **store) as running:
        yield running


@pytest.mark.long
@pytest.mark.parametrize("layout", ["packed", "per_file", "segment"])
def test_rows_in_the_bucket_are_those_of_the_engine(stack: Stack, layout: str) -> None:
    both = StoredCapture(
        sites=HOOKS,
        positions="all",
        tag=layout.replace("_", "-"),
        layout=layout,
        consumers=["filesystem", "memory"],
    )
    job = stack.submit(["a prompt", "another"], max_tokens=5, capture=both)
    view = stack.wait(job)
    assert view.state == State.SUCCEEDED
    assert view.capture_status == "ok"
    told = CaptureReader.from_bytes(
        [made.rows for made in stack.result(job).capture_results.consumers if made.rows]
    )
    stored = CaptureReader(stack.settings.artifacts, job)
    assert stored.requests() == told.requests() == [0, 1]
    for request in stored.requests():
        for hook, layers in HOOKS.items():
            for layer in layers:
                np.testing.assert_array_equal(
                    stored.raw(layer, hook, request), told.raw(layer, hook, request)
                )
    assert all(check.ok for check in stored.verify())
    assert not list(stack.directory.rglob("*.safetensors"))


@pytest.mark.long
def test_a_long_capture_and_a_patch_from_it_go_through_the_bucket(stack: Stack) -> None:
    """Beyond the window rows wait in a scratch file; a rank then reads a row of it from the
    bucket.
    """
    long = StoredCapture(
        sites={hook: [0, 1] for hook in RESIDUAL}, positions="all", tag="long", layout="packed"
    )
    job = stack.submit(
        ["the source of a patch"], max_tokens=1500, ignore_eos=True, capture=long, run="long"
    )
    assert stack.wait(job).state is State.SUCCEEDED
    reader = CaptureReader(stack.settings.artifacts, job)
    assert len(reader.positions()) > 1500
    row = row_name(RunRow(run_key(job, 0, "long"), "post_block", 0, 2))
    edit = StoredSteering(
        layers=[0], hook="post_block", positions=[2], family="replace", tensors=[row], numbers=[1.0]
    )
    patched = stack.submit(
        ["another prompt entirely"],
        max_tokens=1,
        steering=[edit],
        runs={"long": job},
        capture=StoredCapture(sites={"post_block": [0]}, positions=[2], tag="patched", at="after"),
    )
    assert stack.wait(patched).state is State.SUCCEEDED
    with CaptureReader(open_store(stack.settings.artifacts), patched) as edited:
        np.testing.assert_array_equal(
            edited.array(0)[0], reader.array(0, "post_block")[reader.positions().index(2)]
        )


# --- What an operator does, whatever requests wish ------------------------------------------------


PROMPT = prompt_of(12, seed=5)
OTHER = prompt_of(12, seed=6)
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
    "three rows": {"steering": [{**LATE, "limit": {"relative": 1.0 + n}} for n in range(3)]},
    "patch": {"patch": [{"layers": 2, "positions": "last_prompt", "source": {"zeros": True}}]},
    "adapter": {"lora": "owners"},
    "memory": {"capture": {**ROWS, "consumers": ["memory"]}},
}


#: The rows of all policies of all traffic.
CALMING = [
    {"action": "steer", "module": "calm", "limit": {"relative": 1.0 + number}}
    for number in range(4)
]


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
            actions=["flag", *CALMING],
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
        return reader.array(1, request=0)


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


@pytest.mark.long
@pytest.mark.slow("the service with a real engine starts")
@pytest.mark.parametrize("number", range(3))
def test_a_request_cannot_name_the_module_of_a_policy(operated: Operated, number: int) -> None:
    name = f"policy:guard:{number}"
    entry = {"module": name, "scale": -1.0}
    answer = operated.http.post(
        "/v1/jobs", json={"model": "tiny", "prompts": [PROMPT], "steering": [entry]}
    )
    assert answer.status_code == 400
    assert answer.json()["field"] == "steering[0].module"


@pytest.mark.long
@pytest.mark.slow("forty pairs over HTTP")
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

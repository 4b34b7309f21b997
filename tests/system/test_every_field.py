"""Every field of every submission has an effect, or is refused by its name.

A field is sent with a value that is not its default. The stored job then differs from the one
without it, or the answer does; else the field is one of `WITHOUT`. A new field fails until it is
listed here.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx2
import msgspec
import pytest
from edge import HIDDEN, MODEL, Api, Hand
from ledger_kit import IDENTITY
from wait_kit import wait_until

from midstream.schemas.jobs.jobs import Job, JobRequest, SamplingRequest
from midstream.schemas.jobs.models import GradientInfo
from midstream.schemas.jobs.openai import ChatRequest, CompletionRequest
from midstream.schemas.jobs.queues import GRADIENTS
from midstream_harvest.ledger.harvests import LedgerHarvests
from midstream_harvest.records.harvests import HarvestRequest
from midstream_lab.records.attributions import AttributionRequest
from midstream_lab.records.doses import DoseRequest
from midstream_lab.records.fits import FitRequest, LensFitRequest
from midstream_lab.records.sweeps import SweepRequest

DEADLINE_S = 60.0
VECTOR = [1.0] * HIDDEN
STEERING = [{"layers": 1, "vector": VECTOR}]
PATCH = [{"layers": 1, "positions": [0], "source": {"zeros": True}}]
PAIR = {"clean": "hello world a", "corrupt": "hello there a", "answer": " b", "foil": " c"}
TOOL = {"type": "function", "function": {"name": "f"}}


class With(NamedTuple):
    """A value that needs other fields beside it, which are sent without it, too."""

    value: Any
    beside: dict[str, Any]


class Submission(NamedTuple):
    path: str
    body: dict[str, Any]
    values: dict[str, Any]  # field → a value that is not its default


HANDLING: dict[str, Any] = {
    "priority": "low",
    "expires_in": 60,
    "callback_url": "http://93.184.216.34/",
    "callback_events": With(["job.failed"], {"callback_url": "http://93.184.216.34/"}),
}
OBSERVED: dict[str, Any] = HANDLING | {
    "model": "nobody",
    "lora": "nobody",
    "capture": {"layers": [1]},
    "steering": STEERING,
    "patch": PATCH,
    "probes": ["nobody"],
    "policies": ["nobody"],
    "conversation": "talk",
    "lens": {"layers": [99]},
    "features": [{"sae": "nobody"}],
    "readers": [{"reader": "nobody"}],
    "metadata": {"who": "me"},
}
SAMPLING: dict[str, Any] = {
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "seed": 3,
    "stop": ["a"],
    "stop_token_ids": [3],
    "ignore_eos": True,
    "logprobs": 2,
    "prompt_logprobs": 2,
    "min_tokens": 2,
    "min_p": 0.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 2.0,
    "logit_bias": {"3": 1.0},
    "allowed_token_ids": [3],
    "bad_words": ["a"],
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "structured_outputs": {"regex": "a"},
}
OPENAI: dict[str, Any] = (
    OBSERVED
    | SAMPLING
    | {
        "stream": True,
        "stream_options": With({"include_usage": True}, {"stream": True}),
        "capture_wait": With(True, {"capture": {"layers": [1]}}),
        "n": With(2, {"temperature": 1}),
        "response_format": {"type": "json_object"},
        "return_token_ids": True,
        "return_tokens_as_token_ids": With(True, {"logprobs": 1}),
        "user": "me",
        "safety_identifier": "me",
        "prompt_cache_key": "me",
        "prompt_cache_retention": "24h",
        "service_tier": "flex",
        "store": True,
        "use_beam_search": True,
        "truncate_prompt_tokens": 2,
        "logprob_token_ids": [3],
        "kv_transfer_params": {"a": 1},
    }
)
SWEEP: dict[str, Any] = HANDLING | {
    "model": "nobody",
    "lora": "nobody",
    "pairs": [PAIR | {"answer": " d"}],
    "hooks": ["attn_out"],
    "layers": "1-2",
    "positions": [1],
    "axis": "together",
    "heads": [0],
    "neurons": {"top": [1]},
    "path": {"receivers": {"layers": [3]}},
    "window": {"layers": 2},
    "metric": "logprob",
    "direction": "noise",
    "ablation": With(
        "zeros", {"pairs": [{"clean": "hello a", "answer": " b"}], "metric": "logprob"}
    ),
    "alignment": With("right", {"pairs": [PAIR | {"clean": "world a"}]}),
    "alpha": 0.5,
    "mask": "0-3",
    "noise": 3,
    "metadata": {"who": "me"},
}
FIT: dict[str, Any] = HANDLING | {
    "model": "nobody",
    "name": "other",
    "layers": 1,
    "seed": 3,
    "rank": 2,
    "description": "what it is",
    "metadata": {"who": "me"},
}
SUBMISSIONS: dict[type[msgspec.Struct], Submission] = {
    JobRequest: Submission(
        "/v1/jobs",
        {"model": MODEL, "prompts": ["hello there"]},
        OBSERVED
        | {
            "prompts": ["hello"],
            "messages": With([[{"role": "user", "content": "a"}]], {"prompts": None}),
            "add_special_tokens": False,
            "sampling": {"max_tokens": 3},
        },
    ),
    CompletionRequest: Submission(
        "/v1/completions",
        {"model": MODEL, "prompt": "hello there", "max_tokens": 4},
        OPENAI
        | {
            "prompt": "hello",
            "echo": True,
            "add_special_tokens": False,
            "best_of": 2,
            "suffix": "a",
        },
    ),
    ChatRequest: Submission(
        "/v1/chat/completions",
        {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
        OPENAI
        | {
            "messages": [{"role": "user", "content": "a"}],
            "max_completion_tokens": 3,
            "logprobs": True,
            "top_logprobs": With(2, {"logprobs": True}),
            "return_tokens_as_token_ids": With(True, {"logprobs": True}),
            "tools": [TOOL],
            "tool_choice": "required",
            "parallel_tool_calls": With(False, {"tools": [TOOL]}),
            "add_generation_prompt": False,
            "continue_final_message": With(True, {"add_generation_prompt": False}),
            "chat_template_kwargs": {"bos_token": "a"},
            "reasoning_effort": "much",
            "functions": [1],
            "function_call": "auto",
            "chat_template": "a",
            "documents": [1],
            "add_special_tokens": True,
            "include_reasoning": False,
            "verbosity": "low",
            "modalities": ["audio"],
            "audio": {"a": 1},
            "prediction": {"a": 1},
            "web_search_options": {"a": 1},
        },
    ),
    SweepRequest: Submission("/v1/sweeps", {"model": MODEL, "pairs": [PAIR]}, SWEEP),
    AttributionRequest: Submission(
        "/v1/attributions",
        {"model": MODEL, "pairs": [PAIR], "seed": 1},
        SWEEP
        | {
            "method": "integrated",
            "steps": With(3, {"method": "integrated"}),
            "verify": {"top": 3},
            "seed": 3,
            "sae": "nobody",
            "keep": 3,
        },
    ),
    DoseRequest: Submission(
        "/v1/doses",
        {
            "model": MODEL,
            "prompts": ["hello world a"],
            "steering": [{"vector": VECTOR}],
            "layers": "1-2",
            "scales": [2.0, -1.0],
            "effect": {"target": " b"},
            "held_out": ["a b c"],
            "max_tokens": 4,
        },
        HANDLING
        | {
            "model": "nobody",
            "prompts": ["hello"],
            "steering": [{"vector": [2.0] * HIDDEN}],
            "scales": [3.0],
            "effect": {"words": ["a"]},
            "held_out": ["a b"],
            "layers": 1,
            "max_tokens": 5,
            "max_loss": 0.5,
            "max_repetition": 0.5,
            "metadata": {"who": "me"},
        },
    ),
    HarvestRequest: Submission(
        "/v1/harvests",
        {"model": MODEL, "source": {"lines": ["hello there"]}},
        {
            "model": "nobody",
            "layers": 2,
            "hook": "attn_out",
            "hooks": {"attn_out": 1},
            "source": {"lines": ["hello"]},
            "cut": {"max_length": 3},
            "positions": {"skip_first": 1},
            "at": "after",
            "generate": {"max_tokens": 3},
            "dtype": "float16",
            "shards": {"mib": 3},
            "to": "stream",
            "store": "nowhere",
            "max_tokens": 100,
            "priority": "high",
            "metadata": {"who": "me"},
            "steering": STEERING,
            "lora": "nobody",
        },
    ),
    FitRequest: Submission(
        "/v1/modules/fit",
        {
            "model": MODEL,
            "name": "polite",
            "method": "reft",
            "layers": "1-2",
            "examples": [{"prompt": "hello world a", "target": " b"}] * 8,
        },
        FIT
        | {
            "method": "vector",
            "hook": "attn_out",
            "positive": ["hello"],
            "negative": ["hello"],
            "examples": [{"prompt": "hello", "target": " b"}] * 8,
            "read": "all_prompt",
            "positions": [0],
            "held_out": 0.5,
            "steps": 3,
            "batch": 3,
            "learning_rate": 0.5,
            "register": "always",
        },
    ),
    LensFitRequest: Submission(
        "/v1/jacobians/fit",
        {"model": MODEL, "name": "lens", "prompts": ["hello world a b"] * 8, "skip_first": 0},
        FIT | {"prompts": ["hello world"] * 8, "folder": "other", "skip_first": 1, "max_tokens": 3},
    ),
}
#: Accepted, and without effect: what OpenAI's clients send.
WITHOUT = {
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "service_tier",
    "store",
}
#: Held until what no test here sends: its effect is in test_api_completions.py.
HELD = {"capture_wait"}
CASES = [
    pytest.param(kind, field, id=f"{kind.__name__}-{field}")
    for kind, submission in SUBMISSIONS.items()
    for field in submission.values
    if field not in HELD
]


@pytest.fixture
def hand(api: Api) -> Iterator[Hand]:
    """A worker by hand that grades, beside one for gradients."""
    with Hand(api.settings, grades=True, tool_parser="hermes") as worker:
        facts = {"model": MODEL, "identity": IDENTITY, "dtype": "float32", "device": "cpu"}
        sign = worker.sign(worker="by hand, gradients", queue=GRADIENTS)
        worker.do(worker.ledger.publish_model(GradientInfo(**facts), sign))
        yield worker


@pytest.mark.parametrize("kind", SUBMISSIONS, ids=lambda kind: kind.__name__)
def test_every_field_of_a_submission_is_sent(kind: type[msgspec.Struct]) -> None:
    assert SUBMISSIONS[kind].values.keys() == set(kind.__struct_fields__)


def test_every_field_of_sampling_is_sent() -> None:
    assert SAMPLING.keys() == set(SamplingRequest.__struct_fields__)


@pytest.mark.parametrize(("kind", "field"), CASES)
def test_a_field_has_an_effect_or_is_refused(
    api: Api, hand: Hand, pool: ThreadPoolExecutor, kind: type[msgspec.Struct], field: str
) -> None:
    path, body, values = SUBMISSIONS[kind]
    value, beside = values[field] if isinstance(values[field], With) else (values[field], {})
    found = outcome(api, hand, pool, path, {**body, **beside, field: value})
    if isinstance(found, str):
        assert found.split(".")[0].split("[")[0] == field
        return
    without = outcome(api, hand, pool, path, {"model": MODEL, **body, **beside})
    assert (found == without) == (field in WITHOUT)


@pytest.mark.parametrize("field", SAMPLING)
def test_a_field_of_sampling_is_kept(
    api: Api, hand: Hand, pool: ThreadPoolExecutor, field: str
) -> None:
    path, body, _ = SUBMISSIONS[JobRequest]
    found = outcome(api, hand, pool, path, {**body, "sampling": {field: SAMPLING[field]}})
    assert found != outcome(api, hand, pool, path, body)


def outcome(api: Api, hand: Hand, pool: ThreadPoolExecutor, path: str, body: Any) -> Any:
    """The field that a refusal names; else what is stored, with the answer of an OpenAI-style
    endpoint.
    """
    asked = pool.submit(api.http.post, path, json=body)
    if "completions" not in path:
        answer = asked.result()
        return named(answer) or plain(stored(hand, path, answer.json()["id"]))
    wait_until(lambda: asked.done() or is_queued(hand), DEADLINE_S)
    if asked.done():
        return named(asked.result())
    claim, answer = hand.answered(asked, receipts=True)
    said = answer.text.replace(claim.job.id, "ID")
    return plain(claim.job), said.replace(str(int(claim.job.created)), "TIME")


def is_queued(hand: Hand) -> bool:
    return any(job.state == "queued" for job in hand.do(hand.ledger.list(limit=1)).jobs)


def named(answer: httpx2.Response) -> str:
    """The field that a refusal names; empty: it is none."""
    return str(answer.json()["field"]) if answer.status_code >= 400 else ""


def stored(hand: Hand, path: str, name: str) -> msgspec.Struct:
    if path == "/v1/harvests":
        return hand.do(LedgerHarvests(hand.ledger).stored(name))
    return hand.job(name)


def plain(record: msgspec.Struct) -> Any:
    """A record without what is its own: id, place, times and traces."""
    own = {name: getattr(record, name) for name in record.__struct_fields__}
    if isinstance(record, Job):
        own["work"] = record.opened
    members = msgspec.to_builtins(own)
    for name in ("id", "created", "trace", "uri"):
        members.pop(name, None)
    if members.get("expires"):
        members["expires"] = True
    return members

"""Does a body at any limit of any route leave the event loop to others, as that of a job does?

Each body is at one limit, or is refused by it, and goes through the route's own code up to what is
sent to Redis. Every constant of `limits.py`, and every route with a body, has a row here, or a
reason to have none.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from test_extreme_requests import EDIT, EXTREMES, VECTOR, calls_by_turn
from test_large_bodies import MODEL, SETTINGS, WORDS, codec

from midstream.api.context import AppContext
from midstream.api.resolve.admission.names import NO_NAMES
from midstream.api.resolve.edits.features import NONE
from midstream.api.resolve.edits.model_state import ModelState
from midstream.api.resolve.edits.steering import resolve_module
from midstream.api.resolve.positions.windows import with_trigger_tokens
from midstream.api.resolve.prompts.request_parsing import parse_chat, parse_completion, parse_job
from midstream.api.resolve.readings.probes import resolve_probe
from midstream.api.routes import registered, steering, tokens
from midstream.api.routes.jobs import Submission
from midstream.broker.ledger.core import scripts
from midstream.broker.ledger.jobs.inputs import LedgerInputs
from midstream.broker.ledger.named.registry import Lookup
from midstream.schemas.access.keys import EVERYBODY, Limits, Tenant
from midstream.schemas.artifacts.probes import PROBES, ProbeRequest
from midstream.schemas.base import limits
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.json_bounds import check_json
from midstream.schemas.base.records import from_json, to_json, to_msgpack
from midstream.schemas.jobs.jobs import Job, JobRequest
from midstream.schemas.jobs.openai import ChatRequest, CompletionRequest
from midstream.schemas.prompts.tokens import DetokenizeRequest, TokenizeRequest
from midstream.schemas.requests.policies import PolicyRequest
from midstream.schemas.requests.specs import SteeringSpec
from midstream.schemas.requests.steering import (
    GlobalRequest,
    GlobalSteering,
    Module,
    ModuleRequest,
    content_digest,
)
from midstream_harvest.api.admission import plan_harvest
from midstream_harvest.records.harvests import HarvestRequest
from midstream_lab.admit.plan import plan_sweep
from midstream_lab.records.attributions import AttributionRequest
from midstream_lab.records.doses import DoseRequest
from midstream_lab.records.fits import FitRequest, LensFitRequest
from midstream_lab.records.sweeps import PairSpan, SweepPair, SweepRequest
from midstream_lab.routes import fits, sweeps

#: Calls in one turn of the event loop, of what the route computes once its body is decoded: about
#: 25 ms. `test_extreme_requests.py` counts a whole call, whose larger bodies are resolved aside.
MOST_CALLS = 250_000
CODEC = codec()
INFO = msgspec.structs.replace(MODEL, grades=True)
PROBE, _ = resolve_probe(
    from_json(to_json({"weight": VECTOR, "layer": 0, "thresholds": 1.0}), ProbeRequest), "p", INFO
)


def module_of(entries: int) -> Module:
    specs = [from_json(to_json(EDIT), SteeringSpec)] * entries
    content = resolve_module(specs, INFO)
    return Module(
        name="joy",
        model="m",
        digest=content_digest(content.entries),
        entries=content.entries,
        bytes=content.size,
        created=0.0,
        hidden_size=INFO.hidden_size,
        reach=content.reach,
    )


class Stores:
    """What stands for the ledger, the names and the models: they answer at once, and what is
    submitted is packed as it is for Redis.
    """

    settings = SETTINGS
    redis = run = None

    def __init__(self) -> None:
        self._state = ModelState({"joy": module_of(limits.MAX_ENTRIES)})

    @property
    def itself(self) -> "Stores":
        return self

    disks = itself
    tenants = itself
    names = itself
    served = itself
    steering = itself

    async def model(self, *_: Any) -> Any:
        return INFO

    the_model = usable = model

    async def watched_model(self, *_: Any) -> Any:
        return INFO, []

    async def codec(self, *_: Any) -> Any:
        return CODEC

    async def workers(self, **_: Any) -> list[Any]:
        return []  # so that what jobs bring is packed with them

    async def get(self, name: str) -> Tenant:
        return Tenant(name=name, limits=Limits())

    async def look_up(self, *_: Any) -> Lookup:
        return Lookup(records={(PROBES.plural, "p"): PROBE})

    async def resolve(self, *_: Any) -> Any:
        return NO_NAMES

    async def state(self, *_: Any) -> ModelState:
        return self._state

    async def tokenised(self, _: Any, specs: Any) -> Any:
        return await with_trigger_tokens(specs, CODEC)

    async def features(self, *_: Any) -> Any:
        return NONE

    async def current(self, *_: Any) -> GlobalSteering:
        return GlobalSteering()

    async def nothing(self, *_: Any) -> None:
        return None

    gradients = check = nothing

    async def submit(self, job: Job, blobs: Any, *_: Any) -> tuple[str, bool]:
        scripts.submit(SETTINGS, job, await scripts.record(job), blobs, (), None)
        return job.id, True


class Api(AppContext):
    """The context of a process, around `Stores`."""

    def __init__(self) -> None:
        stores: Any = Stores()
        self.settings = SETTINGS
        self.ledger = stores
        self.served = stores
        self.names = stores
        self.steering = self.disks = stores
        self.inputs = LedgerInputs(stores)


class Sent(Submission):
    """A submission whose answer is the job's id."""

    idempotency = None  # type: ignore[assignment]

    async def answer(self, job_id: str) -> Any:
        return job_id


class Call:
    """A call whose body counts as small."""

    async def resolved(self, work: Awaitable[Any]) -> Any:
        return await work


API = Api()
SENT = Sent(Call(), API, EVERYBODY, None, None)  # type: ignore[arg-type]


async def put(make: Any, body: Any) -> None:
    made, _ = await make(body, "x", INFO, API, EVERYBODY)
    to_msgpack(made(None))


async def harvest(body: HarvestRequest) -> None:
    state = await API.names.state(INFO, [], EVERYBODY)
    plan = await plan_harvest(
        body, INFO, SETTINGS, state, steering="", lora=None, caller=EVERYBODY, limits=Limits()
    )
    to_msgpack(plan)


def parsed(parse: Callable[[Any], Any]) -> Callable[[Any], Awaitable[Any]]:
    async def submit(body: Any) -> None:
        await API.submit(parse(body), None, EVERYBODY)

    return submit


class Route(NamedTuple):
    path: str
    body: type
    run: Callable[[Any], Awaitable[Any]]
    usual: dict[str, Any]  # the fields that its rows share


PAIR: dict[str, Any] = {"clean": [1, 2], "corrupt": [2, 1], "answer": [3], "foil": [4]}
SWEEP: dict[str, Any] = {"model": "m", "layers": [0], "positions": [-1], "pairs": [PAIR]}
FIT: dict[str, Any] = {"model": "m", "name": "n", "method": "logistic", "layers": [0]}
DOSE: dict[str, Any] = {
    "model": "m",
    "prompts": ["word1"],
    "held_out": ["word2 word3"],
    "steering": [EDIT],
}
DOSE |= {"scales": [1.0], "effect": {"words": ["a"]}}
POLICY: dict[str, Any] = {"probe": "p", "condition": {"at_least": 1.0}, "mode": "active"}
JOBS = Route("POST /v1/jobs", JobRequest, parsed(parse_job), {"model": "m", "prompts": [[1, 2]]})
SWEEPS = Route("POST /v1/sweeps", SweepRequest, lambda body: sweeps.submit_sweep(body, SENT), SWEEP)
PLANS = SWEEPS._replace(run=lambda body: sweeps.plan_of(body, API))
ATTRIBUTIONS = Route(
    "POST /v1/attributions",
    AttributionRequest,
    lambda body: sweeps.submit_sweep(body, SENT),
    SWEEP,
)
DOSES = Route("POST /v1/doses", DoseRequest, lambda body: fits.post_dose.fn(body, SENT), DOSE)
FITS = Route("POST /v1/modules/fit", FitRequest, lambda body: fits.post_fit.fn(body, SENT), FIT)
LENSES = Route(
    "POST /v1/jacobians/fit",
    LensFitRequest,
    lambda body: fits.post_lens_fit.fn(body, SENT),
    {"model": "m", "name": "n"},
)
HARVESTS = Route("POST /v1/harvests", HarvestRequest, harvest, {"model": "m", "layers": [0]})
HARVESTS.usual["source"] = {"lines": ["word1"]}
COMPLETIONS = Route(
    "POST /v1/completions", CompletionRequest, parsed(parse_completion), {"model": "m"}
)
CHATS = Route("POST /v1/chat/completions", ChatRequest, parsed(parse_chat), {"model": "m"})
CHATS.usual["messages"] = [{"role": "user", "content": "word1"}]
TOKENIZE = Route(
    "POST /v1/tokenize", TokenizeRequest, lambda body: tokens.tokenize.fn(body, API), {}
)
DETOKENIZE = Route(
    "POST /v1/detokenize",
    DetokenizeRequest,
    lambda body: tokens.detokenize.fn(body, API),
    {"model": "m"},
)
ARTIFACT = "PUT /v1/artifacts/{kind}/{name}"
MODULES = Route(ARTIFACT, ModuleRequest, lambda body: put(steering.make_module, body), {})
PROBE_ROUTE = Route(
    ARTIFACT,
    ProbeRequest,
    lambda body: put(registered.make_probe, body),
    {"weight": VECTOR, "layer": 0},
)
POLICIES = Route(ARTIFACT, PolicyRequest, lambda body: put(registered.make_policy, body), POLICY)
GLOBAL = Route(
    "PUT /v1/steering/global",
    GlobalRequest,
    lambda body: steering.put_global.fn(body, API, EVERYBODY),
    {},
)


def pairs(number: int, text: int = 1, **fields: Any) -> dict[str, Any]:
    made = [
        {"clean": WORDS[at] * text, "corrupt": WORDS[at + 1] * text, "answer": " word7"}
        for at in range(number)
    ]
    return {"pairs": [{**each, **fields} for each in made], "metric": "logprob"}


def spans(number: int) -> list[dict[str, Any]]:
    return [{"name": f"s{at}", "clean": "all_prompt"} for at in range(number)]


TRIGGERED = [EDIT | {"trigger": {"text": word}} for word in WORDS[: limits.MAX_ENTRIES]]
EVERY = [{"start": at % 2000, "stop": 3999, "every": 2} for at in range(16_000)]
EXAMPLES: dict[str, Any] = {
    "positive": [[1] * 30] * limits.MAX_FIT_EXAMPLES,
    "negative": [[2] * 30] * 8,
}
CALL: dict[str, Any] = {"id": "a", "type": "function", "function": {"name": "a", "arguments": "{}"}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "a", "parameters": {"a": ["b"] * 100}},
}
HELD_OUT = {
    "roc": {
        "fpr": [0.0] * limits.MAX_PROBE_BINS,
        "tpr": [0.0] * limits.MAX_PROBE_BINS,
        "auc": 1.0,
    },
    "histogram": {
        "edges": [*range(limits.MAX_PROBE_BINS + 1)],
        "negative": [1] * limits.MAX_PROBE_BINS,
        "positive": [1] * limits.MAX_PROBE_BINS,
    },
}
LOOKS = [{"role": "user", "turn": at} for at in range(limits.MAX_LOOKS)]
#: (What is at its limit: names of constants without `MAX_`, the route, its further fields.)
ROWS: list[tuple[str, Route, dict[str, Any]]] = [
    ("STOPS STOP_TEXT", JOBS, {"sampling": {"stop": ["a" * 256] * limits.MAX_STOPS}}),
    ("STOP_TOKENS", JOBS, {"sampling": {"stop_token_ids": [1] * limits.MAX_STOP_TOKENS}}),
    ("BAD_WORDS", JOBS, {"sampling": {"bad_words": ["a"] * limits.MAX_BAD_WORDS}}),
    (
        "LOGIT_BIAS",
        JOBS,
        {"sampling": {"logit_bias": {str(at): 1.0 for at in range(limits.MAX_LOGIT_BIAS)}}},
    ),
    ("METADATA", JOBS, {"metadata": {str(at): "a" for at in range(limits.MAX_METADATA)}}),
    ("LAYERS", JOBS, {"capture": {"layers": [at % 4 for at in range(limits.MAX_LAYERS)]}}),
    ("LAYER_TEXT", JOBS, {"steering": [EDIT | {"layers": "0," * 511 + "0"}] * limits.MAX_ENTRIES}),
    ("DIMENSIONS", SWEEPS, {"mask": [at % 8 for at in range(limits.MAX_DIMENSIONS)]}),
    ("HOOKS", SWEEPS, {"hooks": ["post_block"] * limits.MAX_HOOKS}),
    ("FOUND_POSITIONS", JOBS, {"prompts": [[1] * 4000] * 8, "capture": {"positions": EVERY}}),
    ("SPAN_TEXT", JOBS, {"capture": {"positions": {"text": "a" * limits.MAX_SPAN_TEXT}}}),
    (
        "AROUND SEARCHED",
        JOBS,
        {
            "prompts": [[1] * 60] * 64,
            "capture": {"positions": {"around": {"token_ids": [[1] * 256] * limits.MAX_SEQUENCES}}},
        },
    ),
    ("JSON_VALUES", JOBS, {"prompts": [[1] * 4000] * 64}),
    ("JSON_CONTAINERS", JOBS, {"capture": {"positions": EVERY}}),
    ("TEXT", JOBS, {"prompts": ["a" * (limits.MAX_TEXT - 1)]}),
    ("PAIRS", SWEEPS, pairs(limits.MAX_PAIRS)),
    ("SWEEP_TEXT", SWEEPS, pairs(limits.MAX_PAIRS, 2000)),
    ("SPANS", SWEEPS, pairs(2, 1, spans=spans(limits.MAX_SPANS // 2))),
    ("ANSWER_TEXT", SWEEPS, pairs(limits.MAX_PAIRS, answer=" a" * 2000)),
    ("ANSWER_TOKENS", SWEEPS, pairs(limits.MAX_PAIRS, answer=[7] * limits.MAX_ANSWER_TOKENS)),
    ("NEURON_COLUMNS", SWEEPS, {"axis": "neuron", "neurons": {"sets": [[0]] * 256}}),
    ("NEURONS", SWEEPS, {"axis": "neuron", "neurons": {"top": [4096] * 256}}),
    (
        "RECEIVERS",
        SWEEPS,
        {
            "path": {
                "receivers": [{"layer": 1, "hook": "attn_out"}] * limits.MAX_RECEIVERS,
            }
        },
    ),
    (
        "cells of a plan",
        PLANS,
        {
            "positions": "all_prompt",
            "pairs": [PAIR | {"clean": [1] * 70, "corrupt": [2] * 70}] * 256,
        },
    ),
    (
        "counterparts",
        SWEEPS,
        {
            "pairs": [
                PAIR
                | {"clean": [1] * 4000, "corrupt": [2] * 4000}
                | {"alignment": [[at, at] for at in range(4000)]}
            ]
            * 2
        },
    ),
    ("VERIFIED", ATTRIBUTIONS, pairs(limits.MAX_PAIRS) | {"verify": {"top": 20_000}}),
    (
        "DOSE_PROMPTS JOB_EDITS",
        DOSES,
        {
            "prompts": ["word1"] * 60,
            "held_out": ["word1 word2"] * 60,
            "steering": [EDIT] * 16,
            "scales": [*range(1, limits.MAX_DOSE_SCALES + 1)],
        },
    ),
    (
        "DOSE_SCALES DOSE_WORDS",
        DOSES,
        {
            "scales": [*range(1, limits.MAX_DOSE_SCALES + 1)],
            "effect": {"words": ["a"] * limits.MAX_DOSE_WORDS},
        },
    ),
    ("FIT_EXAMPLES FIT_TOKENS", FITS, EXAMPLES),
    ("ranges of examples", FITS, EXAMPLES | {"read": EVERY[:4000]}),
    (
        "FIT_WORK TARGET_TOKENS",
        FITS,
        {
            "method": "vector",
            "examples": [
                {"prompt": WORDS[at], "target": f" {WORDS[at]}"}
                for at in range(limits.MAX_FIT_EXAMPLES)
            ],
        },
    ),
    ("LENS_WORK", LENSES, {"prompts": EXAMPLES["positive"]}),
    ("HARVEST_LINES", HARVESTS, {"source": {"kind": "tokens", "lines": EXAMPLES["positive"]}}),
    ("ENTRIES of a harvest's modules", HARVESTS, {"steering": [{"module": "joy"}]}),
    ("prompts of a completion", COMPLETIONS, {"prompt": WORDS[: limits.MAX_PROMPTS]}),
    ("PROMPT_TOKENS", COMPLETIONS, {"prompt": [1] * limits.MAX_PROMPT_TOKENS}),
    (
        "CHOICES CHOICE_TOKENS",
        COMPLETIONS,
        {"prompt": WORDS[:32], "n": limits.MAX_CHOICES, "steering": [EDIT] * 15},
    ),
    ("MESSAGES", CHATS, {"messages": CHATS.usual["messages"] * limits.MAX_MESSAGES}),
    (
        "parts of messages",
        CHATS,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 4000}] * 8},
    ),
    (
        "TOOLS",
        CHATS,
        {"messages": [{"role": "assistant", "tool_calls": [CALL] * limits.MAX_TOOLS}] * 60},
    ),
    ("TOOLS_BYTES", CHATS, {"tools": [TOOL] * limits.MAX_TOOLS}),
    ("tokens of a text", TOKENIZE, {"prompt": " ".join(WORDS[:4000])}),
    ("messages of a text", TOKENIZE, {"messages": CHATS.usual["messages"] * 4000}),
    (
        "positions of a text",
        TOKENIZE,
        {"prompt": [1] * 4000, "positions": [at % 4000 for at in range(limits.MAX_POSITIONS)]},
    ),
    ("tokens of a decoding", DETOKENIZE, {"tokens": [1] * limits.MAX_PROMPT_TOKENS}),
    ("entries of a module", MODULES, {"steering": [EDIT] * limits.MAX_ENTRIES}),
    ("triggers of a module", MODULES, {"steering": TRIGGERED}),
    ("entries of global steering", GLOBAL, {"steering": [EDIT] * limits.MAX_ENTRIES}),
    (
        "PROBE_LABELS PROBE_BINS",
        PROBE_ROUTE,
        {
            "weight": [[0.5] * 8] * limits.MAX_PROBE_LABELS,
            "held_out": [HELD_OUT] * limits.MAX_PROBE_LABELS,
        },
    ),
    (
        "POLICY_ACTIONS POLICY_VECTORS",
        POLICIES,
        {"actions": [{"action": "steer", "module": "joy"}] * limits.MAX_POLICY_ACTIONS},
    ),
    (
        "LOOKS",
        POLICIES,
        {"condition": {"at_least": 1.0, "schedule": {"tokens": LOOKS}}, "actions": ["flag"]},
    ),
]


@pytest.fixture(autouse=True)
def _without_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    async def change(*_: Any) -> GlobalSteering:
        return GlobalSteering()

    async def watched(*_: Any) -> Any:
        return INFO, []

    monkeypatch.setattr(steering, "change", change)
    monkeypatch.setattr(sweeps, "watched_model", watched)
    monkeypatch.setattr(sweeps, "check_gradients", lambda *_: None)  # no such worker has published


@pytest.mark.parametrize(("route", "fields"), [row[1:] for row in ROWS], ids=[r[0] for r in ROWS])
def test_a_body_at_a_limit_keeps_the_event_loop_for_few_calls(
    route: Route, fields: dict[str, Any]
) -> None:
    body = to_json({**route.usual, **fields})
    check_json(body)
    decoded = from_json(body, route.body)
    with calls_by_turn() as counts, suppress(MidstreamError):
        asyncio.run(route.run(decoded))  # type: ignore[arg-type]
    assert max(counts) < MOST_CALLS


class Compared(str):
    """A text that counts, as a call, each comparison with another."""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_names_of_spans_are_looked_up_and_not_compared_with_each_other() -> None:
    named = [PairSpan(name=Compared(f"s{at}"), clean=[at % 2]) for at in range(1000)]
    pair = SweepPair(clean=[1, 2], corrupt=[2, 1], answer=[3], foil=[4], spans=named)
    asked = SweepRequest(model="m", pairs=[pair], layers=[0])
    with calls_by_turn() as counts:
        asyncio.run(plan_sweep(asked, INFO, CODEC, SETTINGS))
    assert max(counts) < MOST_CALLS // 4


#: Constant → its row in the table of jobs, whose rows are at several limits at once.
OF_JOBS = {
    "PROMPTS": "prompts",
    "POSITIONS": "positions",
    "ENTRIES": "entries",
    "STEERING_ROWS": "entries",
    "PATCH_ROWS": "patches",
    "MASKS": "masks",
    "TRIGGERS": "triggers",
    "SEQUENCES": "triggers",
    "AROUND": "triggers",
    "ALLOWED_TOKENS": "token ids that are allowed",
    "REGEX": "regular expression",
    "FORMAT_CHOICES": "choices of an output",
    "SCHEMA": "choices of an output",
}
#: Why a constant has no row → such constants.
WITHOUT = {
    "its type checks one value, or a few, which a thread decodes": """
        COUNT INT64 WAIT_S NAME TAG MODULE_NAME URL PATH HEADER IDEMPOTENCY_KEY DESCRIPTION LABEL
        METADATA_KEY METADATA_VALUE DRAFTS UNSERVED TEMPLATE_OPTIONS NESTING IMAGE LAYER MARGIN
        CONSUMERS TENSOR_DIMS TENSOR_BYTES LENS_TOP LENS_TOKENS LENS_TOKEN READERS OPTIONS
        OPTION_TEXT FEATURE_TOP FEATURE_SPECS EXAMPLES EXAMPLE_CONTEXT REQUEST_PROBES
        REQUEST_POLICIES POLICY_WINDOW LATCH_S NOISE ATTRIBUTION_STEPS LISTED_SCORES FIT_STEPS
        FIT_BATCH DOSE_TOKENS HARVEST_SPANS SHARD_MIB STREAM_CONSUMERS STREAM_WINDOW SOURCES SCOPES
        EVENTS URL_MODULES MODULE_TEXT PAGE HIT_NOTE
        """,
    "a thread decodes the image": "IMAGE_TEXT IMAGE_PIXELS",
    "a thread reads the file": """
        NORM_ROWS NORM_VALUES NORM_BYTES FILE_TENSORS FILE_HEADER TUNED_BYTES LORA_CONFIG
        LORA_BYTES SAE_CONFIG SAE_BYTES SAE_WIDTH FEATURES
        """,
    "a product of other limits, which is computed once": """
        READING_WORK SURVEY_BYTES PROBE_TOKENS DOSE_WORK READER_ARTIFACTS
        """,
    "a number of records, which Redis counts": """
        TUNED LORAS SAES SURVEYS PROBES POLICIES POLICY_VERSIONS HARVESTS_KEPT HITS
        """,
    "of the worker or its ranks": """
        GATE_RUNS DECISIONS DOCUMENT_BYTES RENDERED_MESSAGES HIT_TOKENS HIT_AFTER
        """,
    "of the client": "VECTOR_FILE",
    "of an error's text": "SHOWN DETAIL",
}


def test_every_limit_has_a_row_or_a_reason_to_have_none() -> None:
    constants = {name.removeprefix("MAX_") for name in vars(limits) if name.startswith("MAX_")}
    rows = constants & {word for name, *_ in ROWS for word in name.split()}
    exempt = {word for listed in WITHOUT.values() for word in listed.split()}
    assert constants == rows | OF_JOBS.keys() | exempt
    assert not exempt & (rows | OF_JOBS.keys())
    assert EXTREMES.keys() >= set(OF_JOBS.values())


#: Routes whose bodies are a few short values, or none.
SHORT = {
    "POST /v1/harvests/{harvest_id}/stream/ack",
    "POST /v1/harvests/{harvest_id}/surveys",
    "POST /v1/harvests/{harvest_id}/{action}",
    "POST /v1/jobs/{job_id}/cancel",
    "POST /v1/keys",
    "POST /v1/policies/{name}/replays",
    "POST /v1/webhooks/deliveries/{delivery_id}/redeliver",
    "POST /v1/webhooks/secrets",
    "PATCH /v1/artifacts/{kind}/{name}",
    "PUT /v1/policies/{name}/hits/{hit_id}/mark",
    "PUT /v1/tenants/{name}",
}


def test_every_route_that_takes_a_body_has_a_row_or_a_short_body() -> None:
    text = (Path(__file__).parents[4] / "docs" / "routes.txt").read_text()
    routes = set(re.findall(r"^(?:POST|PUT|PATCH) \S+", text, re.MULTILINE))
    assert routes - SHORT == {route.path for _, route, _ in ROWS}

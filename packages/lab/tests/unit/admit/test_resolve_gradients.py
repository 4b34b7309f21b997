"""What a capture of gradients comes to on a model, and which are refused, by which field."""

import asyncio
from typing import Any

import msgspec
import pytest
from midstream_fake_engine.model import make_bundle, make_tokenizer
from refusal_kit import refuses
from test_resolve_captures import bounds

from midstream.api.resolve.admission.admission import admit
from midstream.api.resolve.admission.names import Referents
from midstream.api.resolve.prompts.request_parsing import parse_completion, parse_job
from midstream.api.resolve.prompts.tokenizer import Codec
from midstream.broker.ledger.named.registry import Lookup
from midstream.schemas.artifacts.probes import Probe, ProbeContent
from midstream.schemas.artifacts.saes import Sae, SaeForm
from midstream.schemas.jobs.jobs import Job, JobRequest
from midstream.schemas.jobs.models import GradientInfo, ModelInfo
from midstream.schemas.jobs.openai import CompletionRequest
from midstream.schemas.jobs.queues import GRADIENTS
from midstream.schemas.requests.scalars import StoredScalar
from midstream.schemas.requests.specs import CaptureSpec
from midstream_lab.admit.gradients import admit_gradients

MODEL: ModelInfo = bounds(vocab_size=300).model
CODEC = Codec(make_bundle(make_tokenizer()))
FACTS = GradientInfo(model="m", identity="", dtype="float32", device="cpu")
LOGIT = {"kind": "logit", "token": 5}
D_SAE = 4
PROBE = Probe(
    name="mine",
    model="m",
    digest="p" * 64,
    content=ProbeContent(
        hook="post_block",
        layer=1,
        tensors=["w" * 64, "b" * 64],
        labels=["one", "two"],
        thresholds=[None, None],
    ),
    hidden_size=MODEL.hidden_size,
    bytes=1,
    created=0.0,
)
SAE = Sae(
    name="tiny",
    model="m",
    digest="s" * 64,
    path="tiny",
    hook="post_block",
    layer=1,
    form=SaeForm(architecture="standard", d_in=MODEL.hidden_size, d_sae=D_SAE),
    bytes=1,
    created=0.0,
)


FOUND = {("probes", "mine"): PROBE, ("saes", "tiny"): SAE}


def job_of(
    capture: dict[str, Any],
    facts: GradientInfo | None = FACTS,
    model: ModelInfo = MODEL,
    **more: Any,
) -> Job:
    async def admitted() -> Job:
        body = {"model": "m", "prompts": [[1, 2, 3, 4], [5, 6]], **more}
        request = msgspec.convert(
            body | {"capture": {"of": "gradient", "scalar": LOGIT} | capture}, JobRequest
        )
        found = Lookup("m", FOUND, gradients=facts)
        named = Referents(found=found)
        parsed = parse_job(request)
        accept = admit_gradients if parsed.kind == "gradient" else admit
        return (await accept(parsed, model, CODEC, "job_x", named)).job

    return asyncio.run(admitted())


def scalars(job: Job) -> list[StoredScalar | None]:
    return [capture.gradient for (capture,) in job.captures]


def test_only_a_capture_of_gradients_waits_in_the_gradient_queue() -> None:
    job = job_of({"layers": [1], "positions": "all_prompt", "tag": "g"})
    assert job.kind == "gradient"
    assert job.queue == GRADIENTS
    assert job.sampling.max_tokens == 1
    assert job.wants_receipts
    assert scalars(job) == [StoredScalar(kind="logit", token=5)] * 2
    assert [capture.tag for (capture,) in job.captures] == ["g", "g"]
    assert job_of({"of": "activation", "scalar": None}).queue == ""
    model = msgspec.structs.replace(MODEL, global_captures=[CaptureSpec(layers=[0], tag="all")])
    assert [len(captures) for captures in job_of({"layers": [1]}, model=model).captures] == [1, 1]


@pytest.mark.parametrize(
    ("scalar", "stored"),
    [
        ({"kind": "loss"}, [[1, 2, 3], [1]]),
        ({"kind": "loss", "positions": [-1]}, [[3], [1]]),
        ({"kind": "loss", "positions": [0, 1]}, [[1], [1]]),
    ],
)
def test_the_loss_is_that_of_tokens_after_the_first(
    scalar: dict[str, Any], stored: list[list[int]]
) -> None:
    job = job_of({"scalar": scalar})
    assert [found and found.positions for found in scalars(job)] == stored


def test_tokens_of_a_scalar_may_be_texts() -> None:
    first, _ = scalars(job_of({"scalar": {"kind": "logit", "token": "a", "foil": 7}}))
    assert first == StoredScalar(kind="logit", token=make_tokenizer().token_to_id("a"), foil=7)


def test_a_probe_and_a_feature_are_stored_with_their_weights() -> None:
    job = job_of({"scalar": {"kind": "probe", "probe": "mine", "label": 1}})
    stored = StoredScalar(kind="probe", label=1, probe=PROBE.stored("none"), positions=[3])
    assert scalars(job) == [stored, msgspec.structs.replace(stored, positions=[1])]
    assert job.captures[0][0].tensors == PROBE.content.tensors != []
    scalar = {"kind": "feature", "sae": "tiny", "feature": 2, "positions": "all_prompt"}
    first, second = scalars(job_of({"scalar": scalar}))
    stored = StoredScalar(kind="feature", feature=2, sae=SAE.stored(), positions=[0, 1, 2, 3])
    assert first == stored
    assert second == msgspec.structs.replace(stored, positions=[0, 1])


def without(**facts: Any) -> GradientInfo:
    return msgspec.structs.replace(FACTS, **facts)


@pytest.mark.parametrize(
    ("ask", "field", "words"),
    [
        (lambda: job_of({"scalar": None}), "capture.scalar", "is required with of = 'gradient'"),
        *(
            (lambda scalar=scalar: job_of({"scalar": scalar}), f"capture.scalar.{field}", words)
            for scalar, field, words in (
                ({"kind": "logit"}, "token", "is required for 'logit'"),
                ({"kind": "logit", "token": 5, "feature": 1}, "feature", "token, foil"),
                ({"kind": "logit", "token": "ab"}, "token", "is 2 tokens"),
                (LOGIT | {"foil": 300}, "foil", "0 to 299"),
                (
                    {"kind": "loss", "positions": [0]},
                    "positions",
                    "selects no token after a prompt's first",
                ),
                ({"kind": "probe", "probe": "mine", "label": 2}, "label", "0 to 1"),
                (
                    {"kind": "feature", "sae": "tiny", "feature": D_SAE},
                    "feature",
                    f"0 to {D_SAE - 1}",
                ),
                ({"kind": "feature", "sae": "tiny"}, "feature", ""),
                (
                    {"kind": "probe", "probe": "mine", "token": 3},
                    "token",
                    "probe, label, positions",
                ),
            )
        ),
        (
            lambda: job_of({"positions": "all_generated"}),
            "capture.positions",
            "selects no token of prompt 0",
        ),
        (lambda: job_of({"positions": [3]}), "capture.positions[0]", "prompt 1"),
        (
            lambda: job_of({"positions": {"last": 2}}),
            "capture.positions",
            "gradients are those of the prompt",
        ),
        (lambda: job_of({"layers": [9]}), "capture.layers", "layer 9"),
        (lambda: job_of({"run": "mine"}), "capture.run", "a source run has activations"),
        (
            lambda: job_of({"of": "activation"}),
            "capture.scalar",
            "is valid with of = 'gradient' only",
        ),
        *(
            (
                lambda name=name, value=value: job_of({}, **{name: value}),
                name,
                "not valid with capture.of = 'gradient'",
            )
            for name, value in {
                "steering": [{"layers": [0], "vector": [1.0] * 5}],
                "lens": {},
                "sampling": {"temperature": 1},
                "lora": "mine",
                "probes": ["mine"],
            }.items()
        ),
        (lambda: job_of({}, None), "capture.of", "no gradient worker has served 'm' yet"),
        (
            lambda: job_of({}, without(refused="it is quantised")),
            "capture.of",
            "it is quantised",
        ),
        (
            lambda: job_of(
                {"hook": "mlp_out", "layers": [0]}, without(absent={"mlp_out": "it is fused"})
            ),
            "capture.hooks",
            "it is fused",
        ),
        (
            lambda: parse_completion(
                CompletionRequest(
                    model="m",
                    prompt="a",
                    capture=msgspec.convert({"of": "gradient", "scalar": LOGIT}, CaptureSpec),
                )
            ),
            "capture.of",
            "",
        ),
    ],
)
def test_what_has_no_gradients_is_refused_by_its_field(ask: Any, field: str, words: str) -> None:
    with refuses(words, field=field, kind="invalid_request"):
        ask()

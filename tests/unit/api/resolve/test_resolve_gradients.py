"""What a capture of gradients comes to on a model, and which are refused, by which field."""

import asyncio
from typing import Any

import msgspec
import pytest
from midstream_fake_engine.model import make_bundle, make_tokenizer
from refusal_kit import refuses
from test_resolve_captures import bounds

from midstream.api.resolve.admission.admission import admit
from midstream.api.resolve.prompts.request_parsing import parse_completion, parse_job
from midstream.api.resolve.prompts.tokenizer import Codec
from midstream.api.resolve.readings import gradients
from midstream.api.resolve.readings.readings import with_artifacts
from midstream.schemas.artifacts.probes import Probe, ProbeContent
from midstream.schemas.artifacts.saes import Sae, SaeForm
from midstream.schemas.jobs.jobs import Job, JobRequest
from midstream.schemas.jobs.models import GradientInfo, ModelInfo
from midstream.schemas.jobs.openai import CompletionRequest
from midstream.schemas.requests.attributions import GRADIENTS
from midstream.schemas.requests.scalars import StoredScalar
from midstream.schemas.requests.specs import CaptureSpec

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


class Known:
    """A ledger that knows what a gradient worker has published."""

    def __init__(self, facts: GradientInfo | None = FACTS) -> None:
        self._facts = facts

    async def gradients(self, model: ModelInfo) -> GradientInfo | None:
        return self._facts


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
        ledger: Any = Known(facts)
        parsed = await with_artifacts(parse_job(request), model, ledger)
        return (await admit(parsed, model, CODEC, "job_x")).job

    return asyncio.run(admitted())


def scalars(job: Job) -> list[StoredScalar | None]:
    return [capture.gradient for (capture,) in job.captures]


def test_only_a_capture_of_gradients_waits_in_the_gradient_queue() -> None:
    job = job_of({"layers": [1], "positions": "all_prompt", "tag": "g"})
    assert (job.queue, job.sampling.max_tokens, job.wants_receipts) == (GRADIENTS, 1, True)
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
    (first, _) = scalars(job_of({"scalar": {"kind": "logit", "token": "a", "foil": 7}}))
    assert first == StoredScalar(kind="logit", token=make_tokenizer().token_to_id("a"), foil=7)


@pytest.fixture
def artifacts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe with two labels and an autoencoder with `D_SAE` features are registered."""

    class Probes:
        def __init__(self, *_: Any) -> None: ...

        async def known(self, *_: Any) -> Probe:
            return PROBE

    async def sae(*_: Any) -> Sae:
        return SAE

    monkeypatch.setattr(gradients, "Registry", Probes)
    monkeypatch.setattr(gradients, "named_sae", sae)


def test_a_probe_and_a_feature_are_stored_with_their_weights(artifacts: None) -> None:
    job = job_of({"scalar": {"kind": "probe", "probe": "mine", "label": 1}})
    stored = StoredScalar(kind="probe", label=1, probe=PROBE.stored("none"), positions=[3])
    assert scalars(job) == [stored, msgspec.structs.replace(stored, positions=[1])]
    assert job.captures[0][0].tensors == PROBE.content.tensors != []
    scalar = {"kind": "feature", "sae": "tiny", "feature": 2, "positions": "all_prompt"}
    (first, second) = scalars(job_of({"scalar": scalar}))
    stored = StoredScalar(kind="feature", feature=2, sae=SAE.stored(), positions=[0, 1, 2, 3])
    assert (first, second) == (stored, msgspec.structs.replace(stored, positions=[0, 1]))


@pytest.mark.parametrize(
    ("scalar", "field", "allowed"),
    [
        ({"kind": "probe", "probe": "mine", "label": 2}, "label", "0 to 1"),
        ({"kind": "feature", "sae": "tiny", "feature": D_SAE}, "feature", f"0 to {D_SAE - 1}"),
        ({"kind": "feature", "sae": "tiny"}, "feature", None),
        ({"kind": "probe", "probe": "mine", "token": 3}, "token", "probe, label, positions"),
    ],
)
def test_a_label_or_feature_that_does_not_exist_is_refused(
    artifacts: None, scalar: dict[str, Any], field: str, allowed: str | None
) -> None:
    with refuses(field=f"capture.scalar.{field}", allowed=allowed):
        job_of({"scalar": scalar})


@pytest.mark.parametrize(
    ("capture", "field", "words"),
    [
        ({"scalar": None}, "capture.scalar", "is required with of = 'gradient'"),
        ({"scalar": {"kind": "logit"}}, "capture.scalar.token", "is required for 'logit'"),
        (
            {"scalar": {"kind": "logit", "token": 5, "feature": 1}},
            "capture.scalar.feature",
            "token, foil",
        ),
        ({"scalar": {"kind": "logit", "token": "ab"}}, "capture.scalar.token", "is 2 tokens"),
        ({"scalar": LOGIT | {"foil": 300}}, "capture.scalar.foil", "0 to 299"),
        (
            {"scalar": {"kind": "loss", "positions": [0]}},
            "capture.scalar.positions",
            "selects no token after a prompt's first",
        ),
        ({"positions": "all_generated"}, "capture.positions", "selects no token of prompt 0"),
        ({"positions": [3]}, "capture.positions[0]", "prompt 1"),
        ({"positions": {"last": 2}}, "capture.positions", "gradients are those of the prompt"),
        ({"layers": [9]}, "capture.layers", "layer 9"),
        ({"run": "mine"}, "capture.run", "a source run has activations"),
        ({"of": "activation"}, "capture.scalar", "is valid with of = 'gradient' only"),
    ],
)
def test_a_wrong_capture_is_refused_by_its_field(
    capture: dict[str, Any], field: str, words: str
) -> None:
    with refuses(kind="invalid_request", field=field) as refused:
        job_of(capture)
    assert words in f"{refused.value.detail} {refused.value.allowed}"


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"steering": [{"layers": [0], "vector": [1.0] * 5}]}, "steering"),
        ({"lens": {}}, "lens"),
        ({"sampling": {"temperature": 1}}, "sampling"),
        ({"lora": "mine"}, "lora"),
        ({"probes": ["mine"]}, "probes"),
    ],
)
def test_gradients_come_alone(more: dict[str, Any], field: str) -> None:
    with refuses("not valid with capture.of = 'gradient'", field=field):
        job_of({}, **more)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (None, "no gradient worker has served 'm' yet"),
        (msgspec.structs.replace(FACTS, refused="it is quantised"), "it is quantised"),
    ],
)
def test_a_model_without_gradients_is_refused_with_the_reason(
    facts: GradientInfo | None, words: str
) -> None:
    with refuses(words, field="capture.of"):
        job_of({}, facts)


def test_what_has_no_gradients_is_refused_with_the_reason() -> None:
    facts = msgspec.structs.replace(FACTS, absent={"mlp_out": "it is fused"})
    with refuses("it is fused", field="capture.hooks"):
        job_of({"hook": "mlp_out", "layers": [0]}, facts)
    body = {"model": "m", "prompt": "a", "capture": {"of": "gradient", "scalar": LOGIT}}
    with refuses(field="capture.of"):
        parse_completion(msgspec.convert(body, CompletionRequest))

"""Autoencoders, adapters, tuned and Jacobian lenses: registered over HTTP, from Python and on the
command line, and named by every way of asking.

The engine is a fake.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from edge import refused
from midstream_fake_engine.model import HIDDEN_SIZE, NUM_LAYERS, VOCABULARY
from refusal_kit import refuses
from shared_stack import FORMS, adapter
from stack import Stack

from midstream.client import Client
from midstream.client.render import readings

pytest_plugins = ["shared_stack"]
pytestmark = [
    pytest.mark.xdist_group("shared_stack"),
    pytest.mark.usefixtures("installed", "nameless"),
]

MODEL = "fake-model"
VECTOR = [1.0] * HIDDEN_SIZE
BODY = {"model": MODEL, "prompts": ["hello"], "sampling": {"max_tokens": 1}}


@pytest.fixture
def named(client: Client) -> Client:
    """The client of a service with an artifact of each kind."""
    client.saes.put("read", "topk")
    client.loras.put("calm", "calm")
    client.lenses.put("two", "some")
    client.jacobians.put("said", "jacobian")
    client.jacobians.put("bare", "bare")
    return client


# --- Registered by an operator
# --------------------------------------------------------------------------------------------------


def test_what_the_files_say_is_in_the_record(named: Client) -> None:
    scope = named.saes.put("scope", "gemma_scope", hook="resid_pre", layer=0)
    assert scope.hook == "pre_attn"
    assert scope.layer == 0
    assert scope.form.architecture == "jumprelu"
    tuned = named.lenses.put("mine", "some", hook="resid_pre", residual=True)
    assert tuned.layers == [1, 2]
    assert tuned.hook == "pre_attn"
    assert tuned.residual
    jacobian = named.jacobians.get("said")
    assert jacobian.layers == [1]
    assert jacobian.vocabulary == 1000
    assert named.loras.get("calm").modules == ["model.layers.*.mlp.up_proj"]


@pytest.mark.parametrize(
    ("kind", "body", "field", "says"),
    [
        ("saes", {"path": "../saes/standard"}, "path", "not a path below artifacts_dir/saes"),
        ("saes", {"path": "none"}, "path", "there is no folder 'none' in artifacts_dir/saes"),
        ("saes", {"path": "standard", "hook": "zz"}, "hook", "Invalid enum value 'zz'"),
        ("saes", {"path": "standard", "layer": 3}, "layer", "the SAE was trained on layer 1"),
        (
            "saes",
            {"path": "gemma_scope", "hook": "post_block", "layer": 4},
            "layer",
            "this model has no layer 4",
        ),
        ("loras", {"path": "/etc"}, "path", "not a path below artifacts_dir/loras"),
        ("loras", {"path": "wide"}, "path", "rank 2 on this model needs [8, 2]"),
        ("loras", {"path": "dora"}, "path", "use_dora is 'True', which is not served"),
        ("lenses", {"path": "../lenses/all"}, "path", "not a path below artifacts_dir/lenses"),
        ("lenses", {"path": "wide"}, "path", "has the shape [9]; this model needs [8]"),
        ("lenses", {"path": "deep"}, "path", "this model has no layer 4; valid: 0 to 3"),
        ("lenses", {"path": "nan"}, "path", "2.weight has values that are not finite"),
        ("lenses", {"path": "half"}, "path", "layer 2 has only weight; valid: weight and bias"),
        ("lenses", {"path": "other"}, "path", "'head' is not a tensor of a tuned lens"),
    ],
)
def test_a_bad_registration_is_refused_by_field(
    http: httpx2.Client, kind: str, body: dict[str, Any], field: str, says: str
) -> None:
    answer = http.put(f"/v1/artifacts/{kind}/x", json=body)
    refused(answer, 400, field, says)


def test_a_path_from_elsewhere_is_answered_with_that_of_the_folder(http: httpx2.Client) -> None:
    answer = http.put("/v1/artifacts/saes/x", json={"path": ".midstream/saes/standard"})
    assert refused(answer, 400, "path")["hint"] == "write 'standard'"


def test_what_one_kind_has_is_refused_for_others(http: httpx2.Client) -> None:
    refused(http.get("/v1/artifacts/sae/x"), 404, "kind", "unknown kind of artifact 'sae'")
    problem = refused(http.patch("/v1/artifacts/saes/x", json={"mode": "shadow"}), 400, "kind")
    assert problem["allowed"] == "policies"
    assert refused(http.get("/v1/artifacts/saes/x/file"), 400, "kind")["allowed"] == "modules"
    file = {"content": b"x", "headers": {"Content-Type": "application/octet-stream"}}
    refused(http.put("/v1/artifacts/saes/x", **file), 415, "Content-Type", "octet-stream")  # type: ignore[arg-type]


# --- Named by requests
# --------------------------------------------------------------------------------------------------

LENS = {"layers": [0, 3], "positions": "all_prompt", "top_k": 3, "tokens": ["e", 7]}
FEATURES = {"sae": "read", "top_k": 4, "positions": [0, -1]}
ASKED = {"lora": "calm", "lens": LENS, "features": [FEATURES]}
CHAT = [{"role": "user", "content": "hello"}]


def check(result: dict[str, Any], prompts: int, digest: str) -> None:
    """What the fake engine says of the autoencoder with this digest, and its lens."""
    assert [read["request"] for read in result["features"]] == list(range(prompts))
    for read in result["features"]:
        assert read["sae"] == "read"
        assert read["digest"] == digest
        assert read["hook"] == "post_block"
        assert read["layer"] == 1
        assert read["features"] == [[token, token + 1] for token in read["token_ids"]]
        assert read["activations"] == [[1.0, 0.5]] * 2
        assert read["active"] == [2, 2]
    assert [read["request"] for read in result["lens"]] == list(range(prompts))
    for read in result["lens"]:
        assert read["hook"] == "post_block"
        assert read["layers"] == [0, 3]
        token = read["token_ids"][0]
        assert read["top_tokens"][1][0] == [(token + 4 + place) % VOCABULARY for place in range(3)]
        assert read["top_logprobs"][0][0] == [0.0, -1.0, -2.0]
        assert read["named_tokens"][1] == 7
        assert read["named_ranks"][0][0] == [4, 4]


@pytest.mark.parametrize(
    ("path", "body", "prompts"),
    [
        ("/v1/jobs", {"prompts": ["hello", "there"], "sampling": {"max_tokens": 2}}, 2),
        ("/v1/completions", {"prompt": ["hello", "you"], "max_tokens": 2}, 2),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 2, "stream": True}, 1),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2}, 1),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2, "stream": True}, 1),
    ],
)
def test_every_way_of_asking_takes_adapter_lens_and_features(
    http: httpx2.Client, named: Client, path: str, body: dict[str, Any], prompts: int
) -> None:
    answer = http.post(path, json={"model": MODEL} | ASKED | body)
    assert answer.status_code in (200, 202), answer.text
    job = answer.headers["x-midstream-job"]
    view = http.get(f"/v1/jobs/{job}", params={"wait": 50}).json()
    assert view["state"] == "succeeded", view
    assert view["lora"] == {"name": "calm", "digest": named.loras.get("calm").digest}
    result = http.get(f"/v1/jobs/{job}/result").json()
    assert result["lora"] == view["lora"]
    check(result, prompts, named.saes.get("read").digest)
    if body.get("stream"):
        chunks = [
            json.loads(line.removeprefix("data: "))
            for line in answer.text.splitlines()
            if line.startswith("data: {")
        ]
        told = {name: part for chunk in chunks for name, part in chunk.items()}
    else:
        told = answer.json()
    if path != "/v1/jobs":
        assert told["features"] == result["features"]
        assert told["lens"] == result["lens"]
        assert told["determinism"]["consistent"], "held until both ranks have accounted for it"


def test_a_sweep_takes_an_adapter(client: Client, named: Client) -> None:
    fields = {"model": MODEL, "metric": "logprob", "layers": 1, "lora": "calm"}
    job = client.sweeps.submit(pairs=[{"clean": "abc", "corrupt": "abd", "answer": "x"}], **fields)
    digest = client.loras.get("calm").digest
    assert client.wait(job).lora.digest == client.result(job).lora.digest == digest


def test_jobs_without_an_adapter_say_nothing_of_one(http: httpx2.Client, named: Client) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2, "lens": LENS}
    answer = http.post("/v1/completions", json=body)
    assert {"lens", "capture_results", "determinism"} & answer.json().keys() == {"lens"}
    assert "lora" not in http.get(f"/v1/jobs/{answer.headers['x-midstream-job']}").json()


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({"lora": "clam"}, "lora", '"allowed":"calm"'),
        ({"features": [{"sae": "none"}]}, "features[0].sae", "unknown sparse autoencoder 'none'"),
        ({"features": [{"sae": "read"}, {"sae": "none"}]}, "features[1].sae", "unknown sparse"),
        (
            {"features": [{"sae": "read", "top_k": 33}]},
            "features[0].top_k",
            "33 exceeds the 32 features of 'read'",
        ),
        ({"features": [{"sae": "read", "positions": [99]}]}, "features[0].positions[0]", "99 is"),
        ({"features": [{"sae": "read"}] * 2}, "features[1]", "asks the same as features[0]"),
        ({"features": {"sae": "read"}}, "features", "Expected `array`, got `object`"),
        (
            {
                "prompts": ["a" * 400],
                "features": [{"sae": "read", "top_k": most} for most in (32, 31, 30)],
            },
            "features[2]",
            "bytes of results",
        ),
        ({"lens": {"tokens": ["no"]}}, "lens.tokens[0]", "no"),
        ({"lens": {"tuned": "nobody"}}, "lens.tuned", "unknown tuned lens 'nobody'"),
        ({"lens": {"tuned": "two", "layers": "0-2"}}, "lens.layers", "'two' has no map of layer 0"),
        ({"lens": {"tuned": "two", "hook": "pre_attn"}}, "lens.hook", "'two' reads post_block"),
        ({"lens": {"jacobian": "nobody"}}, "lens.jacobian", "unknown Jacobian lens 'nobody'"),
        ({"lens": {"jacobian": "bare", "tuned": "two"}}, "lens.jacobian", "together with tuned"),
        ({"lens": {"jacobian": "bare", "layers": 2}}, "lens.layers", "no map of layer 2"),
        (
            {"steering": [{"jacobian": "bare", "token": 1, "layers": 1}]},
            "steering[0].jacobian",
            "has no output matrix",
        ),
        (
            {"steering": [{"jacobian": "said", "token": "hello there", "layers": 1}]},
            "steering[0].token",
            "tokens:",
        ),
    ],
)
def test_a_request_that_does_not_fit_what_it_names_is_refused(
    http: httpx2.Client, named: Client, body: dict[str, Any], field: str, says: str
) -> None:
    answer = http.post("/v1/jobs", json=BODY | body)
    refused(answer, 400, field)
    assert says in answer.text


def test_one_request_is_read_by_several_autoencoders(
    client: Client, midstream: Callable[..., str]
) -> None:
    digests = {name: client.saes.put(name, name).digest for name in ("gated", "jumprelu")}
    wanted = [{"sae": "gated", "top_k": 6}, {"sae": "jumprelu", "top_k": 2, "positions": [1]}]
    result = client.run(prompts=["hello", "there"], max_tokens=1, features=wanted)
    found = [
        (each.request, each.sae, each.digest, len(each.positions), len(each.features[0]))
        for each in result.features or []
    ]
    of_one = [("gated", digests["gated"], 5, 3), ("jumprelu", digests["jumprelu"], 1, 1)]
    assert found == [(request, *each) for request in (0, 1) for each in of_one]
    both = client.readings.features_of("hello", {"gated": 4, "jumprelu": 2})
    assert {name: len(each.of(0)) for name, each in both.items()} == {"gated": 2, "jumprelu": 1}
    steering = [{"sae": "gated", "feature": 1, "op": "ablate"}]
    mapped = client.map(
        ["hello"], features=wanted[1:], steering=steering, max_tokens=1, progress=False
    )
    job = client.jobs.get(next(iter(mapped)).result.id)
    assert job.contents == {f"sae/{name}": digest for name, digest in digests.items()}
    one = client.features("hello", "gated", top_k=4, positions=[2])
    assert one.tokens[0] == both["gated"].tokens[2]
    assert one.of(0) == both["gated"].of(2)
    asked = ["submit", "hello", "--max-tokens", "1"]
    for fields in ({"sae": "gated", "top_k": 6}, {"sae": "jumprelu", "top_k": 2}):
        asked += ["--set", f"features={json.dumps(fields)}"]
    drawn = midstream(*asked)
    for name in digests:
        assert f"features of {name} at post_block of layer 1" in drawn
    read = json.loads(midstream(*asked, "--json"))["features"]
    assert [(each["sae"], len(each["features"][0])) for each in read] == [
        ("gated", 3),
        ("jumprelu", 1),
    ]


def test_a_lens_gives_arrays_and_tables(
    client: Client, midstream: Callable[..., str], tmp_path: Path
) -> None:
    found = client.lens("hello", top_k=3, tokens=["e"])
    assert found.top_ids.shape == found.logprobs.shape == (NUM_LAYERS, 5, 3)
    assert found.positions == list(range(5))
    assert found.layers == list(range(NUM_LAYERS))
    np.testing.assert_array_equal(found.logprobs[2, 4], [0, -1, -2])
    assert found.tokens == list("hello")
    assert found.ranks.shape == found.named_logprobs.shape == (NUM_LAYERS, 5, 1)
    assert "rank 4" in found._repr_html_()
    assert len(readings.named_table(found).layers) == NUM_LAYERS
    figure = tmp_path / "lens.png"
    shown = midstream("lens", "hello", "--layers=0-2", "--token=e", "--figure", str(figure))
    assert "top next token at post_block" in " ".join(shown.split())
    assert "rank 4" in shown
    assert figure.read_bytes().startswith(b"\x89PNG")
    job = midstream("submit", "hello", "world", "--set=lens.layers=0-2", "--set=lens.top_k=3")
    assert "top next token at post_block, prompt 1" in job


def test_a_tuned_lens_reads_the_layers_and_hook_that_it_has(client: Client) -> None:
    client.lenses.put("mine", "some")
    assert client.lens("hello", tuned="mine").layers == [1, 2], "`all`: those that it has"
    changed = client.lenses.put("mine", "all", hook="resid_pre")
    assert client.lens("hello", tuned="mine").hook == "pre_attn"
    job = client.submit(prompts=["a"], lens={"tuned": "mine"}, max_tokens=1)
    assert job.contents == {"tuned/mine": changed.digest}
    assert len(list(client.map(["a"], lens={"tuned": "mine"}, max_tokens=1, progress=False))) == 1


def test_a_jacobian_lens_reads_and_steers(client: Client) -> None:
    made = client.jacobians.put("said", "jacobian")
    assert client.lens("hello", jacobian="said").layers == [1]
    swap = {"jacobian": "said", "token": 3, "swap": 4, "layers": "all"}
    job = client.submit(prompts=["a"], steering=swap, max_tokens=1)
    assert job.contents == {"jacobian/said": made.digest}
    assert client.wait(job).steered
    (entry,) = client.modules.put("module", {"jacobian": "said", "token": "a", "layers": 1}).entries
    assert entry.op == "add"
    assert entry.layers == [1]
    assert len(list(client.map(["a"], steering=swap, max_tokens=1, progress=False))) == 1


# --- Files that changed, and files that a rank cannot load
# --------------------------------------------------------------------------------------------------


def test_an_adapter_of_changed_files_fails_the_job(client: Client, folders: Any) -> None:
    adapter(folders["lora"] / "turning", lora_alpha=3)
    client.loras.put("turning", "turning")
    adapter(folders["lora"] / "turning", lora_alpha=5)
    job = client.wait(client.submit(prompts=["a"], lora="turning"))
    assert job.state == "failed"
    assert job.error.field == "lora"
    assert "files have changed since it was registered" in job.error.detail


def test_steering_by_a_feature_of_changed_files_is_refused(client: Client, folders: Any) -> None:
    folder = folders["sae"] / "turning"
    shutil.copytree(FORMS / "standard", folder)
    client.saes.put("turning", "turning")
    steering = {"sae": "turning", "feature": 3, "op": "clamp", "value": 2}
    assert client.run(prompts=["hello"], steering=steering).state == "succeeded"
    shutil.copy(FORMS / "bare" / "cfg.json", folder / "cfg.json")
    with refuses(match="have changed since it was registered", field="sae"):
        client.submit(prompts=["hello"], steering=steering | {"feature": 4})


@pytest.fixture
def failing(stack: Stack) -> Iterator[None]:
    """A worker whose second rank loads no artifact."""
    stack.replace("worker", fault="put_lora:rank=1;put_sae:rank=1")
    yield
    stack.replace("worker")


def test_what_a_rank_cannot_load_fails_the_job_with_rank_and_reason(
    named: Client, failing: None
) -> None:
    for field, asked, what in (
        ("lora", "calm", "adapter 'calm'"),
        ("features", [{"sae": "read"}], "sparse autoencoder 'read'"),
    ):
        with refuses(detail=f"loading {what} failed on rank 1: injected fault"):
            named.completion(MODEL, "hello", **{field: asked})


def test_positions_are_shown_with_their_tokens_and_nothing_runs(
    client: Client, midstream: Callable[..., str]
) -> None:
    found = client.positions("hello", [1, {"text": "lo"}])
    assert [at[:2] for at in found] == [(1, "e"), (3, "l"), (4, "o")]
    assert str(found).splitlines()[0] == f"   1  'e'  {found[0].id}"
    assert client.positions([at.id for at in found], model=MODEL) == [
        (number, at.text, at.id) for number, at in enumerate(found)
    ]
    chat = [{"role": "user", "content": "hi"}]
    assert [at.text for at in client.positions(chat, {"turn": 0})] == ["h", "i"]
    assert client.positions("hello", {"start": 4}).generated
    with refuses("need a prompt given as `messages`", field="positions"):
        client.positions("hello", {"turn": 0})
    before = len(client.jobs.list().jobs)
    client.modules.put("late", [{"layers": 1, "vector": VECTOR, "positions": {"text": "i"}}])
    entry = json.dumps([{"module": "late"}, {"layers": 2, "vector": VECTOR, "positions": [0]}])
    asked = ["submit", "hi", "--layers=0", f"--set=steering={entry}", "--dry-run"]
    shown = midstream(*asked, "--positions=last:2").splitlines()
    assert shown[:3] == [
        "prompt 0, capture.positions:",
        "   …  known when the request ends",
        "prompt 0, steering[0], entry 0 of late:",
    ]
    assert [line.split()[:2] for line in shown[3::2]] == [["1", "'i'"], ["0", "'h'"]]
    (token,) = json.loads(midstream(*asked[:2], "--layers=0", "--dry-run", "--json"))["tokens"]
    assert token["position"] == 1
    assert token["text"] == "i"
    assert len(client.jobs.list().jobs) == before
    client.modules.delete("late")


def test_a_plan_says_how_many_layers_a_job_computes_and_nothing_runs(
    client: Client, midstream: Callable[..., str]
) -> None:
    before = len(client.jobs.list().jobs)
    body = {"prompts": ["hello", "hi"], "capture": {"layers": 1}}
    plan = client.plan(**body, sampling={"max_tokens": 0})
    assert plan.tokens == [5, 2]
    assert plan.layers == 2
    assert client.plan(**body).layers is None
    with refuses(field="capture.layers"):
        client.plan(**body | {"capture": {"layers": 99}})
    asked = ["submit", "hi", "--layers=1", "--dry-run", "--max-tokens"]
    said = f"layers: 2 of {plan.num_layers} are computed"
    assert midstream(*asked, "0").splitlines()[-1] == said
    assert "layers:" not in midstream(*asked, "1")
    (*_, last) = midstream(*asked, "0", "--json").splitlines()
    assert json.loads(last) == {"layers": 2, "num_layers": plan.num_layers}
    assert len(client.jobs.list().jobs) == before

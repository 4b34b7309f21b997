"""Sparse autoencoders are registered over HTTP, from Python and on the command line.

The engine is a fake.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from stack import Stack
from typer.testing import CliRunner

from midstream.client import Client
from midstream.client.cli.main import app
from midstream.storage.formats.sae_files import reading

FORMS = Path(__file__).parents[1] / "data" / "saes"
ADMIN = "ms_admin0000000_" + "a" * 43
TIMES = {"lease_s": 9.0, "visibility_timeout_s": 60}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("saes")
    shutil.copytree(FORMS, folder / "saes")
    with Stack(
        folder / "stack",
        api=True,
        callbacks=False,
        sae_dir=str(folder / "saes"),
        auth="keys",
        admin_key=ADMIN,
        **TIMES,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def http(stack: Stack) -> Iterator[httpx2.Client]:
    with httpx2.Client(
        base_url=stack.url, timeout=60, headers={"authorization": f"Bearer {ADMIN}"}
    ) as client:
        yield client


def test_an_autoencoder_is_registered_replaced_listed_and_removed(stack: Stack) -> None:
    with reading(FORMS / "standard") as (content, _):
        digest = content.digest
    with Client(stack.url, api_key=ADMIN) as client:
        made = client.saes.register("tiny", "standard", description="of nothing")
        assert (made.digest, made.hook, made.layer, made.form.d_sae) == (
            digest,
            "post_block",
            1,
            32,
        )
        assert (client.saes.get("tiny"), client.saes.list()) == (made, [made])
        changed = client.saes.register("tiny", "jumprelu")
        assert (changed.replaced, changed.form.architecture) == (digest, "jumprelu")
        scope = client.saes.register("scope", "gemma_scope", hook="resid_pre", layer=0)
        assert (scope.hook, scope.layer) == ("pre_attn", 0)
        for name in ("tiny", "scope"):
            client.saes.delete(name)
        assert client.saes.list() == []


def test_the_command_line_registers_lists_and_deletes(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDSTREAM_API_KEY", ADMIN)

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, ["sae", *words, "--url", stack.url])
        assert done.exit_code == 0, done.output
        return done.output

    made = json.loads(run("register", "scope", "gemma_scope", "--reads", "post_block:2", "--json"))
    assert (made["path"], made["layer"]) == ("gemma_scope", 2)
    assert "post_block of layer 2" in run("show", "scope")
    assert "jumprelu" in run("list")
    assert "scope removed" in run("remove", "scope")
    assert json.loads(run("list", "--json")) == []


def test_only_an_operator_registers_and_everybody_looks(http: httpx2.Client, stack: Stack) -> None:
    assert http.post("/v1/saes", json={"name": "calm", "path": "gated"}).status_code == 201
    key = http.post(
        "/v1/keys", json={"name": "a user", "tenant": "theirs", "scopes": ["submit", "read"]}
    ).json()["key"]
    with httpx2.Client(
        base_url=stack.url, headers={"authorization": f"Bearer {key}"}, timeout=60
    ) as user:
        assert [sae["name"] for sae in user.get("/v1/saes").json()["saes"]] == ["calm"]
        assert user.get("/v1/saes/calm").json()["form"]["architecture"] == "gated"
        assert user.post("/v1/saes", json={"name": "mine", "path": "gated"}).status_code == 403
        assert user.delete("/v1/saes/calm").status_code == 403
    assert http.delete("/v1/saes/calm").status_code == 204
    assert http.delete("/v1/saes/calm").status_code == 404


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({"name": "a/b", "path": "standard"}, "name", "does not match the pattern"),
        ({"name": "x", "path": "../saes/standard"}, "path", "not a path below sae_dir"),
        ({"name": "x", "path": "none"}, "path", "there is no folder 'none'"),
        ({"name": "x", "path": "standard", "hook": "zz"}, "hook", "Invalid enum value 'zz'"),
        (
            {"name": "x", "path": "standard", "layer": 3},
            "layer",
            "is 3, but the SAE was trained on layer 1",
        ),
        (
            {"name": "x", "path": "gemma_scope", "hook": "post_block", "layer": 4},
            "layer",
            "this model has no layer 4",
        ),
        ({"name": "x", "path": "standard", "model": "other"}, "model", "unknown model 'other'"),
    ],
)
def test_a_bad_registration_is_refused_by_field(
    http: httpx2.Client, body: dict[str, Any], field: str, says: str
) -> None:
    answer = http.post("/v1/saes", json=body)
    assert answer.status_code == (404 if field == "model" else 400), answer.text
    assert answer.json()["field"] == field
    assert says in answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/jobs", {"prompts": ["hello", "there"], "sampling": {"max_tokens": 2}}),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 2}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "stream": True},
        ),
    ],
)
def test_every_way_of_asking_takes_features(
    http: httpx2.Client, path: str, body: dict[str, Any]
) -> None:
    made = http.post("/v1/saes", json={"name": "read", "path": "topk"}).json()
    asked = {"model": "fake-model", "features": [{"sae": "read", "top_k": 4, "positions": [0, -1]}]}
    answer = http.post(path, json=asked | body)
    assert answer.status_code in (200, 202), answer.text
    job = answer.headers["x-midstream-job"]
    assert http.get(f"/v1/jobs/{job}", params={"wait": 50}).json()["state"] == "succeeded"
    result = http.get(f"/v1/jobs/{job}/result").json()
    assert [each["request"] for each in result["features"]] == list(
        range(len(body.get("prompts", [1])))
    )
    for read in result["features"]:
        assert (read["sae"], read["digest"], read["hook"], read["layer"]) == (
            "read",
            made["digest"],
            "post_block",
            1,
        )
        assert read["features"] == [[token, token + 1] for token in read["token_ids"]]
        assert read["activations"] == [[1.0, 0.5]] * 2
        assert read["active"] == [2, 2]
    if path == "/v1/completions":
        assert answer.json()["features"] == result["features"]
    if body.get("stream"):
        assert '"features":[{' in answer.text


def test_one_request_is_read_by_several_autoencoders(stack: Stack) -> None:
    with Client(stack.url, api_key=ADMIN) as client:
        digests = {name: client.saes.register(name, name).digest for name in ("gated", "jumprelu")}
        wanted = [{"sae": "gated", "top_k": 6}, {"sae": "jumprelu", "top_k": 2, "positions": [1]}]
        result = client.run(
            model="fake-model",
            prompts=["hello", "there"],
            sampling={"max_tokens": 1},
            features=wanted,
        )
        found = [
            (each.request, each.sae, each.digest, len(each.positions), len(each.features[0]))
            for each in result.features or []
        ]
        of_one = [("gated", digests["gated"], 5, 3), ("jumprelu", digests["jumprelu"], 1, 1)]
        assert found == [(request, *each) for request in (0, 1) for each in of_one]
        both = client.readings.features_of("hello", {"gated": 4, "jumprelu": 2}, model="fake-model")
        assert {name: len(each.of(0)) for name, each in both.items()} == {"gated": 2, "jumprelu": 1}
        steering = [{"sae": "gated", "feature": 1, "op": "ablate"}]
        mapped = client.map(
            ["hello"],
            model="fake-model",
            features=wanted[1:],
            steering=steering,
            max_tokens=1,
            progress=False,
        )
        job = client.jobs.get(next(iter(mapped)).result.id)
        assert job.contents == {f"sae/{name}": digest for name, digest in digests.items()}
        one = client.features("hello", "gated", top_k=4, model="fake-model", positions=[2])
        assert (one.word(0), one.of(0)) == (both["gated"].word(2), both["gated"].of(2))


def test_the_command_line_prints_a_table_for_each_autoencoder(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDSTREAM_API_KEY", ADMIN)
    with Client(stack.url, api_key=ADMIN) as client:
        for name in ("gated", "jumprelu"):
            client.saes.register(name, name)
    asked = [
        "features",
        "hello",
        "--sae",
        "gated:6",
        "--sae",
        "jumprelu",
        "--top-k",
        "2",
        "--url",
        stack.url,
    ]
    drawn = CliRunner().invoke(app, asked)
    assert drawn.exit_code == 0, drawn.output
    assert "features of gated at post_block of layer 1" in drawn.output
    assert "features of jumprelu at post_block of layer 1" in drawn.output
    read = json.loads(CliRunner().invoke(app, [*asked, "--json"]).output)
    assert [(each["sae"], len(each["features"][0])) for each in read] == [
        ("gated", 3),
        ("jumprelu", 1),
    ]
    assert "allowed: NAME[:TOP_K]" in str(
        CliRunner().invoke(app, ["features", "hello", "--sae", "gated:x"]).exception
    )


@pytest.mark.parametrize(
    ("features", "field", "says"),
    [
        ([{"sae": "none"}], "features[0].sae", "unknown sparse autoencoder 'none'"),
        (
            [{"sae": "read"}, {"sae": "none"}],
            "features[1].sae",
            "unknown sparse autoencoder 'none'",
        ),
        (
            [{"sae": "read"}, {"sae": "read", "top_k": 33}],
            "features[1].top_k",
            "33 exceeds the 32 features of 'read'",
        ),
        ([{"sae": "read", "top_k": 0}], "features[0].top_k", ">= 1"),
        ([{"sae": "read", "positions": [99]}], "features[0].positions", "99 is out of range"),
        ([{"sae": "read", "hook": "post_block"}], "features[0].hook", "unknown field"),
        ([{"sae": "read"}, {"sae": "read"}], "features[1]", "asks the same as features[0]"),
        ([{"sae": "read", "top_k": most} for most in range(1, 66)], "features", "length <= 64"),
        ({"sae": "read"}, "features", "Expected `array`, got `object`"),
    ],
)
def test_bad_features_are_refused_by_field(
    http: httpx2.Client, features: Any, field: str, says: str
) -> None:
    http.post("/v1/saes", json={"name": "read", "path": "topk"})
    answer = http.post(
        "/v1/jobs", json={"model": "fake-model", "prompts": ["hello"], "features": features}
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["field"].startswith(field)
    assert says in answer.text


def test_features_times_tokens_beyond_the_response_are_refused(http: httpx2.Client) -> None:
    http.post("/v1/saes", json={"name": "read", "path": "topk"})
    body = {
        "model": "fake-model",
        "prompts": ["a" * 400],
        "features": [{"sae": "read", "top_k": 32}],
    }
    assert http.post("/v1/jobs", json=body).status_code == 202
    body["features"] += [{"sae": "read", "top_k": most} for most in (30, 31)]  # type: ignore[operator]
    answer = http.post("/v1/jobs", json=body)
    assert (answer.status_code, answer.json()["field"]) == (400, "features[2]")
    assert "bytes of results" in answer.json()["detail"]


def test_steering_by_a_feature_of_changed_files_is_refused(
    http: httpx2.Client, stack: Stack
) -> None:
    folder = Path(stack.settings.sae_dir) / "turning"
    shutil.copytree(FORMS / "standard", folder)
    http.post("/v1/saes", json={"name": "turning", "path": "turning"})
    body = {
        "model": "fake-model",
        "prompts": ["hello"],
        "steering": [{"sae": "turning", "feature": 3, "op": "clamp", "value": 2}],
    }
    view = http.get(
        f"/v1/jobs/{http.post('/v1/jobs', json=body).json()['id']}", params={"wait": 50}
    ).json()
    assert view["state"] == "succeeded", view
    shutil.copy(FORMS / "bare" / "cfg.json", folder / "cfg.json")
    body["steering"][0]["feature"] = 4  # type: ignore[index]
    answer = http.post("/v1/jobs", json=body)
    assert (answer.status_code, answer.json()["field"]) == (400, "sae")
    assert "have changed since it was registered" in answer.text


def test_an_autoencoder_that_a_rank_cannot_load_fails_the_job_with_rank_and_reason(
    tmp_path: Path,
) -> None:
    options = {"sae_dir": str(FORMS), "tensor_parallel_size": 2, "fault": "put_sae:rank=1", **TIMES}
    with (
        Stack(tmp_path / "stack", api=True, callbacks=False, **options) as stack,
        httpx2.Client(base_url=stack.url, timeout=60) as http,
    ):
        http.post("/v1/saes", json={"name": "tiny", "path": "gated"})
        answer = http.post(
            "/v1/completions",
            json={"model": "fake-model", "prompt": "hello", "features": [{"sae": "tiny"}]},
        )
        assert (
            answer.json()["detail"]
            == "loading sparse autoencoder 'tiny' failed on rank 1: injected fault"
        )


def test_the_folder_defaults_to_one_in_the_data_directory(tmp_path: Path) -> None:
    with (
        Stack(tmp_path / "stack", api=True, callbacks=False, **TIMES) as stack,
        httpx2.Client(base_url=stack.url, timeout=60) as http,
    ):
        assert not stack.settings.sae_dir
        answer = http.post("/v1/saes", json={"name": "tiny", "path": "gated"})
        assert (answer.status_code, answer.json()["field"]) == (400, "path")
        assert answer.json()["detail"] == "there is no folder 'gated' in sae_dir"
        shutil.copytree(FORMS / "gated", Path(stack.settings.data_dir, "saes", "gated"))
        assert http.post("/v1/saes", json={"name": "tiny", "path": "gated"}).is_success
        body = {"model": "fake-model", "prompt": "hello", "features": [{"sae": "tiny"}]}
        assert http.post("/v1/completions", json=body).json()["features"][0]["sae"] == "tiny"

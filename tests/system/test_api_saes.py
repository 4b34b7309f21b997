"""Sparse autoencoders are registered over HTTP, from Python and on the command line. The engine is a fake."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from stack import Stack
from typer.testing import CliRunner

from midstream.client import Client
from midstream.client.cli.main import app
from midstream.schemas.sae_files import reading

FORMS = Path(__file__).parents[1] / "data" / "saes"
ADMIN = "ms_admin0000000_" + "a" * 43
TIMES = {"lease_s": 9.0, "visibility_timeout_s": 60}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("saes")
    shutil.copytree(FORMS, folder / "saes")
    with Stack(folder / "stack", api=True, callbacks=False, sae_dir=str(folder / "saes"), auth="keys", admin_key=ADMIN, **TIMES) as running:
        yield running


@pytest.fixture(scope="module")
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=60, headers={"authorization": f"Bearer {ADMIN}"}) as client:
        yield client


def test_an_autoencoder_is_registered_replaced_listed_and_removed(stack: Stack) -> None:
    with reading(FORMS / "standard") as (content, _):
        digest = content.digest
    with Client(stack.url, api_key=ADMIN) as client:
        made = client.register_sae("tiny", "standard", description="of nothing")
        assert (made.digest, made.hook, made.layer, made.form.d_sae) == (digest, "post_block", 1, 32)
        assert (client.sae("tiny"), client.saes()) == (made, [made])
        changed = client.register_sae("tiny", "jumprelu")
        assert (changed.replaced, changed.form.architecture) == (digest, "jumprelu")
        scope = client.register_sae("scope", "gemma_scope", hook="resid_pre", layer=0)
        assert (scope.hook, scope.layer) == ("pre_attn", 0)
        for name in ("tiny", "scope"):
            client.unregister_sae(name)
        assert client.saes() == []


def test_the_command_line_registers_lists_and_deletes(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_API_KEY", ADMIN)

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, ["sae", *words, "--url", stack.url])
        assert done.exit_code == 0, done.output
        return done.output

    made = json.loads(run("register", "scope", "gemma_scope", "--reads", "post_block:2", "--json"))
    assert (made["path"], made["layer"]) == ("gemma_scope", 2)
    assert "post_block of layer 2" in run("show", "scope")
    assert "jumprelu" in run("list")
    assert "scope removed" in run("delete", "scope")
    assert json.loads(run("list", "--json")) == []


def test_only_an_operator_registers_and_everybody_looks(http: httpx.Client, stack: Stack) -> None:
    assert http.post("/v1/saes", json={"name": "calm", "path": "gated"}).status_code == 201
    key = http.post("/v1/keys", json={"name": "a user", "tenant": "theirs", "scopes": ["submit", "read"]}).json()["key"]
    with httpx.Client(base_url=stack.url, headers={"authorization": f"Bearer {key}"}, timeout=60) as user:
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
        ({"name": "x", "path": "standard", "hook": "z"}, "hook", "Invalid enum value 'z'"),
        ({"name": "x", "path": "standard", "layer": 3}, "layer", "is 3, but the SAE was trained on layer 1"),
        ({"name": "x", "path": "gemma_scope", "hook": "post_block", "layer": 4}, "layer", "this model has no layer 4"),
        ({"name": "x", "path": "standard", "model": "other"}, "model", "unknown model 'other'"),
    ],
)
def test_a_bad_registration_is_refused_by_field(http: httpx.Client, body: dict[str, Any], field: str, says: str) -> None:
    answer = http.post("/v1/saes", json=body)
    assert answer.status_code == (404 if field == "model" else 400), answer.text
    assert answer.json()["field"] == field
    assert says in answer.text

"""Do all ways of asking take an adapter, with keys, a worker and its ranks behind?

The engine alone is a fake.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from safetensors.numpy import save_file
from stack import Stack

from midstream.storage.formats.lora_files import read

HIDDEN = 8
ADMIN = "ms_admin0000000_" + "a" * 43
TIMES = {"lease_s": 9.0, "visibility_timeout_s": 60}


def write(folder: Path, outputs: int = HIDDEN, **config: Any) -> str:
    """An adapter of the fake model; returns its digest."""
    folder.mkdir(parents=True, exist_ok=True)
    members = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["up_proj"]} | config
    (folder / "adapter_config.json").write_text(json.dumps(members))
    at = "base_model.model.model.layers.1.mlp.up_proj"
    tensors = {
        f"{at}.lora_A.weight": np.ones((2, HIDDEN), np.float32),
        f"{at}.lora_B.weight": np.ones((outputs, 2), np.float32),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return read(folder).digest


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("lora")
    options = {
        "lora_dir": str(folder / "adapters"),
        "auth": "keys",
        "admin_key": ADMIN,
        "tensor_parallel_size": 2,
        **TIMES,
    }
    (folder / "adapters").mkdir()
    with Stack(folder / "stack", api=True, callbacks=False, **options) as running:
        yield running


@pytest.fixture(scope="module")
def adapters(stack: Stack) -> Path:
    return Path(stack.settings.lora_dir)


@pytest.fixture(scope="module")
def http(stack: Stack) -> Iterator[httpx2.Client]:
    with httpx2.Client(
        base_url=stack.url, timeout=60, headers={"authorization": f"Bearer {ADMIN}"}
    ) as client:
        yield client


@pytest.fixture(scope="module")
def digest(http: httpx2.Client, adapters: Path) -> str:
    """Of the registered adapter `calm`."""
    digest = write(adapters / "calm")
    answer = http.post("/v1/loras", json={"name": "calm", "path": "calm"})
    assert (answer.status_code, answer.headers["location"]) == (201, "/v1/loras/calm"), answer.text
    assert answer.json()["digest"] == digest
    return digest


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/jobs", {"prompts": ["hello", "there"], "sampling": {"max_tokens": 2}}),
        (
            "/v1/jobs",
            {"prompts": ["hello"], "capture": {"layers": 1}, "sampling": {"max_tokens": 2}},
        ),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 2}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "stream": True},
        ),
        (
            "/v1/sweeps",
            {
                "metric": "logprob",
                "pairs": [{"clean": "abc", "corrupt": "abd", "answer": "x"}],
                "layers": 1,
            },
        ),
    ],
)
def test_every_way_of_asking_takes_an_adapter_and_says_so(
    http: httpx2.Client, digest: str, path: str, body: dict[str, Any]
) -> None:
    answer = http.post(path, json={"model": "fake-model", "lora": "calm"} | body)
    assert answer.status_code in (200, 202), answer.text
    view = http.get(f"/v1/jobs/{answer.headers['x-midstream-job']}", params={"wait": 50}).json()
    assert view["state"] == "succeeded", view
    assert view["lora"] == {"name": "calm", "digest": digest}
    result = http.get(f"/v1/jobs/{view['id']}/result").json()
    assert result["lora"] == view["lora"]
    if path == "/v1/completions":
        assert answer.json()["determinism"]["consistent"] is True, (
            "held until both ranks have accounted for it"
        )
    refused = http.post(path, json={"model": "fake-model", "lora": "clam"} | body)
    assert (refused.status_code, refused.json()["field"], refused.json()["allowed"]) == (
        400,
        "lora",
        "calm",
    ), refused.text


def test_jobs_without_an_adapter_say_nothing_of_one(http: httpx2.Client, digest: str) -> None:
    answer = http.post(
        "/v1/completions", json={"model": "fake-model", "prompt": "hello", "max_tokens": 2}
    )
    assert "determinism" not in answer.json()
    assert "lora" not in http.get(f"/v1/jobs/{answer.headers['x-midstream-job']}").json()


def test_only_an_operator_registers_and_everybody_looks(
    http: httpx2.Client, stack: Stack, digest: str
) -> None:
    key = http.post(
        "/v1/keys", json={"name": "a user", "tenant": "theirs", "scopes": ["submit", "read"]}
    ).json()["key"]
    with httpx2.Client(
        base_url=stack.url, headers={"authorization": f"Bearer {key}"}, timeout=60
    ) as user:
        assert [lora["name"] for lora in user.get("/v1/loras").json()["loras"]] == ["calm"]
        assert user.get("/v1/loras/calm").json()["modules"] == ["model.layers.*.mlp.up_proj"]
        assert user.post("/v1/loras", json={"name": "mine", "path": "calm"}).status_code == 403
        assert user.delete("/v1/loras/calm").status_code == 403
        answer = user.post(
            "/v1/completions",
            json={"model": "fake-model", "prompt": "hello", "max_tokens": 2, "lora": "calm"},
        )
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({"name": "a/b", "path": "calm"}, "name", "does not match the pattern"),
        ({"name": "x", "path": "../adapters/calm"}, "path", "not a path below lora_dir"),
        ({"name": "x", "path": "/etc"}, "path", "not a path below lora_dir"),
        ({"name": "x", "path": "none"}, "path", "there is no folder 'none'"),
        ({"name": "x", "path": "wide"}, "path", "rank 2 on this model needs [8, 2]"),
        ({"name": "x", "path": "dora"}, "path", "use_dora is 'True', which is not served"),
        ({"name": "x", "path": "calm", "model": "other"}, "model", "unknown model 'other'"),
    ],
)
def test_a_bad_registration_is_refused_by_field(
    http: httpx2.Client, adapters: Path, body: dict, field: str, says: str
) -> None:
    write(adapters / "wide", outputs=12)
    write(adapters / "dora", use_dora=True)
    answer = http.post("/v1/loras", json=body)
    assert answer.status_code == (404 if field == "model" else 400), answer.text
    assert answer.json()["field"] == field
    assert says in answer.text


def test_a_replaced_adapter_names_the_former_and_a_deleted_one_is_gone(
    http: httpx2.Client, adapters: Path
) -> None:
    former = write(adapters / "turning", lora_alpha=3)
    assert http.post("/v1/loras", json={"name": "turning", "path": "turning"}).status_code == 201
    now = write(adapters / "turning", lora_alpha=5)
    job = http.post(
        "/v1/jobs", json={"model": "fake-model", "prompts": ["a"], "lora": "turning"}
    ).json()["id"]
    view = http.get(f"/v1/jobs/{job}", params={"wait": 50}).json()
    assert (view["state"], view["error"]["field"]) == ("failed", "lora")
    assert "files have changed since it was registered" in view["error"]["detail"]
    answer = http.post("/v1/loras", json={"name": "turning", "path": "turning"})
    assert (answer.status_code, answer.json()["digest"], answer.json()["replaced"]) == (
        200,
        now,
        former,
    )
    assert http.delete("/v1/loras/turning").status_code == 204
    gone = http.delete("/v1/loras/turning")
    assert (gone.status_code, gone.json()["allowed"]) == (404, "calm")


def test_an_adapter_that_a_rank_cannot_load_fails_the_job_with_rank_and_reason(
    tmp_path: Path,
) -> None:
    write(tmp_path / "adapters" / "calm")
    options = {
        "lora_dir": str(tmp_path / "adapters"),
        "tensor_parallel_size": 2,
        "fault": "put_lora:rank=1",
        **TIMES,
    }
    with (
        Stack(tmp_path / "stack", api=True, callbacks=False, **options) as stack,
        httpx2.Client(base_url=stack.url, timeout=60) as http,
    ):
        http.post("/v1/loras", json={"name": "calm", "path": "calm"})
        answer = http.post(
            "/v1/completions",
            json={"model": "fake-model", "prompt": "hello", "max_tokens": 2, "lora": "calm"},
        )
        assert answer.json()["detail"] == "loading adapter 'calm' failed on rank 1: injected fault"


def test_without_a_folder_no_adapter_is_taken(tmp_path: Path) -> None:
    with (
        Stack(tmp_path / "stack", api=True, callbacks=False, **TIMES) as stack,
        httpx2.Client(base_url=stack.url, timeout=60) as http,
    ):
        for path, body in (
            ("/v1/loras", {"name": "a", "path": "a"}),
            ("/v1/jobs", {"model": "fake-model", "prompts": ["a"], "lora": "a"}),
        ):
            answer = http.post(path, json=body)
            assert (answer.status_code, answer.json()["field"]) == (400, "lora")
            assert "lora_dir is empty" in answer.json()["detail"]

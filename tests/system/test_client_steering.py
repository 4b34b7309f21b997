"""Do names, global steering and the ranks' agreement work from Python and the command line, through
the whole stack?
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from midstream_fake_engine.model import HIDDEN_SIZE
from safetensors.numpy import save_file
from up_kit import Up

from midstream.client import AsyncClient, Client
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.requests.steering import Dynamic

RANKS = 2
JOY, CALM = np.ones(HIDDEN_SIZE, np.float32), np.linspace(-1, 1, HIDDEN_SIZE, dtype=np.float32)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    started = Up(tmp_path_factory.mktemp("steering") / "data", tensor_parallel_size=RANKS)
    started.ready()
    yield started
    started.close()


@pytest.fixture
def client(up: Up) -> Iterator[Client]:
    """On a stack that steers nothing and knows no names."""
    with Client(up.ready()) as made:
        yield made
        if made.global_steering.get().entries:
            made.global_steering.clear()
        for module in made.modules.list():
            made.modules.delete(module.name)


def answered(client: Client) -> Dynamic:
    """What the ranks say: they are asked again where the worker was too busy for the two seconds
    that it is given.
    """
    for _ in range(20):
        found = client.global_steering.dynamic()
        if "did not answer" not in found.determinism.detail:
            break
    return found


def text(client: Client, *steering: Any) -> str:
    """What the fake engine says: steering decides it."""
    return client.completion(
        "fake", "once upon a time", steering=list(steering), max_tokens=12, temperature=0
    ).text


def test_a_module_steers_like_its_scaled_entries(client: Client) -> None:
    view = client.modules.register(
        "joy", {"post_block.2": JOY, "mlp_out.1": CALM}, description="to smile"
    )
    assert [(entry.hook, entry.layers) for entry in view.entries] == [
        ("mlp_out", [1]),
        ("post_block", [2]),
    ]
    assert (client.modules.get("joy"), client.modules.list()) == (view, [view])
    entries = [{"layers": 1, "hook": "mlp_out", "vector": CALM}, {"layers": 2, "vector": JOY}]
    named = text(client, {"module": "joy"})
    assert named == text(client, *entries) != text(client)
    doubled = text(client, {"module": "joy", "scale": 2})
    assert doubled == text(client, *({**entry, "scale": 2.0} for entry in entries)) != named


# field case 15
def test_a_name_registered_again_means_the_new_content(client: Client) -> None:
    first = client.modules.register("mood", {"post_block.2": JOY})
    again = client.modules.register("mood", {"post_block.2": JOY})
    assert (again.digest, again.replaced) == (first.digest, None)
    happy = text(client, {"module": "mood"})
    changed = client.modules.register("mood", {"post_block.2": CALM})
    assert changed.replaced == first.digest != changed.digest
    assert text(client, {"module": "mood"}) == text(client, {"layers": 2, "vector": CALM}) != happy


def test_a_deleted_module_is_refused_by_its_field(client: Client) -> None:
    client.modules.register("joy", {"post_block.2": JOY})
    client.modules.delete("joy")
    with pytest.raises(MidstreamError) as caught:
        text(client, {"layers": 1, "vector": JOY}, {"module": "joy"})
    assert (caught.value.kind, caught.value.field) == ("invalid_request", "steering[1].module")
    for ask in (client.modules.get, client.modules.delete):
        with pytest.raises(MidstreamError) as caught:
            ask("joy")
        assert caught.value.kind == "not_found"


def test_global_steering_applies_to_all_requests_until_cleared(client: Client) -> None:
    plain, joyful = text(client), text(client, {"layers": 2, "vector": JOY})
    before = client.global_steering.get().version
    view = client.global_steering.set([{"layers": 2, "vector": JOY}])
    assert (view.version, [entry.layers for entry in view.entries]) == (before + 1, [[2]])
    assert text(client) == joyful != plain
    assert client.global_steering.clear().entries == []
    assert text(client) == plain


def test_the_async_client_steers_alike(client: Client) -> None:
    async def use() -> tuple[str, str, list[str]]:
        async with AsyncClient(client.url) as calls:
            await calls.modules.register("joy", {"post_block.2": JOY})
            steered = await calls.completion(
                "fake",
                "once upon a time",
                steering=[{"module": "joy"}],
                max_tokens=12,
                temperature=0,
            )
            await calls.global_steering.set([{"layers": 2, "vector": JOY}])
            everyone = await calls.completion(
                "fake", "once upon a time", max_tokens=12, temperature=0
            )
            await calls.global_steering.clear()
            return (
                steered.text,
                everyone.text,
                [worker.worker for worker in (await calls.global_steering.dynamic()).workers],
            )

    steered, everyone, workers = asyncio.run(use())
    assert steered == everyone == text(client, {"layers": 2, "vector": JOY})
    assert workers == ["w1"]
    assert answered(client).determinism.consistent


def test_rank_checksums_agree(client: Client) -> None:
    client.modules.register("joy", {"post_block.2": JOY})
    client.global_steering.set([{"layers": 1, "vector": CALM}])
    text(client, {"module": "joy"})
    found = answered(client)
    (worker,) = found.workers
    assert [rank.rank for rank in worker.ranks] == list(range(RANKS))
    assert len({(rank.checksum, rank.actions, rank.global_digest) for rank in worker.ranks}) == 1
    assert worker.ranks[0].modules == {"joy": client.modules.get("joy").digest}
    assert (
        worker.ranks[0].global_version
        == worker.global_version
        == client.global_steering.get().version
    )
    assert found.determinism.consistent


@pytest.mark.long
def test_the_cli_registers_uses_and_deletes_modules(up: Up, client: Client, tmp_path: Path) -> None:
    save_file({"post_block.2": JOY}, tmp_path / "joy.safetensors", {"op": "add", "scale": "0.5"})
    made = up.midstream(
        "modules", "register", "joy", f"{tmp_path}/joy.safetensors", "--description", "to smile"
    )
    assert made.returncode == 0, made.stderr
    digest = client.modules.get("joy").digest
    assert digest in made.stdout
    assert digest[:12] in up.midstream("modules", "list").stdout
    assert json.loads(up.midstream("modules", "show", "joy", "--json").stdout)["digest"] == digest
    done = up.midstream(
        "submit", "once upon a time", "--steer", "@joy:4", "--max-tokens", "12", "--json"
    )
    assert json.loads(done.stdout)["outputs"][0]["text"] == text(
        client, {"layers": 2, "vector": JOY, "scale": 2.0}
    )
    assert up.midstream("modules", "remove", "joy").returncode == 0
    gone = up.midstream("submit", "once upon a time", "--steer", "@joy")
    assert (gone.returncode, "steering[0].module" in gone.stderr) == (1, True)


@pytest.mark.long
def test_the_cli_sets_global_steering_and_shows_ranks(
    up: Up, client: Client, tmp_path: Path
) -> None:
    np.save(tmp_path / "joy.npy", JOY)
    plain = text(client)
    done = up.midstream("global", "set", "--steer", f"{tmp_path}/joy.npy:2:2.0")
    assert done.returncode == 0, done.stderr
    assert text(client) != plain
    assert "add at post_block 2" in up.midstream("global", "show").stdout
    for _ in range(20):  # as `answered`
        dynamic = up.midstream("dynamic")
        if "did not answer" not in dynamic.stdout + dynamic.stderr:
            break
    assert dynamic.returncode == 0, dynamic.stderr
    assert (
        f"determinism: consistent, {RANKS} ranks in 1 stage of 1 worker, checksum "
        in dynamic.stdout
    )
    assert up.midstream("global", "clear").returncode == 0
    assert text(client) == plain


def test_steering_beyond_the_dtype_is_refused_and_changes_nothing(up: Up, client: Client) -> None:
    before = client.global_steering.get()
    for ask in (
        client.global_steering.set,
        lambda entries: client.modules.register("wide", entries),
    ):
        with pytest.raises(MidstreamError) as caught:
            ask([{"layers": 2, "vector": [1.0, 2.0]}])
        assert (caught.value.kind, caught.value.field) == (
            "invalid_request",
            "steering[0].vector.shape",
        )
    assert (client.global_steering.get().version, client.modules.list()) == (before.version, [])


MATRICES = {
    "rotation": np.eye(2, HIDDEN_SIZE, dtype=np.float32),
    "weight": np.ones((2, HIDDEN_SIZE), np.float32),
    "bias": np.ones(2, np.float32),
}


@pytest.mark.parametrize(
    "entry",
    [
        {"layers": "0-2", "vector": JOY, "scale": 0.5, "positions": "all_generated"},
        {
            "layers": 2,
            "hook": "pre_attn",
            "vector": CALM,
            "scale": 0.1,
            "norm_match": True,
            "positions": [0, {"text": "upon"}],
        },
        {
            "layers": 1,
            "hook": "mlp_out",
            "vector": CALM.astype(np.float16),
            "op": "clamp",
            "low": -1.0,
        },
        {"layers": [0, 2], "vector": JOY, "op": "ablate", "strength": 0.5},
        {"layers": 1, "vector": JOY, "op": "replace", "alpha": 0.5},
        {"layers": 2, "op": "lowrank", **MATRICES},
    ],
)
def test_an_exported_module_is_the_same_when_registered_again(
    client: Client, tmp_path: Path, entry: dict[str, Any]
) -> None:
    view = client.modules.register(
        "mood", [entry, {"layers": 1, "hook": "attn_out", "vector": JOY}]
    )
    assert client.modules.export("mood", tmp_path / "mood.safetensors") == "safetensors"
    assert client.modules.register("again", tmp_path / "mood.safetensors").digest == view.digest


@pytest.mark.parametrize("suffix", ["gguf", "npz", "pt", "json"])
def test_a_module_steers_alike_after_export_in_any_format(
    client: Client, tmp_path: Path, suffix: str
) -> None:
    client.modules.register("joy", {"post_block.2": JOY, "post_block.1": CALM})
    client.modules.export("joy", tmp_path / f"joy.{suffix}")
    client.modules.register("again", tmp_path / f"joy.{suffix}")
    assert text(client, {"module": "again"}) == text(client, {"module": "joy"}) != text(client)


def test_an_export_that_cannot_be_made_is_refused(client: Client, tmp_path: Path) -> None:
    client.modules.register("joy", {"mlp_out.2": JOY})
    for name, path, says in (
        ("joy", "joy.gguf", "cannot hold mlp_out"),
        ("joy", "joy.bin", "implies no format"),
        ("no", "no.pt", "unknown module"),
    ):
        with pytest.raises(MidstreamError, match=says):
            client.modules.export(name, tmp_path / path)
    assert list(tmp_path.iterdir()) == []


def test_the_cli_exports_modules(up: Up, client: Client, tmp_path: Path) -> None:
    client.modules.register("joy", {"post_block.2": JOY})
    done = up.midstream("modules", "export", "joy", f"{tmp_path}/joy.gguf")
    assert (done.returncode, done.stdout) == (0, f"joy written to {tmp_path}/joy.gguf as gguf\n"), (
        done.stderr
    )
    assert up.midstream("modules", "register", "again", f"{tmp_path}/joy.gguf").returncode == 0
    assert text(client, {"module": "again"}) == text(client, {"module": "joy"})
    assert (
        up.midstream("modules", "export", "joy", f"{tmp_path}/joy", "--format", "onnx").returncode
        != 0
    )

"""One stack for all test files that leave it as they find it.

The engine is a fake of two ranks, and takes 10 ms for a token; callers need no key, and the
artifacts that operators install lie in three folders. A file that uses it says

    pytest_plugins = ["shared_stack"]
    pytestmark = pytest.mark.xdist_group("shared_stack")

which has all of them run in one process, and finds nothing registered when it begins.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from midstream_fake_engine.model import HIDDEN_SIZE, NUM_LAYERS
from safetensors.numpy import save_file
from stack import Stack
from typer.testing import CliRunner

from midstream.client import Client
from midstream.client.cli.main import app
from midstream.schemas.artifacts.jacobian_lenses import JacobianRecord
from midstream.storage.formats import lens_files

FORMS = Path(__file__).parents[1] / "data" / "saes"
FOLDERS = {"sae": "saes", "lora": "loras", "lens": "lenses"}


@pytest.fixture(scope="session")
def running_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("shared")
    for name in FOLDERS.values():
        (folder / name).mkdir()
    with Stack(
        folder / "stack",
        api=True,
        callbacks=False,
        artifacts_dir=str(folder),
        **{"engine.tensor_parallel_size": 2, "engine.max_loras": 4},
        engine_options={"token_s": 0.01},
        admin_key="ms_admin0000000_" + "a" * 43,
        webhook_allow_private=True,
        # no message comes a second time while its worker is stalled; a third of the lease lies
        # between two heartbeats
        lease_s=9.0,
        **{"tuning.visibility_timeout_s": 60},
        steering_wait_s=90.0,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def stack(running_stack: Stack) -> Iterator[Stack]:
    yield running_stack
    with Client(running_stack.url) as client:
        forget(client)


def forget(client: Client) -> None:
    """Remove everything that has a name, and steer nobody."""
    for group in (
        client.policies,
        client.probes,
        client.modules,
        client.saes,
        client.lenses,
        client.jacobians,
        client.loras,
    ):
        for artifact in group.list():
            group.delete(artifact.name)
    for run in client.source_runs.list().runs:
        client.source_runs.delete(run.name)
    if client.global_steering.get().entries:
        client.global_steering.delete()


@pytest.fixture
def nameless(client: Client) -> Iterator[None]:
    """What the test registers is removed at its end."""
    yield
    forget(client)


@pytest.fixture(scope="session")
def folders(running_stack: Stack) -> dict[str, Path]:
    """Kind of artifact → the folder of those that an operator has installed."""
    settings = running_stack.settings
    return {kind: Path(settings.artifacts_of(name)) for kind, name in FOLDERS.items()}


def adapter(folder: Path, outputs: int = HIDDEN_SIZE, **config: Any) -> None:
    """Write an adapter of the fake model."""
    folder.mkdir(parents=True, exist_ok=True)
    members = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["1.mlp.up_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(members | config))
    at = "base_model.model.model.layers.1.mlp.up_proj"
    tensors = {
        f"{at}.lora_A.weight": np.ones((2, HIDDEN_SIZE), np.float32),
        f"{at}.lora_B.weight": np.ones((outputs, 2), np.float32),
    }
    save_file(tensors, folder / "adapter_model.safetensors")


def lens(folder: Path, layers: list[int], width: int = HIDDEN_SIZE, **extra: np.ndarray) -> None:
    """Write a tuned lens."""
    folder.mkdir(parents=True, exist_ok=True)
    maps = {f"{layer}.weight": np.eye(width, dtype=np.float32) for layer in layers}
    maps |= {f"{layer}.bias": np.full(width, layer, dtype=np.float32) for layer in layers}
    save_file(maps | extra, folder / "lens.safetensors")


@pytest.fixture(scope="session")
def installed(folders: dict[str, Path]) -> dict[str, Path]:
    """What an operator has put into the folders, good and bad."""
    shutil.copytree(FORMS, folders["sae"], dirs_exist_ok=True)
    adapters: dict[str, dict[str, Any]] = {
        "calm": {},
        "other": {"lora_alpha": 5},
        "wide": {"outputs": 12},
        "dora": {"use_dora": True},
    }
    for name, changes in adapters.items():
        adapter(folders["lora"] / name, **changes)
    lenses = folders["lens"]
    eye = np.eye(HIDDEN_SIZE, dtype=np.float32)
    for name, layers, changes in (
        ("all", list(range(NUM_LAYERS)), {}),
        ("some", [1, 2], {}),
        ("wide", [1], {"width": HIDDEN_SIZE + 1}),
        ("deep", [NUM_LAYERS], {}),
        ("nan", [1], {"2.weight": eye * np.nan, "2.bias": eye[0]}),
        ("half", [1], {"2.weight": eye}),
        ("other", [1], {"head": np.ones(3, np.float32)}),
    ):
        lens(lenses / name, layers, **changes)
    head = np.ones((1000, HIDDEN_SIZE), np.float32)
    head[:, 0] = np.arange(1000)
    fit = JacobianRecord(method="sketched", prompts=9, errors=[0.125])
    lens_files.write(lenses / "jacobian", {1: eye}, fit, lens_files.Matrix(head))
    lens_files.write(lenses / "bare", {1: eye}, fit)
    return folders


@pytest.fixture(scope="module")
def midstream(stack: Stack) -> Callable[..., str]:
    """A command of the command line, which must succeed; returns what it printed."""

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, [*words, "--url", stack.url], env={"COLUMNS": "160"})
        assert done.exit_code == 0, f"{done.output}{done.exception!r}"
        return done.stdout

    return run

"""One stack for all test files that leave it as they find it.

The engine is a fake of two ranks, and takes 10 ms for a token; callers need no key, and the
artifacts that operators install lie in three folders. A file that uses it says

    pytest_plugins = ["shared_stack"]
    pytestmark = pytest.mark.xdist_group("shared_stack")

which has all of them run in one process, and finds nothing registered when it begins.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stack import Stack
from typer.testing import CliRunner

from midstream.client import Client
from midstream.client.cli.main import app

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


@pytest.fixture(scope="module")
def folders(stack: Stack) -> dict[str, Path]:
    """Kind of artifact → the folder of those that an operator has installed."""
    return {kind: Path(stack.settings.artifacts_of(name)) for kind, name in FOLDERS.items()}


@pytest.fixture(scope="module")
def midstream(stack: Stack) -> Callable[..., str]:
    """A command of the command line, which must succeed; returns what it printed."""

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, [*words, "--url", stack.url], env={"COLUMNS": "160"})
        assert done.exit_code == 0, f"{done.output}{done.exception!r}"
        return done.stdout

    return run

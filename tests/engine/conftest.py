"""Engines that tests share: each starts once.

Others are forked from a process that imported all.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from extension_kit import install_example, install_unruly
from fidelity import nursery_for
from host import Host
from nursery import PACKAGES, Nursery
from reference import Reference
from tiny import checkpoint
from xdist.scheduler import LoadFileScheduling

#: Engines of several ranks wait for one another in loops; beside another engine each waits for the
#: other's time slice. Whatever asks for one of these is marked `ranks`, and runs alone.
RANKS = {"tp2", "pp2", "overlapped", "two_ranks"}
#: Engines of one rank that several files use.
ENGINES = {"v1", "cached", "v2", "compiled"}
#: The files that use them run in one process, one after the other, so that each of those engines
#: starts once.
SHARING = tuple(
    f"test_{name}.py"
    for name in (
        "attention",
        "block_keys",
        "capture_rows",
        "global_order",
        "graded_tokens",
        "inside",
        "installed_ops",
        "interventions",
        "lens",
        "lora",
        "modes",
        "executed",
        "features",
        "patching",
        "patching_cells",
        "prefix_cache",
        "probes",
        "non_finite",
        "rank_calls",
        "readers",
        "reentry",
        "steering_rows",
        "token_ranges",
    )
)


#: Engines of one rank that are running.
RUNNING: list[Host] = []


class FilesTogether(LoadFileScheduling):
    """Whole files go to one process, and those that share engines to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "engines" if file.endswith(SHARING) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesTogether:
    return FilesTogether(config, log)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends the shared engines when a process goes on to other files: idle ones hold 10 GB."""
    last = nextitem is None or nextitem.path.name not in SHARING
    if hasattr(item.config, "workerinput") and item.path.name in SHARING and last:
        while RUNNING:
            RUNNING.pop().close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in (item for item in items if item.path.parent == Path(__file__).parent):
        # Parameters may name the engine.
        named = (
            item.callspec.params.values()
            if isinstance(item, pytest.Function) and hasattr(item, "callspec")
            else ()
        )
        asked = {
            *getattr(item, "fixturenames", ()),
            *(name for name in named if isinstance(name, str)),
        }
        if RANKS & asked:
            item.add_marker("ranks")
        elif ENGINES & asked and item.path.name not in SHARING:
            raise pytest.UsageError(
                f"{item.path.name} uses an engine that files share: say so in SHARING ({__file__})"
            )


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("llama", tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("qwen3", tmp_path_factory.mktemp("tiny-qwen3"))


@pytest.fixture(scope="session")
def reference(llama: Path) -> Reference:
    return Reference(llama)


@pytest.fixture(scope="session")
def nurseries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Nursery]]:
    """Of each runner the process that engines are forked from: what is imported is imported
    once.
    """
    started: list[Nursery] = []

    @cache
    def nursery(runner: str) -> Nursery:
        started.append(nursery_for(runner, tmp_path_factory.mktemp(runner)))
        return started[-1]

    yield nursery
    for each in started:
        each.close()


@pytest.fixture(scope="session")
def nursery(nurseries: Callable[[str], Nursery]) -> Nursery:
    return nurseries("v1")


#: Packages that the engines load which have `with_extensions`.
EXTENSIONS = "row_geometry, unruly"


def with_extensions(site: Path, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of an engine beside which packages with readers and ops are installed; `env`:
    what it has otherwise.
    """
    install_unruly(install_example(site))
    return {**(env or {}), PACKAGES: str(site)}


@pytest.fixture(scope="session")
def v1(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """Eager, v1 runner, steps of at most 64 tokens: prompts longer than that are prefilled in
    chunks. Packages with extensions.
    """
    directory = tmp_path_factory.mktemp("v1")
    host = Host(
        directory,
        llama,
        with_extensions(tmp_path_factory.mktemp("site")),
        lens_dir=str(directory),
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        steering_rows=4,
        fault="rpc",
        hooks="all,inside",
        extensions=EXTENSIONS,
    )
    RUNNING.append(host)
    yield host
    host.close()


@pytest.fixture(scope="session")
def cached(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """Prefix cache on, and so few KV blocks that concurrent requests preempt one another."""
    host = Host(
        tmp_path_factory.mktemp("cached"),
        llama,
        with_extensions(tmp_path_factory.mktemp("site")),
        num_gpu_blocks=8,
        max_model_len=512,
        fault="rpc",
        hooks="all,inside",
        extensions=EXTENSIONS,
    )
    RUNNING.append(host)
    yield host
    host.close()


def interpreted() -> dict[str, str]:
    """Environment of an engine with the v2 runner, through Triton's interpreter: right, and
    slow.
    """
    backend = Path(__file__).with_name("triton_cpu")
    return {
        "PYTHONPATH": os.pathsep.join(
            [str(backend), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "TRITON_INTERPRET": "1",
    }


@pytest.fixture(scope="session")
def v2(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The v2 runner."""
    host = Host(
        tmp_path_factory.mktemp("v2"),
        llama,
        with_extensions(tmp_path_factory.mktemp("site"), interpreted()),
        runner="v2",
        max_num_batched_tokens=64,
        max_model_len=256,
        max_num_seqs=8,
        hooks="all,inside",
        extensions=EXTENSIONS,
    )
    RUNNING.append(host)
    yield host
    host.close()


@pytest.fixture(scope="session")
def overlapped(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The v2 runner on two pipeline stages, three steps under way, and so few KV blocks that
    requests preempt one another.
    """
    env = with_extensions(tmp_path_factory.mktemp("site"), interpreted()) | {
        "OVERLAP_STEPS": "1",
        "VLLM_LOGGING_LEVEL": "DEBUG",
    }
    host = Host(
        tmp_path_factory.mktemp("overlapped"),
        qwen3,
        env,
        runner="v2",
        pipeline_parallel_size=2,
        max_num_batched_tokens=64,
        max_model_len=256,
        max_num_seqs=8,
        block_size=32,
        num_gpu_blocks=10,
        hooks="all,inside",
        extensions=EXTENSIONS,
    )
    yield host
    host.close()


@pytest.fixture(scope="session")
def compiled(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """torch.compile (inductor on CPU), v1 runner."""
    host = Host(
        tmp_path_factory.mktemp("compiled"),
        llama,
        with_extensions(tmp_path_factory.mktemp("site")),
        enforce_eager=False,
        max_num_batched_tokens=64,
        fault="rpc",
        hooks="all,inside",
        extensions=EXTENSIONS,
    )
    RUNNING.append(host)
    yield host
    host.close()


@pytest.fixture(scope="session")
def two_ranks() -> None:
    """Asked for by whatever starts an engine of several ranks itself."""


@pytest.fixture(scope="session")
def tp2(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """Two tensor-parallel ranks; each tenant has a prefix cache of its own."""
    host = Host(
        tmp_path_factory.mktemp("tp2"),
        qwen3,
        with_extensions(tmp_path_factory.mktemp("site")),
        tensor_parallel_size=2,
        fault="rpc",
        prefix_cache_scope="tenant",
        hooks="all,inside",
        extensions=EXTENSIONS,
    )
    yield host
    host.close()


@pytest.fixture(scope="session")
def pp2(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """Two pipeline stages."""
    host = Host(
        tmp_path_factory.mktemp("pp2"),
        qwen3,
        with_extensions(tmp_path_factory.mktemp("site")),
        pipeline_parallel_size=2,
        hooks="all,inside",
        extensions=EXTENSIONS,
    )
    yield host
    host.close()

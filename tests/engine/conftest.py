"""Engines and stacks that tests share: each starts once.

Tests are grouped by what they share, and not by file. Other engines are forked from a process that
imported all.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from extension_kit import BANK, install_example, install_unruly
from host import Host, shared_nursery
from nursery import PACKAGES, Nursery
from reference import Reference
from services import PATIENT, demo_service
from stack import Stack
from tiny import checkpoint

#: Engines of several ranks wait for one another in loops; beside another engine each waits for the
#: other's time slice. Whatever asks for one of these is marked `ranks`, and runs alone.
RANKS = {"tp2", "pp2", "overlapped", "two_ranks"}
#: Fixtures that start what several files use. All tests of one run in one process, one after the
#: other, so that each starts once.
SHARED = ("compiled", "demo_stack", "tiny_stack", "v1", "cached", "v2", "tp2", "pp2", "overlapped")
#: Engines whose tests are `long`, but for those of `test_modes.py`: others say the same there. To
#: compile takes minutes on a slow core: those are `long` there, too.
SLOW = {"compiled", "v2", "tp2", "pp2", "overlapped"}
#: Groups that take longest, in the order in which they begin, so that no process is left with one
#: at the end; files of engines of their own among them.
LONGEST = (
    "compiled",
    "demo_stack",
    "tiny_stack",
    "test_mixed_traffic.py",
    "test_certificate.py",
    "test_fidelity.py",
    "test_steering_service.py",
    "test_worker_processes.py",
    "v1",
    "test_real_model.py",
    "cached",
    "v2",
)

#: What ends the shared engines and stacks that are running.
RUNNING: list[Callable[[], None]] = []


def asked_of(item: pytest.Item) -> set[str]:
    """Names of fixtures that `item` uses, by argument or as a value of a parameter."""
    parameters = getattr(item, "callspec", None)
    values = parameters.params.values() if parameters else ()
    return {*getattr(item, "fixturenames", ()), *(value for value in values if type(value) is str)}


def group_of(item: pytest.Item) -> str:
    """What all tests have in common that run in the same process as `item`."""
    asked = asked_of(item)
    return next((name for name in SHARED if name in asked), item.path.name)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests of this folder, the longest group first.

    pytest calls this before that of `tests/conftest.py`, which keeps the order within a folder.
    """
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    for item in here:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))
        if asked_of(item) & RANKS:
            item.add_marker("ranks")
        if "compiled" in asked_of(item):  # ten minutes where eight processes wait for each core
            item.add_marker(pytest.mark.timeout(1800))
            item.add_marker("long")
        if asked_of(item) & SLOW and item.path.name != "test_modes.py":
            item.add_marker("long")
    order = [*LONGEST, *dict.fromkeys(group_of(item) for item in here)]
    here.sort(key=lambda item: order.index(group_of(item)))
    items[:] = [*[item for item in items if item.path.parent != Path(__file__).parent], *here]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends what was shared when a process goes on to other tests: idle engines hold 10 GB."""
    if nextitem is None or group_of(nextitem) != group_of(item):
        end_shared()


def end_shared() -> None:
    while RUNNING:
        RUNNING.pop()()


def shared(host: Host) -> Iterator[Host]:
    """The value of a fixture: an engine that ends when the last test that uses it is over."""
    RUNNING.append(host.close)
    yield host
    end_shared()


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
def nurseries() -> Callable[[str], Nursery]:
    """Of each runner the process that engines are forked from: what is imported is imported
    once.
    """
    return lambda runner: shared_nursery(interpreted() if runner == "v2" else {})


@pytest.fixture(scope="session")
def nursery(nurseries: Callable[[str], Nursery]) -> Nursery:
    return nurseries("v1")


#: Packages that the engines load which have `with_extensions`.
EXTENSIONS = "row_geometry, midstream-bank, unruly"


def with_extensions(site: Path, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of an engine beside which packages with readers and ops are installed; `env`:
    what it has otherwise.
    """
    install_unruly(install_example(install_example(site), BANK))
    return {**(env or {}), PACKAGES: str(site)}


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


def engine(model: str, env: Mapping[str, str] | None = None, **options: Any) -> Any:
    """Return a fixture: an engine of the model of another fixture, with packages of extensions."""

    @pytest.fixture(scope="session")
    def started(
        request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Host]:
        folder = tmp_path_factory.mktemp(str(request.fixturename))
        yield from shared(
            Host(
                folder,
                request.getfixturevalue(model),
                with_extensions(tmp_path_factory.mktemp("site"), env),
                artifacts_dir=str(folder),
                hooks="all,inside",
                extensions=EXTENSIONS,
                **options,
            )
        )

    return started


#: Eager, v1 runner, steps of at most 64 tokens: prompts longer than that are prefilled in chunks.
v1 = engine(
    "llama",
    **{"engine.max_num_batched_tokens": 64, "engine.enable_prefix_caching": False},
    **{"tuning.steering_rows": 4},
    fault="rpc",
)
#: Prefix cache on, and so few KV blocks that concurrent requests preempt one another.
cached = engine(
    "llama", **{"engine.num_gpu_blocks_override": 8, "engine.max_model_len": 512}, fault="rpc"
)
#: torch.compile (inductor on CPU), v1 runner.
compiled = engine(
    "llama", **{"engine.enforce_eager": False, "engine.max_num_batched_tokens": 64}, fault="rpc"
)
#: The v2 runner.
_V2: dict[str, Any] = {
    "runner": "v2",
    "engine.max_num_batched_tokens": 64,
    "engine.max_model_len": 256,
    "engine.max_num_seqs": 8,
}
v2 = engine("llama", interpreted(), **_V2)
#: The v2 runner on two pipeline stages, three steps under way, and so few KV blocks that requests
#: preempt one another.
overlapped = engine(
    "qwen3",
    interpreted() | {"OVERLAP_STEPS": "1", "VLLM_LOGGING_LEVEL": "DEBUG"},
    **{
        "engine.pipeline_parallel_size": 2,
        "engine.block_size": 32,
        "engine.num_gpu_blocks_override": 10,
    },
    **_V2,
)
#: Two tensor-parallel ranks; each tenant has a prefix cache of its own.
tp2 = engine(
    "qwen3", **{"engine.tensor_parallel_size": 2}, fault="rpc", prefix_cache_scope="tenant"
)
#: Two pipeline stages.
pp2 = engine("qwen3", **{"engine.pipeline_parallel_size": 2})


@pytest.fixture(scope="session")
def two_ranks() -> None:
    """Asked for by whatever starts an engine of several ranks itself."""


def running(stack: Stack) -> Iterator[Stack]:
    """The value of a fixture: a service that stops when the last test that uses it is over."""
    RUNNING.append(stack.start().stop)
    yield stack
    end_shared()


@pytest.fixture(scope="session")
def demo_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The service with the demo model, `demo`, in fp32."""
    yield from running(demo_service(tmp_path_factory.mktemp("demo-stack")))


@pytest.fixture(scope="session")
def tiny_stack(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The service with the tiny Llama, `tiny`, adapters, and a worker for gradients that soon lets
    its model go.
    """
    folder = tmp_path_factory.mktemp("tiny-stack")
    engine = {
        "engine": "vllm",
        "model": str(shutil.copytree(llama, folder / "tiny")),
        "model_name": "tiny",
        "engine.dtype": "float32",
        "engine.max_model_len": 512,
        "kv_cache_gib": 0.25,
        "hooks": "all,inside",
    }
    loras = {
        "artifacts_dir": str(folder),
        "engine.max_loras": 2,
        "engine.max_lora_rank": 16,
    }
    (folder / "loras").mkdir()
    stack = Stack(
        folder / "data", api=True, **{"tuning.gradients_idle_s": 3.0}, **engine, **loras, **PATIENT
    )
    for each in running(stack):
        each.spawn("worker-gradients", engine="gradients")
        each.wait_log("worker-gradients", "worker ready")
        yield each

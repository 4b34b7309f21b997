"""Chooses which tests run and in which order, and marks each with its folder and its set.

A plugin of pytest: the tests of packages are chosen in the same way.
"""

import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import redis_servers
from _pytest.nodeid import coerce_node_id
from durations import Durations, read, tree
from hypothesis import HealthCheck, settings
from midstream_fake_engine import install

# The processes that share the tests among them are told that their terminal has 80 columns; tests
# say how many they want.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)

install()  # the processes of all tests
if _server := os.environ.get("REDIS_SERVER"):
    redis_servers.use(_server)

# The same examples every time, however long one takes: neither a rare draw nor a machine that
# stalls for a fifth of a second fails a run at random. `--hypothesis-profile default
# --hypothesis-seed random` draws others, to look for rare cases on purpose.
settings.register_profile(
    "repeatable",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

TESTS = Path(__file__).parent
PACKAGES = TESTS.parent / "packages"
#: Files that take minutes. Processes that share the tests begin with these, in this order, so that
#: none is left with one at the end.
LONGEST = (
    "test_site_triton.py",
    "test_site_reference.py",
    "test_harvest_kills.py",
    "test_fault_gate.py",
    "test_up.py",
    "test_worker_faults.py",
    "test_api_faults.py",
    "test_client.py",
    "test_redis_users.py",
    "test_schemathesis.py",
    "test_gpu_bench.py",
    "test_docs_pages.py",
    "test_attack.py",
    "test_train_sae.py",
    "test_hooked_model.py",
    "test_wheel.py",
    "test_openai.py",
    "test_inspect.py",
)
#: A test is in one of these → the folders whose tests of the set are run: by `make test`; by
#: `make test-long`, of which CI runs one share at a time; by `make test-matrix` and other targets
#: that are started by hand.
SETS = {
    "fast": ("unit", "system", "web", "engine"),
    "long": ("unit", "system", "web", "engine", "long", "machines"),
    "matrix": ("unit", "system", "web", "engine", "long", "faults"),
}
SHARES = 7
#: The git tree that is tested, and the tests that need not run again.
TREE = pytest.StashKey[str]()
DONE = pytest.StashKey[frozenset[str]]()
#: Folders in the order in which they run.
STAGES = ("unit", "system", "web", "engine", "faults", "long", "machines")


def stage_of(path: Path) -> str:
    """The folder under `tests/`, or under the `tests/` of a package, that `path` lies in.

    Raises ValueError for a test outside of the known ones.
    """
    if path.is_relative_to(PACKAGES):
        _, tests, stage, *_ = path.relative_to(PACKAGES).parts
    else:
        tests = TESTS.name
        stage = path.relative_to(TESTS).parts[0]
    if tests != TESTS.name or stage not in STAGES:
        raise ValueError(f"{path} lies in none of {', '.join(f'tests/{name}' for name in STAGES)}")
    return stage


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """What runs the `async def` tests: the loop that the product runs on."""
    return "asyncio"


@pytest.hookimpl(tryfirst=True)
def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Dir | None:
    """Have the repository be a folder: as a package, it would be imported under the folder's name,
    which need not be one of Python.
    """
    return pytest.Dir.from_parent(parent, path=path) if path == TESTS.parent else None


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("midstream")
    group.addoption("--set", choices=list(SETS), help="only the tests of this set")
    group.addoption(
        "--share", type=int, help=f"of these only one in {SHARES}; which one follows the number"
    )
    group.addoption(
        "--resume", action="store_true", help="without the tests that have passed on this tree"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    worker = getattr(config, "workerinput", None)
    now = worker["tree"] if worker else tree()
    done = worker["done"] if worker else []
    if not worker and config.getoption("resume") and now:
        passed = {"tree": now, "outcome": "passed"}
        done = [name for name, test in read().items() if test.items() >= passed.items()]
    config.stash[TREE] = now
    config.stash[DONE] = frozenset(done)
    config.pluginmanager.register(Durations(now, bounded=config.getoption("set") == "fast"))


def pytest_configure_node(node: Any) -> None:
    """Have all test processes of a run choose alike."""
    node.workerinput["tree"] = node.config.stash[TREE]
    node.workerinput["done"] = list(node.config.stash[DONE])


def set_of(item: pytest.Item) -> str:
    """The set that `item` is in, by its folder and its marks."""
    marks = {mark.name for mark in item.iter_markers()}
    stage = stage_of(item.path)
    if marks & {"matrix", "packages"} or stage == "faults":
        return "matrix"
    if (
        "long" in marks
        or stage in ("long", "machines")
        or (stage == "web" and "smoke" not in marks)
    ):
        return "long"
    return "fast"


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        stage = stage_of(item.path)
        item.add_marker(stage)
        chosen_set = set_of(item)
        if stage not in SETS[chosen_set]:
            raise pytest.UsageError(f"{item.nodeid}: no target runs {chosen_set} tests of {stage}")
        item.add_marker(chosen_set)
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.name))

    def chosen(item: pytest.Item) -> bool:
        asked = config.getoption("set")
        share = config.getoption("share")
        return (
            item.nodeid not in config.stash[DONE]
            and (asked is None or set_of(item) == asked)
            and (share is None or zlib.crc32(item.nodeid.encode()) % SHARES == share % SHARES)
        )

    def turn(item: pytest.Item) -> tuple[int, int]:
        name = item.path.name
        return (
            (-1, LONGEST.index(name)) if name in LONGEST else (STAGES.index(stage_of(item.path)), 0)
        )

    config.hook.pytest_deselected(items=[item for item in items if not chosen(item)])
    items[:] = sorted(filter(chosen, items), key=turn)
    if getattr(config.option, "loadgroup", False):
        # The scheduler of xdist 3.8 reads an item's group behind the `@` of its id. xdist writes it
        # to an attribute that pytest 9.2 no longer has.
        for item in items:
            (group,) = (mark.args[0] for mark in item.iter_markers("xdist_group"))
            item._id = coerce_node_id(f"{item.nodeid}@{group}")  # type: ignore[attr-defined]
            assert item.nodeid.endswith(f"@{group}"), "pytest keeps ids elsewhere now"

"""Do the folders import only what lies below them, and does the tree hold only what belongs there?

(design: arrows go down)
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from tree import CORE, ROOT, TYPED, imports_of, module_name, product, sources, tracked

#: Folder → our folders it may import.
ALLOWED: dict[str, set[str]] = {
    "schemas": set(),
    "kernels": {"schemas"},
    # artifacts are written and deleted by the service, and read by the client too
    "storage": {"schemas"},
    "broker": {"schemas", "storage"},
    "workers": {"broker", "kernels", "schemas", "storage"},
    "api": {"broker", "schemas", "storage"},
    "client": {"schemas", "storage"},
}
#: Modules of the client that may reach further, inside functions only: the first key of a service
#: is written without it.
STARTERS = {"client/cli/keys.py"}
STARTERS_MAY = {"broker", "workers"}

#: Folder → its rooms (and the modules beside them) from top to bottom, those of one line side by
#: side. Each may import what stands below it, in any way: at its top, inside functions, or for
#: types.
ROOMS: dict[str, tuple[str, ...]] = {
    "broker": (
        "callbacks health relay",
        "receipts",
        "ledger",
        "queue artifacts prompts",
        "redis_service telemetry",
        "processes",
    ),
    "api": (
        "__main__",
        "app",
        "openapi",
        "routes",
        "responses",
        "context",
        "resolve operations",
        "web",
    ),
    "client": (
        "__main__",
        "cli",
        "render",
        "sdk",
        "captures vectors",
        "values texts",
        "notebook durations extras frames images",
    ),
    "workers": (
        "__main__ remote",
        "app",
        "serving",
        "remote_control",
        "engines",
        "engine",
        "runner",
    ),
    "schemas": (
        "packages",
        "service",
        "jobs",
        "extensions",
        "requests",
        "readings",
        "artifacts",
        "model",
        "prompts",
        "access settings packages",
        "base",
    ),
    "api/resolve": ("admission", "readings", "edits", "positions", "prompts"),
    "broker/ledger": ("recovery", "people named", "jobs", "results", "core"),
    "workers/engine": (
        "headless",
        "vllm",
        "proof vllm_output model_identity checkpoint_check",
        "options ranks requests prompts",
        "dtype no_torchvision admission identity protocol early_core start_times",
    ),
    "workers/runner": (
        "vllm",
        "certificate",
        "plane",
        "rows",
        "probes",
        "edits readings",
        "support",
        "hooks files",
        "base",
    ),
}

#: Files of ranks that import the broker, and which of its rooms: what starts a process, and gives
#: the one that writes files its outbox. All others know an outbox by its protocol.
OF_RANKS = {
    "workers/runner/files/__main__.py": {"processes", "receipts", "telemetry"},
    "workers/runner/support/engine_process.py": {"processes"},
    "workers/runner/vllm/scheduler.py": {"processes"},
    "workers/runner/vllm/worker_class.py": {"processes", "telemetry"},
}

#: Package → the folders (or single modules) that may import it at all.
OWNERS: dict[str, set[str]] = {
    "litestar": {"api"},
    "uvicorn": {"api"},
    "vllm": {"workers"},
    "torch": {"workers", "kernels"},
    "triton": {"kernels", "workers"},
    "transformers": {"workers"},
    "celery": {"broker", "workers"},
    "kombu": {"broker", "workers"},
    "zmq": {"broker"},
}
#: Formats that run code when they are read. Torch's own reader is among them.
CODE_CARRIERS = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
}

TOP_LEVEL = {
    ".github",
    "CITATION.cff",
    "SECURITY.md",
    *CORE,
    "packages",
    "tests",
    "tools",
    "benchmarks",
    "examples",
    "docs",
    "requirements",
    ".ci",
    "__init__.py",
    "lens.py",
    "py.typed",
    "pyproject.toml",
    "setup.py",
    "Makefile",
    "README.md",
    "PACKAGE.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "CHANGELOG.md",
    ".gitignore",
    ".git-blame-ignore-revs",
    "compose.yaml",
    "compose",
    "deploy",
    "Dockerfile",
    ".dockerignore",
    ".env.example",
}


@pytest.mark.parametrize("folder", CORE)
def test_a_folder_imports_only_folders_below_it(folder: str) -> None:
    wrong = []
    for path in sources(folder):
        name = str(path.relative_to(ROOT))
        for found in imports_of(path):
            parts = found.module.split(".")
            if parts[0] != "midstream" or len(parts) < 2 or parts[1] not in CORE or found.typing:
                continue
            may = (
                ALLOWED[folder]
                | {folder}
                | (STARTERS_MAY if name in STARTERS and found.lazy else set())
            )
            if parts[1] not in may:
                wrong.append(f"{found.where} imports {found.module}")
    assert wrong == []


def room_of(module: str, folder: str) -> str:
    """`midstream.broker.ledger.jobs.watch` in `broker` → `ledger`, in `broker/ledger` → `jobs`."""
    return module.split(".")[folder.count("/") + 2]


@pytest.mark.parametrize("folder", ROOMS)
def test_a_room_imports_only_rooms_below_it(folder: str) -> None:
    level = {room: depth for depth, line in enumerate(ROOMS[folder]) for room in line.split()}
    prefix = f"midstream.{folder.replace('/', '.')}."
    wrong = []
    for path in sources(*CORE):
        name = module_name(path)
        if not name.startswith(prefix):
            continue  # also the folder itself: names that are loaded when they are asked for
        for found in imports_of(path):
            if not found.module.startswith(prefix):
                continue
            here = room_of(name, folder)
            there = room_of(found.module, folder)
            if here != there and level[here] >= level[there]:
                wrong.append(f"{found.where} imports {found.module}")
    assert wrong == []


def test_ranks_import_the_broker_only_where_a_process_starts() -> None:
    found: dict[str, set[str]] = {}
    for path in sources("workers"):
        for imported in imports_of(path):
            if path.is_relative_to(ROOT / "workers/runner") and imported.module.startswith(
                "midstream.broker."
            ):
                rooms = found.setdefault(str(path.relative_to(ROOT)), set())
                rooms.add(room_of(imported.module, "broker"))
    assert found == OF_RANKS


def test_no_folder_of_product_code_has_more_than_25_files() -> None:
    sizes = Counter(path.parent.relative_to(ROOT) for path in product())
    assert {str(folder): size for folder, size in sizes.items() if size > 25} == {}


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {module_name(path): path for path in product() if path != ROOT / TYPED}
    below: dict[str, set[str]] = {}
    for name, path in modules.items():
        if path.name != "__init__.py":
            found = {imported.module for imported in imports_of(path)}
            below[name] = (found | {module.rpartition(".")[0] for module in found}) & modules.keys()
    list(TopologicalSorter(below).static_order())  # raises CycleError, which names the circle


def test_inside_a_package_its_own_imports_are_relative() -> None:
    wrong = []
    for path in product():
        own = module_name(path).partition(".")[0]
        for node in ast.walk(ast.parse(path.read_text())):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                named = [node.module or ""]
            if own in {name.partition(".")[0] for name in named}:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert wrong == []


@pytest.mark.parametrize("package", OWNERS)
def test_a_heavy_package_is_imported_only_by_its_owners(package: str) -> None:
    wrong = []
    for path in sources(*CORE):
        name = str(path.relative_to(ROOT))
        for found in imports_of(path):
            if found.module.split(".")[0] != package:
                continue
            if not ({name, name.split("/")[0]} & OWNERS[package]):
                wrong.append(f"{found.where} imports {found.module}")
    assert wrong == []


# field case 42
def test_no_module_imports_pickle_or_its_kin() -> None:
    wrong = [
        f"{found.where} imports {found.module}"
        for path in sources(*CORE, "packages", "tests", "tools", "benchmarks", "examples")
        for found in imports_of(path)
        if found.module.split(".")[0] in CODE_CARRIERS or found.module.startswith("torch.load")
    ]
    assert wrong == []


# field case 42
def test_no_code_calls_eval_or_unsafe_loaders() -> None:
    forbidden = re.compile(
        r"(torch|joblib)\.(load|save)|(np|numpy)\.load|eval|exec|yaml\.(unsafe_|full_)?load"
    )
    wrong = []
    for path in product():
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name | ast.Attribute)
                and forbidden.fullmatch(ast.unparse(node.func))
                and not any(
                    keyword.arg == "allow_pickle" and ast.unparse(keyword.value) == "False"
                    for keyword in node.keywords
                )
            ):
                wrong.append(
                    f"{path.relative_to(ROOT)}:{node.lineno} calls {ast.unparse(node.func)}"
                )
            if (
                isinstance(node, ast.keyword)
                and node.arg == "allow_pickle"
                and ast.unparse(node.value) != "False"
            ):
                wrong.append(f"{path.relative_to(ROOT)}:{node.value.lineno} allows pickle")
            if isinstance(node, ast.Constant) and node.value in CODE_CARRIERS:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} names {node.value}")
    assert wrong == []


#: What must not be loaded by importing every module of a package, however deep the import goes.
EDGE = {"torch", "vllm", "transformers", "litestar", "celery", "zmq", "redis"}
LIGHT = {
    "schemas": EDGE,
    "storage": EDGE,
    "client": EDGE,
    "broker": {"torch", "vllm", "transformers", "litestar"},
    "api": {"torch", "vllm", "transformers"},
}


@pytest.mark.parametrize("package", LIGHT)
def test_importing_every_module_of_a_light_package_loads_nothing_heavy(package: str) -> None:
    modules = [module_name(path) for path in sources(package) if path.name != "__main__.py"]
    assert loaded_by(modules) & LIGHT[package] == set()


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        (["midstream.workers"], {"litestar", "uvicorn", "vllm"}),
        # a second of a core for each of the hundred workers of the system tests
        (
            ["midstream.workers.app", "midstream_fake_engine.engine"],
            {"torch", "vllm", "transformers"},
        ),
    ],
    ids=["tasks", "fake engine"],
)
def test_a_worker_does_not_load_what_it_does_not_run(modules: list[str], heavy: set[str]) -> None:
    assert loaded_by(modules) & heavy == set()


def loaded_by(modules: list[str]) -> set[str]:
    """Top-level packages in `sys.modules` after a fresh interpreter imported `modules`."""
    program = (
        f"import sys\nfor name in {modules!r}: "
        f"__import__(name)\nprint(*sorted({{name.split('.')[0] for name in "
        f"sys.modules}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return set(done.stdout.split())


def test_the_top_level_holds_only_agreed_entries() -> None:
    assert {path.parts[0] for path in tracked()} - TOP_LEVEL == set()


def test_every_folder_of_the_package_is_packaged() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    folders = {module_name(path.parent / "__init__.py") for path in sources(*CORE)}
    assert set(tool["setuptools"]["packages"]) == folders | {"midstream"}


#: Hosts that serve packages, and folders that exist on one machine only. In pieces, so that this
#: file names none either.
FOREIGN = re.compile(
    "|".join(
        [
            r"pypi" + r"\.org",
            r"python" + r"hosted",
            r"download\.py" + r"torch",
            r"(?<![\w.}/])/(?:work|home|root|Users|tmp/w)" + r"/",
            r"/opt/(?:py" + r"pi|wheels)",
        ]
    )
)


def test_no_file_names_a_package_registry_or_a_path_of_one_machine() -> None:
    wrong = []
    for path in tracked():
        raw = (ROOT / path).read_bytes()
        if path == Path("benchmarks/data/bench_prompts.json") or b"\0" in raw:
            continue
        for number, line in enumerate(raw.decode().splitlines(), 1):
            if found := FOREIGN.search(line):
                wrong.append(f"{path}:{number}: {found.group()}")
    assert wrong == []


def test_no_file_is_larger_than_a_source_file_should_be() -> None:
    limit = 1_000_000  # bytes: data sets and checkpoints do not belong in the tree
    assert [str(path) for path in tracked() if (ROOT / path).stat().st_size > limit] == []


def test_a_docstring_begins_with_a_statement() -> None:
    """The first sentence of a module, class or function says what it is; a question leaves the
    reader to find the answer.
    """
    described = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    wrong = [
        f"{path.relative_to(ROOT)}:{node.body[0].lineno}: {first}"
        for path in product()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, described)
        and (first := (ast.get_docstring(node) or "").partition("\n")[0])
        if "?" in first.partition(". ")[0]
    ]
    assert wrong == []


def test_names_of_tests_fit_in_eighty_characters() -> None:
    texts = [path.read_text() for path in sources("tests", "packages")]
    assert [name for text in texts for name in re.findall(r"def (test_\w{76,})\(", text)] == []


def test_the_working_directory_does_not_expose_our_packages_under_other_names() -> None:
    """transformers imports `kernels` where it finds one; our ops must not be registered by that,
    nor twice.
    """
    script = (
        "import kernels, torch; assert not hasattr(torch.ops.midstream, 'pair_site'); "
        "import midstream.kernels as ours; ours.pair_site"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr

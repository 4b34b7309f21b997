"""Capture files are opened by the artifact store alone: every other module that touches files is
listed with what it opens.
"""

import ast
import re
import sys

import pytest
from tree import PACKAGES, ROOT, sources

from midstream.storage.store import open_store

#: Module → the files that it opens instead. A module that opens capture files belongs into
#: `storage/`.
OPENS: dict[str, str] = {
    "api/routes/pages.py": "assets of the package",
    "api/web/body.py": "the folder of spooled request bodies",
    "broker/flower.py": "the data directory",
    "broker/health.py": "the note of why a process failed",
    "broker/ledger/core/scripts.py": "Lua scripts",
    "broker/ops/acl.py": "Redis ACL files",
    "broker/ops/aof_repair.py": "Redis AOF files",
    "broker/ops/install.py": "the data directory",
    "broker/ops/private_files.py": "secrets",
    "broker/ops/redis_server.py": "Redis files",
    "broker/receipts/curve.py": "CURVE keys",
    "broker/receipts/outbox_store.py": "the outbox",
    "broker/webhooks/outbox.py": "Lua scripts",
    "broker/webhooks/secrets.py": "Lua scripts",
    "broker/webhooks/sender.py": "a test's clock",
    "client/captures/export.py": "the user's export",
    "client/cli/demo.py": "the demo's folder and figure",
    "client/cli/jobs.py": "the user's request",
    "client/cli/options.py": "the user's vectors, options, corpora and requests",
    "client/cli/probes.py": "the user's examples and weights",
    "client/cli/verify.py": "the stack of a verification, in a folder of its own",
    "client/cli/stack.py": "logs; sizes of all parts of the data directory",
    "client/harvest/exports.py": "the user's export",
    "client/images.py": "the user's images",
    "client/sdk/bridge.py": "the folder of a trainer",
    "client/sdk/captures.py": "no file itself: its call `open`",
    "client/sdk/discovery.py": "/proc, and the state of a stack",
    "client/sdk/answers/download.py": "the user's copies of capture files",
    "client/sdk/mapping/cache.py": "the user's cache of `map`",
    "client/sdk/readings.py": "no file itself: the call `captures.open`",
    "client/sdk/wire.py": "the user's key file",
    "client/stack/checks/disk_checks.py": "a file without a name, to time the disk",
    "client/stack/plan.py": "a checkpoint's config.json",
    "client/stack/processes.py": "/proc and logs",
    "client/stack/measurements/facts.py": "/proc",
    "client/stack/supervisor.py": "the lock and state of a stack",
    "client/study/patch_study.py": "the user's study",
    "client/vectors/arrays.py": "members of the user's archives, in memory",
    "client/vectors/files.py": "the user's vectors",
    "client/vectors/jacobian.py": "the user's file of a lens",
    "schemas/base/faults.py": "notes of crash points",
    "schemas/base/instance.py": "/proc",
    "schemas/base/settings.py": "settings and secrets",
    "workers/app.py": "the note of why a worker failed",
    "workers/demo_model.py": "the demo model",
    "workers/gradient_jobs/fit_attempt.py": "the folder of a lens that is not registered",
    "workers/engine/proof/certificate.py": "certificates",
    "workers/engine/checkpoint.py": "the config and the names of the weights of a checkpoint",
    "workers/engine/identity.py": "the lock of a worker id",
    "workers/engine/prompts/images.py": "a request's images, in memory",
    "workers/engine/model_identity.py": (
        "a checkpoint's files, and their digests in the data directory"
    ),
    "workers/engine/dtype.py": "/proc",
    "workers/engine/proof/reference.py": "/proc and the container's memory",
    "workers/engine/options/engine_arguments.py": "vLLM's logging options",
    "workers/runner/support/build_errors.py": "the note of why a rank could not build the model",
    "workers/runner/base/config.py": "the code of the sites",
    "workers/runner/base/extensions.py": "the code of extensions",
    "workers/runner/base/host_memory.py": "memory without a file",
    "workers/runner/plane/loras.py": "copies of LoRA adapters",
    "workers/runner/base/process.py": "/proc",
    "workers/runner/support/quantisation.py": "a checkpoint's files",
    "workers/runner/rows/slabs.py": "rows that wait on the disk before they are captures",
    "workers/runner/support/replacements.py": "our own source",
    "workers/runner/support/vllm_source.py": "vLLM's source",
    "workers/serving/harvest_process.py": "/proc",
}
#: Modules that name the artifact store, or the capture root, without opening a store: to show it,
#: or to hand it to a rank.
NAMES = {
    "api/operations/service_figures.py",
    "broker/artifacts/corpora.py",
    "broker/ledger/results/views.py",
    "client/cli/demo.py",
    "client/stack/checks/disk_checks.py",
    "schemas/base/settings.py",
    "workers/engine/nodes.py",
    "workers/engine/vllm.py",
}
#: Methods of our own that are called like those of paths.
OTHERS = {
    "ast.walk",
    "span.rename",
    "self._gate.open",
    "store.open",
    "self._store.open",
    "place.store.open",
}

_FUNCTIONS = re.compile(
    r"open|io\.open|mmap\.mmap|shutil\.(rmtree|move|copy\w*)|tempfile\.\w*File"
    r"|os\.(open|rename|renames|replace|unlink|remove|removedirs|rmdir|mkdir|makedirs|scandir|listdir|walk|link|symlink|truncate)"
)
_METHODS = {
    "open",
    "read_bytes",
    "read_text",
    "write_bytes",
    "write_text",
    "unlink",
    "rename",
    "iterdir",
    "glob",
    "rglob",
    "walk",
    "mkdir",
    "rmdir",
    "hardlink_to",
    "symlink_to",
}


def opened(module: str) -> list[str]:
    """Calls in a module that open, list, rename or remove files, as `line: call`; those of an
    artifact store left out.
    """
    found = []
    for node in ast.walk(ast.parse((ROOT / module).read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            method = (
                isinstance(node.func, ast.Attribute)
                and node.func.attr in _METHODS
                and called not in OTHERS
            )
            if _FUNCTIONS.fullmatch(called) or method:
                found.append(f"{module}:{node.lineno}: {called}")
    return found


MODULES = [
    name
    for path in sources(*PACKAGES)
    if not (name := str(path.relative_to(ROOT))).startswith("storage/")
]


def test_only_listed_modules_open_files() -> None:
    found = {module: opened(module) for module in MODULES}
    assert [call for module in found.keys() - OPENS.keys() for call in found[module]] == []
    assert [module for module in OPENS if not found[module]] == [], "listed, and opens nothing"


def test_the_capture_root_is_only_handed_to_open_store() -> None:
    naming = set()
    for module in MODULES:
        nodes = list(ast.walk(ast.parse((ROOT / module).read_text())))
        stores = [
            node.args[0]
            for node in nodes
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "open_store"
        ]
        if any(
            isinstance(node, ast.Attribute)
            and node.attr in ("artifacts", "capture_root")
            and node not in stores
            for node in nodes
        ):
            naming.add(module)
    assert naming == NAMES


def test_a_store_of_an_unknown_scheme_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no artifact store for gs://; valid: a folder"):
        open_store("gs://bucket")


def test_a_store_whose_package_is_missing_is_refused_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    for name in ("s3_store", "s3_client"):
        monkeypatch.delitem(sys.modules, f"midstream.storage.{name}", raising=False)
    with pytest.raises(
        ValueError, match=r"s3:// needs the package obstore: pip install 'midstream\[s3\]'"
    ):
        open_store("s3://bucket/never-opened-before")


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("s3://", "names a bucket"),
        ("s3://key:secret@bucket", "no credentials"),
        ("s3://bucket?secret=x", "secret: unknown option"),
    ],
)
def test_a_bucket_is_named_without_credentials(uri: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        open_store(uri)
    assert "key:secret" not in str(caught.value)


def test_the_uri_of_a_store_opens_the_same_store() -> None:
    assert open_store("/data/cap tures") == open_store("file:///data/cap%20tures")
    store = open_store("s3://bucket/a/b/?region=eu-central-1&endpoint=http://minio:9000")
    assert store == open_store(store.uri)
    assert store.link("tag/x") == "s3://bucket/a/b/tag/x"

"""Capture files are opened by the artifact store alone, and a store by its URI."""

import ast
import sys

import pytest
from tree import PACKAGES, ROOT, sources

from midstream.storage.store import open_store

#: Modules that name the artifact store, or the capture root, without opening a store: to show it,
#: or to hand it to a rank.
NAMES = {
    "api/operations/service_figures.py",
    "broker/artifacts/corpora.py",
    "broker/ledger/results/views.py",
    "client/cli/demo.py",
    "client/stack/checks/disk_checks.py",
    "schemas/settings/settings.py",
    "workers/engine/vllm.py",
}


SOURCES = [str(path.relative_to(ROOT)) for path in sources(*PACKAGES)]
MODULES = [name for name in SOURCES if not name.startswith("storage/")]


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

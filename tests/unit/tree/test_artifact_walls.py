"""Capture files are opened by the artifact store alone, and a store by its URI."""

import ast
from importlib.metadata import EntryPoint, EntryPoints

import pytest
from tree import CORE, ROOT, sources

from midstream.schemas import packages
from midstream.storage.store import STORES, open_store

#: Modules that name the artifact store, or the capture root, without opening it: to show it, to
#: hand it to a rank, or to open a store inside.
NAMES = {
    "broker/ledger/jobs/inputs.py",
    "broker/ledger/results/views.py",
    "schemas/settings/settings.py",
    "workers/engine/vllm.py",
}


SOURCES = [str(path.relative_to(ROOT)) for path in sources(*CORE)]
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


def offer(monkeypatch: pytest.MonkeyPatch, *offers: EntryPoint) -> None:
    """Have these entry points alone installed."""
    found = EntryPoints(offers)
    monkeypatch.setattr(packages, "entry_points", lambda **asked: found.select(**asked))


@pytest.mark.parametrize(
    ("offers", "said"),
    [
        ([], r"s3:// needs the package midstream-s3: pip install 'midstream\[s3\]'"),
        (
            [EntryPoint("s3", "midstream_no_such_module:open_store", STORES)],
            r"needs the package midstream_no_such_module: pip install 'midstream\[s3\]'",
        ),
    ],
    ids=["its package", "what its package needs"],
)
def test_a_store_whose_package_is_missing_is_refused_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, offers: list[EntryPoint], said: str
) -> None:
    offer(monkeypatch, *offers)
    with pytest.raises(ValueError, match=said):
        open_store("s3://bucket/never-opened-before")


def test_a_store_of_another_package_is_found_by_its_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, EntryPoint("kept", "urllib.parse:urlsplit", STORES))
    assert open_store("kept://here/lab") == ("kept", "here", "/lab", "", "")


def test_the_uri_of_a_folder_opens_the_same_store() -> None:
    assert open_store("/data/cap tures") == open_store("file:///data/cap%20tures")

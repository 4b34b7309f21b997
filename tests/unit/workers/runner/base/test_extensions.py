"""Extensions: what is found, what is trusted, what is refused at the start, and what a request may
ask of them.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from extension_kit import EXAMPLE, install, install_example, install_unruly
from refusal_kit import refuses

from midstream import __version__
from midstream.api.resolve.positions.captures import Bounds, PromptFacts, resolve_captures
from midstream.api.resolve.prompts.request_parsing import parse_job
from midstream.api.resolve.readings.readings import resolve_readings
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.extensions import Extension, Option, Rows
from midstream.schemas.jobs.jobs import JobRequest
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.model.banks import RowShape
from midstream.schemas.readings.installed import ReaderSpec, StoredReader
from midstream.schemas.requests.specs import StoredCapture
from midstream.schemas.settings.settings import SettingsError
from midstream.workers.runner.base.extensions import (
    ExtensionError,
    agreed,
    check_installed,
    digest,
    named,
    offered,
    trusted,
)
from midstream.workers.runner.readings.installed_readers import LoadedReader, load_readers

HIDDEN = 8
LAYERS = 4
Site = Callable[..., None]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on `sys.path` with the example and a package that nobody trusts."""
    folder = tmp_path / "site"
    install_unruly(install_example(folder))
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for module in [
        name
        for name in sys.modules
        if name.partition(".")[0] in ("row_geometry", "unruly", "other")
    ]:
        del sys.modules[module]


def loaded(*packages: str) -> dict[str, LoadedReader]:
    return load_readers(trusted(packages), HIDDEN, LAYERS, ["pre_attn", "post_block"])


def other(site: Path, body: str, name: str = "other", entry: str = "other:Other") -> None:
    source = (
        "import sys, time\nimport numpy as np\nfrom midstream.schemas.extensions "
        f"import Option\n{body}"
    )
    install(site, name, "2.0", {"other.py": source}, f"[midstream.readers]\nother = {entry}\n")


# --- Found, trusted, loaded
# -----------------------------------------------------------------------------------------------


def test_only_packages_that_are_named_are_imported(site: Path) -> None:
    assert {offer.package for offer in offered()} >= {"row-geometry", "unruly"}
    assert loaded() == {}
    assert list(loaded(*named("Row_Geometry"))) == ["row-geometry"]
    assert "row_geometry" in sys.modules
    assert "unruly" not in sys.modules


def test_facts_name_package_version_code_and_terms(site: Path) -> None:
    facts = loaded("row-geometry")["row-geometry"].facts
    assert facts.kind == "reader"
    assert facts.package == "row-geometry"
    assert facts.version == "1.0"
    assert len(facts.digest) == 64
    assert facts.reader is not None
    assert facts.reader.returns["dimensions"] == "int32"
    assert facts.reader.size({"k": 4}) == 24
    assert facts.reader.about.startswith("Norms of rows")
    assert msgspec.json.decode(msgspec.json.encode(facts), type=Extension) == facts


def test_digest_covers_all_files_of_a_package_but_compiled_ones(site: Path) -> None:
    (offer,) = (offer for offer in offered() if offer.name == "row-geometry")
    before = digest(offer)
    (site / "row_geometry" / "__pycache__").mkdir(exist_ok=True)
    (site / "row_geometry" / "__pycache__" / "x.pyc").write_bytes(b"1")
    assert digest(offer) == before
    (site / "row_geometry" / "table.txt").write_text("1")
    assert digest(offer) != before


@pytest.mark.parametrize(
    ("packages", "words"),
    [
        ("missing", "missing is not installed"),
        ("numpy", "has no entry point of the group midstream.readers"),
    ],
)
def test_a_named_package_without_extensions_is_refused(
    site: Path, packages: str, words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        check_installed(packages)


def test_two_packages_with_one_name_are_refused(site: Path) -> None:
    other(site, "", name="one")
    other(site, "", name="two")
    with pytest.raises(SettingsError, match="one and two both offer the reader 'other'"):
        check_installed("one,two")


BROKEN: dict[str, tuple[str, str]] = {
    "it cannot be imported": ("raise OSError('no library')", "no library"),
    "it ends the process": ("sys.exit(2)", "SystemExit"),
    "it declares nothing": ("class Other: pass", "returns"),
    "an option's default is out of range": (
        "class Other:\n returns = {}\n options = {'k': Option(default=9, high=4)}",
        "9 is out of range; valid: an integer of at most 4",
    ),
    "its size has no bound": (
        "class Other:\n returns = {}\n grows = {'k': 4}\n options = {'k': Option(default=9)}",
        "k is not an integer option with an upper limit",
    ),
    "it raises": (
        "class Other:\n returns = {}\n def read(self, rows): raise KeyError('x')",
        "KeyError",
    ),
    "it returns no mapping": (
        "class Other:\n returns = {'a': 'int64'}\n def read(self, rows): return 3",
        "returned int",
    ),
    "it returns another dtype": (
        (
            "class Other:\n returns = {'a': 'int64'}\n fixed_bytes = 99\n def read(self, "
            "rows): return {'a': np.zeros(1)}"
        ),
        "a is a float64 array, but is declared as an array of int64",
    ),
    "it returns more than declared": (
        (
            "class Other:\n returns = {'a': 'float64'}\n row_bytes = 8\n def read(self, "
            "rows): return {'a': np.zeros(99)}"
        ),
        "returned 792 bytes for 4 rows, but declares at most 32",
    ),
    "it gives another answer each time": (
        (
            "class Other:\n returns = {'a': 'float64'}\n row_bytes = 8\n def read(self, "
            "rows): return {'a': np.random.rand(1)}"
        ),
        "different answers for the same rows",
    ),
    "it changes its input": (
        "class Other:\n returns = {}\n def read(self, rows):\n  for held in "
        "rows.sites.values():\n   held.flags.writeable = True\n"
        "   held[:] = 0\n  return {}",
        "changes its input",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_reader_that_breaks_its_word_is_refused_at_the_start(site: Path, case: str) -> None:
    body, words = BROKEN[case]
    other(site, body)
    with pytest.raises(ExtensionError, match=r"reader other of other 2\.0") as refused:
        loaded("other")
    assert words in str(refused.value)


def test_ranks_with_different_code_refuse_to_start() -> None:
    one = Extension(kind="reader", name="norms", package="p", version="1.0", digest="a" * 64)
    assert agreed([[one], [one]]) == [one]
    for rest, words in (
        (
            [msgspec.structs.replace(one, digest="b" * 64)],
            "rank 1 has p 1.0 with code bbbbbbbbbbbb",
        ),
        ([], "rank 1 has none"),
    ):
        with pytest.raises(
            MidstreamError, match="different versions of the reader norms"
        ) as refused:
            agreed([[one], rest])
        assert words in refused.value.detail


def test_the_example_computes_what_it_says(site: Path) -> None:
    rows = np.array([[3, 4, 0], [4, -3, 0], [8, -6, 0]], dtype=np.float32)
    read = loaded("row-geometry")["row-geometry"].read(
        Rows(
            sites={("post_block", 1): rows},
            positions=np.arange(3),
            token_ids=np.arange(3),
            prompt_tokens=3,
            options={"k": 2},
            num_layers=4,
        )
    )
    np.testing.assert_allclose(read["norm"].numpy(), [[5, 5, 10]])
    np.testing.assert_allclose(read["turn"].numpy(), [[1, 0, 1]], atol=1e-7)
    assert read["dimensions"].numpy().tolist() == [[[1, 0], [0, 1], [0, 1]]]
    assert EXAMPLE.is_dir()


# --- What requests may ask
# --------------------------------------------------------------------------------------------------


def bounds(site: Path, **changes: Any) -> Bounds:
    facts: dict[str, Any] = {
        "name": "m",
        "version": __version__,
        "architecture": "X",
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "vocab_size": 9,
        "max_model_len": 64,
        "dtype": "bfloat16",
        "hooks": ["pre_attn", "post_block"],
        "tokenizer": "",
        "memory_limit_kib": 1,
        "readings": {"reader": ""},
        "extensions": [each.facts for each in loaded("row-geometry").values()],
    }
    return Bounds(ModelInfo(**(facts | changes)), [PromptFacts(6), PromptFacts(4)], 4)


def resolved(wish: list[dict[str, Any]], known: Bounds) -> list[list[StoredCapture]]:
    parsed = parse_job(
        JobRequest(
            model="m",
            prompts=["a", "b"],
            readers=[msgspec.convert(each, ReaderSpec) for each in wish],
        )
    )
    return resolve_captures(None, known, resolve_readings(parsed, known))


def test_a_reading_has_sites_options_with_defaults_and_the_code(site: Path) -> None:
    wish = [
        {"name": "row-geometry", "layers": "0-1"},
        {"name": "row-geometry", "hooks": {"pre_attn": 2}, "options": {"k": 5}},
    ]
    first, second = resolved(wish, bounds(site))[1]
    assert first.sites == {"post_block": [0, 1]}
    assert second.sites == {"pre_attn": [2]}
    assert isinstance(first.reading, StoredReader)
    assert isinstance(second.reading, StoredReader)
    assert first.reading.options == {"k": 3}
    assert first.reading.row_bytes == 20
    assert second.reading.options == {"k": 5}
    assert second.reading.row_bytes == 28
    assert len(first.reading.digest) == 64


@pytest.mark.parametrize(
    ("wish", "field", "words"),
    [
        ({"name": "norms"}, "readers[0].name", "unknown reader 'norms'; valid: row-geometry"),
        ({"name": "row-geometry", "layers": 4}, "readers[0].layers", "layer 4"),
        ({"name": "row-geometry", "hook": "mlp_in"}, "readers[0].hook", "unknown hook 'mlp_in'"),
        ({"name": "row-geometry", "positions": [9]}, "readers[0].positions[0]", "9"),
        (
            {"name": "row-geometry", "options": {"n": 1}},
            "readers[0].options.n",
            "valid options of row-geometry: k",
        ),
        (
            {"name": "row-geometry", "options": {"k": 0}},
            "readers[0].options.k",
            "valid: an integer of at least 1 and at most 16",
        ),
        (
            {"name": "row-geometry", "options": {"k": True}},
            "readers[0].options.k",
            "True is not an integer",
        ),
        (
            {"name": "row-geometry", "options": {"k": 2.5}},
            "readers[0].options.k",
            "2.5 is not an integer",
        ),
        (
            {"name": "row-geometry", "positions": "all", "options": {"k": 16}},
            "readers[0]",
            "bytes of results",
        ),
    ],
)
def test_refusals_name_field_and_valid_values(
    site: Path, wish: dict[str, Any], field: str, words: str
) -> None:
    with refuses(field=field) as refused:
        resolved([wish], bounds(site))
    assert words in refused.value.detail


def test_hooks_inside_have_readers_of_their_own_and_none_where_ranks_divide_the_rows(
    site: Path,
) -> None:
    """A reading has rows of one width, and all of each row."""
    shapes = {"z": RowShape(heads=2, width=4), "k": RowShape(heads=1, width=4)}
    inside: Any = {"hooks": ["pre_attn", "post_block", *shapes], "inside": shapes}
    (stored,) = resolved(
        [{"name": "row-geometry", "hook": "hook_z", "layers": 1}], bounds(site, **inside)
    )[0]
    assert stored.sites == {"z": [1]}
    assert stored.row == shapes["z"]
    for wish, tp, words in (
        (
            {"hooks": {"z": [1], "post_block": [1]}},
            1,
            "have different sizes: name them in readers of their own (post_block | z)",
        ),
        (
            {"hook": "z", "layers": 1},
            2,
            "rows of z are divided among 2 ranks; valid: hooks of the stream",
        ),
    ):
        with pytest.raises(MidstreamError) as refused:
            resolved([{"name": "row-geometry", **wish}], bounds(site, tp=tp, **inside))
        assert refused.value.status == 400, refused.value.detail
        assert words in refused.value.detail, refused.value.detail


def test_a_model_without_readers_says_so(site: Path) -> None:
    with refuses("no readers are installed for m"):
        resolved([{"name": "row-geometry"}], bounds(site, extensions=[]))


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        (Option(default=1.5, low=0), 2, 2.0),
        (Option(default=True), False, False),
        (Option(default="a", choices=["a", "b"]), "b", "b"),
        (Option(default="a"), "anything", "anything"),
    ],
)
def test_options_take_values_of_their_type(option: Option, value: Any, wanted: Any) -> None:
    got = option.checked(value)
    assert got == wanted
    assert type(got) is type(wanted)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        (Option(default=1.5), float("inf")),
        (Option(default=True), 1),
        (Option(default="a", choices=["a", "b"]), "c"),
        (Option(default=1), "1"),
    ],
)
def test_options_refuse_other_values(option: Option, value: Any) -> None:
    with pytest.raises(ValueError, match=r"is not|unknown"):
        option.checked(value)

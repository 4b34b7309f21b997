"""Extensions of a rank: finds what installed packages offer, loads what the operator named, and compares it with what it declares.

A package offers a reader by an entry point of the group `midstream.readers`: its name is the reader's, its object a class or
function that is called without arguments, once per process, and gives a `ReaderCode`. Nothing of a package is imported unless
the setting `extensions` names the package. See `docs/extending.md`.
"""

import hashlib
import importlib.util
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from ...schemas.errors import MidstreamError
from ...schemas.extensions import Extension, Option, ReaderTerms, Rows
from ...schemas.readings import Array
from ...schemas.settings import SettingsError
from .apart import Apart

logger = logging.getLogger(__name__)

#: Entry point group → kind of extension.
GROUPS = {"midstream.readers": "reader"}
#: Seconds that an installed reader may take for a request's rows: a writer thread waits.
PATIENCE_S = 5.0
#: Files and bytes of a package whose digest is taken, at most.
MAX_FILES, MAX_BYTES = 10_000, 256 << 20
#: Rows of the check at the start: positions of each call.
_CHECKED_POSITIONS = (1, 5)
_SEED = 17


class ExtensionError(Exception):
    """An extension that the operator named cannot be served, with its name and the reason."""


class ReaderCode(Protocol):
    """An installed reader. `ReaderTerms` has the meaning of what it declares; all but `returns` may be left out."""

    returns: Mapping[str, str]
    row_bytes: int
    fixed_bytes: int
    grows: Mapping[str, int]
    options: Mapping[str, Option]

    def read(self, rows: Rows) -> Mapping[str, np.ndarray]:
        """The arrays that `returns` names. One call at a time; what it raises fails the request."""


class Offer(NamedTuple):
    """What an installed package offers; nothing of it has been imported."""

    kind: str
    name: str
    package: str
    version: str
    entry: EntryPoint


def normal(package: str) -> str:
    """A package's name as package installers compare it."""
    return re.sub(r"[-_.]+", "-", package).lower()


def named(setting: str) -> list[str]:
    """The packages that the setting `extensions` names."""
    return [normal(name.strip()) for name in setting.split(",") if name.strip()]


def offered() -> list[Offer]:
    """All that is installed, trusted or not, by kind and name."""
    found = set()
    for group, kind in GROUPS.items():
        for entry in entry_points(group=group):
            if entry.dist is not None:
                found.add(Offer(kind, entry.name, normal(entry.dist.name), entry.dist.version, entry))
    return sorted(found, key=lambda offer: offer[:4])


def trusted(packages: Sequence[str]) -> list[Offer]:
    """What the packages offer. Raises ExtensionError for one that is not installed or offers nothing, and for a name that two offer."""
    offers = [offer for offer in offered() if offer.package in packages]
    for package in packages:
        if not any(offer.package == package for offer in offers):
            raise ExtensionError(f"extensions: {package} {_lacking(package)}")
    for before, offer in pairwise(offers):
        if before[:2] == offer[:2]:
            raise ExtensionError(f"extensions: {before.package} and {offer.package} both offer the {offer.kind} {offer.name!r}")
    return offers


def check_installed(setting: str) -> None:
    """Before any process of an engine starts. Raises SettingsError for a package that offers nothing here."""
    try:
        trusted(named(setting))
    except ExtensionError as error:
        raise SettingsError(str(error)) from error


def agreed(of_ranks: Sequence[Sequence[Extension]]) -> list[Extension]:
    """What all ranks have loaded. Raises MidstreamError for ranks that have different versions or different code."""
    first = {(each.kind, each.name): each for each in of_ranks[0]}
    for rank, found in enumerate(of_ranks[1:], 1):
        other = {(each.kind, each.name): each for each in found}
        for key in sorted(first.keys() | other.keys()):
            if first.get(key) != other.get(key):
                raise MidstreamError(
                    "engine_failed",
                    f"the ranks have different versions of the {' '.join(key)}: rank 0 has {_shown(first.get(key))}, rank {rank} has "
                    f"{_shown(other.get(key))}; install one version on all machines",
                )
    return list(of_ranks[0])


def _shown(extension: Extension | None) -> str:
    return "none" if extension is None else f"{extension.package} {extension.version} with code {extension.digest[:12]}"


def _lacking(package: str) -> str:
    try:
        return f"{distribution(package).version} has no entry point of the group {' or '.join(GROUPS)}"
    except PackageNotFoundError:
        return "is not installed"


def digest(offer: Offer) -> str:
    """SHA-256 over the files of the top-level package or module that the entry point names, compiled ones left out.

    Raises ExtensionError. What the package imports from elsewhere is not part of it.
    """
    top = offer.entry.module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ExtensionError(f"{offer.kind} {offer.name} of {offer.package}: there is no module {top}")
    roots = [Path(each) for each in spec.submodule_search_locations or []]
    files = [(root, path) for root in roots for path in sorted(root.rglob("*")) if path.is_file() and _counts(path)]
    if not roots and spec.origin is not None:
        files = [(Path(spec.origin).parent, Path(spec.origin))]
    if len(files) > MAX_FILES or sum(path.stat().st_size for _, path in files) > MAX_BYTES:
        raise ExtensionError(f"{offer.kind} {offer.name} of {offer.package}: more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB of code")
    total = hashlib.sha256()
    for root, path in files:
        content = path.read_bytes()
        total.update(msgspec.msgpack.encode((path.relative_to(root).as_posix(), len(content))) + content)
    return total.hexdigest()


def _counts(path: Path) -> bool:
    return path.suffix not in (".pyc", ".pyo") and "__pycache__" not in path.parts


@dataclass(frozen=True)
class LoadedReader:
    """A reader that passed its check."""

    facts: Extension
    terms: ReaderTerms
    apart: Apart[Rows, dict[str, Array]]

    def read(self, rows: Rows) -> dict[str, Array]:
        """Raises what the reader raises, LateError, and ValueError for an answer that it has not declared."""
        return self.apart.ask(rows)


def load(packages: Iterable[str], hidden_size: int, num_layers: int, hooks: Sequence[str]) -> dict[str, LoadedReader]:
    """The readers of trusted packages by name, each tried with random rows of the model's shape. Raises ExtensionError."""
    found = {}
    for offer in trusted(list(packages)):
        what = f"{offer.kind} {offer.name} of {offer.package} {offer.version}"
        try:
            loaded = _loaded(offer)
            _check(loaded, hidden_size, num_layers, hooks)
        except (ExtensionError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a module that calls sys.exit() must not end the rank
            raise ExtensionError(f"{what}: {error if isinstance(error, ValueError) else repr(error)}") from error
        logger.info("%s is loaded, code %s", what, loaded.facts.digest[:12])
        found[offer.name] = loaded
    return found


def _loaded(offer: Offer) -> LoadedReader:
    code = digest(offer)
    make: Callable[[], ReaderCode] = offer.entry.load()
    reader = make()
    declared = {name: getattr(reader, name) for name in ReaderTerms.__struct_fields__ if hasattr(reader, name)}
    terms: ReaderTerms = msgspec.convert({"about": _first_line(reader), **declared}, ReaderTerms)
    for name, option in terms.options.items():
        option.checked(option.default)
        if not (name.isidentifier() and not name.startswith("_")):
            raise ValueError(f"option {name!r} is not a name")
    for name in terms.grows:
        if not isinstance(terms.options[name].default, int) or terms.options[name].high is None:
            raise ValueError(f"grows: {name} is not an integer option with an upper limit")
    facts = Extension(
        kind="reader", name=offer.name, package=offer.package, version=offer.version, digest=code, reader=terms,
        checked=["answers as declared", "same rows, same answer", "input unchanged"],
    )  # fmt: skip

    def read(rows: Rows) -> dict[str, Array]:
        return _arrays(reader.read(rows), terms, rows)

    return LoadedReader(facts, terms, Apart(f"reader {offer.name}", read, PATIENCE_S, "request"))


def _first_line(reader: object) -> str:
    return next(iter((type(reader).__doc__ or "").strip().splitlines()), "")


def _arrays(told: Any, terms: ReaderTerms, rows: Rows) -> dict[str, Array]:
    """The answer as it crosses the wire. Raises ValueError for one that is not as declared."""
    if not isinstance(told, Mapping) or set(told) != set(terms.returns):
        shown = sorted(map(str, told)) if isinstance(told, Mapping) else type(told).__name__
        raise ValueError(f"returned {shown}, but declares the arrays {sorted(terms.returns)}")
    found = {}
    for name, dtype in terms.returns.items():
        values = told[name]
        if not isinstance(values, np.ndarray) or values.dtype != np.dtype(dtype):
            shown = f"{values.dtype} array" if isinstance(values, np.ndarray) else type(values).__name__
            raise ValueError(f"{name} is a {shown}, but is declared as an array of {dtype}")
        raw = np.ascontiguousarray(values, dtype=np.dtype(dtype).newbyteorder("<"))
        found[name] = (dtype, list(values.shape), raw)
    size = sum(raw.nbytes for _, _, raw in found.values())
    most = terms.fixed_bytes + len(rows.positions) * len(rows.sites) * terms.size(rows.options)
    if size > most:
        raise ValueError(f"returned {size} bytes for {len(rows.positions) * len(rows.sites)} rows, but declares at most {most}")
    return {name: Array(dtype=dtype, shape=shape, data=raw.tobytes()) for name, (dtype, shape, raw) in found.items()}


def _check(loaded: LoadedReader, hidden_size: int, num_layers: int, hooks: Sequence[str]) -> None:
    """Random rows: the answer is as declared, the same again, and the rows are unchanged. Raises ValueError, or what the reader raises."""
    generator = np.random.default_rng(_SEED)
    sites = [(hook, layer) for hook in hooks[:2] for layer in sorted({0, num_layers - 1})]
    options = {name: option.default for name, option in loaded.terms.options.items()}
    for count in _CHECKED_POSITIONS:
        values = {site: generator.standard_normal((count, hidden_size), dtype=np.float32) for site in sites}
        answers = []
        for _ in range(2):
            rows = Rows(
                sites={site: frozen(each.copy()) for site, each in values.items()},
                positions=frozen(np.arange(count, dtype=np.int64)),
                token_ids=frozen(np.arange(count, dtype=np.int64) + 1),
                prompt_tokens=count,
                options=dict(options),
                num_layers=num_layers,
            )
            answers.append(loaded.read(rows))
            for site, each in values.items():
                if rows.sites.get(site) is None or rows.sites[site].tobytes() != each.tobytes():
                    raise ValueError(f"changes its input: the rows of {site[0]}, layer {site[1]}")
        if answers[0] != answers[1]:
            raise ValueError("gives different answers for the same rows")


def frozen(array: np.ndarray) -> np.ndarray:
    """The same array, read-only."""
    array.flags.writeable = False
    return array

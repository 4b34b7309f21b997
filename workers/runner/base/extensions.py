"""Extensions of a rank: finds what installed packages offer, and loads what the operator named.

A package offers a reader by an entry point of the group `midstream.readers`, an op by an entry
point of `midstream.ops`. The entry point names a class or function that is called without
arguments, once per process, and returns a `ReaderCode` (`installed_readers`) or an `OpCode`
(`installed_ops`). A package is imported only if the setting `extensions` names it. Code in a
request would run with the worker's rights, and could not be compared between ranks and versions; a
package has a name, a version and a digest, which certificate, receipts and results state. See
`docs/extending.md`.
"""

import hashlib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from ....schemas.base.errors import MidstreamError, Translated
from ....schemas.extensions import Extension, ExtensionKind, OpTerms, ReaderTerms
from ....schemas.packages import entries
from ....schemas.settings.settings import SettingsError

Terms = TypeVar("Terms", ReaderTerms, OpTerms)

#: Entry point group → kind of extension.
GROUPS: dict[str, ExtensionKind] = {"midstream.readers": "reader", "midstream.ops": "op"}
#: Files and bytes of the largest package whose digest is computed.
MAX_FILES = 10_000
MAX_BYTES = 256 << 20


class ExtensionError(Exception):
    """An extension that the operator named cannot be served, with its name and the reason."""


class Offer(NamedTuple):
    """Extension that an installed package offers; the package has not been imported."""

    kind: ExtensionKind
    name: str
    package: str
    version: str
    entry: EntryPoint

    def __str__(self) -> str:
        return f"{self.kind} {self.name} of {self.package} {self.version}"

    def facts(self, digest: str, **more: Any) -> Extension:
        """Return what is published about the extension once it is loaded."""
        return Extension(
            kind=self.kind,
            name=self.name,
            package=self.package,
            version=self.version,
            digest=digest,
            **more,
        )


def normal(package: str) -> str:
    """Return a package's name as package installers compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", package).lower()


def named(setting: str) -> list[str]:
    """Return the packages that the setting `extensions` names."""
    return [normal(name.strip()) for name in setting.split(",") if name.strip()]


def offered() -> list[Offer]:
    """Return the extensions of all installed packages, trusted or not, sorted by kind and name."""
    offers = {
        Offer(kind, entry.name, normal(entry.dist.name), entry.dist.version, entry)
        for group, kind in GROUPS.items()
        for entry in entries(group)
        if entry.dist is not None
    }
    return sorted(offers, key=lambda offer: offer[:4])


def trusted(packages: Sequence[str]) -> list[Offer]:
    """Return the extensions that `packages` offer.

    Raises ExtensionError for a package that is not installed or offers nothing, and for a name that
    two packages offer.
    """
    offers = [offer for offer in offered() if offer.package in packages]
    for package in packages:
        if not any(offer.package == package for offer in offers):
            raise ExtensionError(f"extensions: {package} {_why_no_offer(package)}")
    for before, offer in pairwise(offers):
        if before[:2] == offer[:2]:
            raise ExtensionError(
                f"extensions: {before.package} and {offer.package} both offer the {offer.kind} "
                f"{offer.name!r}"
            )
    return offers


def check_installed(setting: str) -> None:
    """Raises SettingsError for a package that offers nothing here.

    Called before any process of an engine starts.
    """
    with Translated(ExtensionError, lambda error: SettingsError(str(error))):
        trusted(named(setting))


def agreed(of_ranks: Sequence[Sequence[Extension]]) -> list[Extension]:
    """Return the extensions that all ranks have loaded.

    Raises MidstreamError if ranks have different versions or different code.
    """
    first = {(item.kind, item.name): item for item in of_ranks[0]}
    for rank, of_rank in enumerate(of_ranks[1:], 1):
        other = {(item.kind, item.name): item for item in of_rank}
        for key in sorted(first.keys() | other.keys()):
            if first.get(key) != other.get(key):
                raise MidstreamError(
                    "engine_failed",
                    f"the ranks have different versions of the {' '.join(key)}: rank 0 has "
                    f"{_shown(first.get(key))}, rank {rank} has "
                    f"{_shown(other.get(key))}; install one version on all machines",
                )
    return list(of_ranks[0])


def _shown(extension: Extension | None) -> str:
    return (
        "none"
        if extension is None
        else f"{extension.package} {extension.version} with code {extension.digest[:12]}"
    )


def _why_no_offer(package: str) -> str:
    try:
        return (
            f"{distribution(package).version} has no entry point of the group {' or '.join(GROUPS)}"
        )
    except PackageNotFoundError:
        return "is not installed"


def digest(offer: Offer) -> str:
    """Return the SHA-256 over the files of the top-level package or module that the entry point
    names, without bytecode.

    Raises ExtensionError. Other packages that it imports are not included.
    """
    top = offer.entry.module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ExtensionError(f"{offer}: there is no module {top}")
    roots = [Path(item) for item in spec.submodule_search_locations or []]
    files = [
        (root, path)
        for root in roots
        for path in sorted(root.rglob("*"))
        if path.is_file()
        and path.suffix not in (".pyc", ".pyo")
        and "__pycache__" not in path.parts
    ]
    if not roots and spec.origin is not None:
        files = [(Path(spec.origin).parent, Path(spec.origin))]
    if len(files) > MAX_FILES or sum(path.stat().st_size for _, path in files) > MAX_BYTES:
        raise ExtensionError(
            f"{offer}: more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB of code"
        )
    total = hashlib.sha256()
    for root, path in files:
        content = path.read_bytes()
        total.update(
            msgspec.msgpack.encode((path.relative_to(root).as_posix(), len(content))) + content
        )
    return total.hexdigest()


def code_of(offer: Offer) -> Any:
    """Import and call what the entry point names; return the result.

    Raises ExtensionError for anything that this raises.
    """
    try:
        return offer.entry.load()()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module that calls sys.exit() must not end the rank
        raise ExtensionError(f"{offer}: {error!r}") from error


@contextmanager
def loading(offer: Offer) -> Iterator[None]:
    """Have what is raised while an offer is loaded and checked name the offer: as an
    ExtensionError.
    """
    try:
        yield
    except ExtensionError:
        raise
    except Exception as error:
        why = error if isinstance(error, ValueError) else repr(error)
        raise ExtensionError(f"{offer}: {why}") from error


def declared(code: object, terms: type[Terms]) -> Terms:
    """Return the terms that the code declares. Raises ValueError for invalid ones."""
    about = next(iter((type(code).__doc__ or "").strip().splitlines()), "")
    given = {name: getattr(code, name) for name in terms.__struct_fields__ if hasattr(code, name)}
    declaration = msgspec.convert({"about": about, **given}, terms)
    for name, option in declaration.options.items():
        option.checked(option.default)
        if not name.isidentifier() or name.startswith("_"):
            raise ValueError(f"option {name!r} is not a name")
    return declaration


def frozen(array: np.ndarray) -> np.ndarray:
    """Make the array read-only, and return it."""
    array.flags.writeable = False
    return array

"""The on-disk cache of `map`: results in one SQLite file, keyed by a digest of the request, and
folders of captured rows next to it.

Every name is a digest that the client computed; no text from a server becomes a path.
"""

import os
import re
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from midstream.schemas.base.errors import Translated, invalid
from midstream.schemas.base.records import from_json, to_json
from midstream.schemas.jobs.results import JobResult

#: Version of the SQLite file's tables (its `user_version`).
_VERSION = 1
_DIGEST = re.compile(r"[0-9a-f]{64}")
#: The most keys in one query.
_QUERY = 500
#: Seconds after which the unfinished download of a killed process is removed.
_STALE_S = 24 * 3600.0


class MapCache:
    """A cache in `folder`, which is created if missing. Processes may share it.

    A killed process leaves no partial result: a job's rows are a folder that is renamed into place,
    and then its results are stored in one transaction. Raises MidstreamError for a folder that is
    not such a cache.
    """

    def __init__(self, folder: Path | str):
        self._folder = Path(folder).expanduser()
        self._rows = self._folder / "captures"
        with Translated(
            OSError,
            lambda error: invalid(
                "cache",
                f"{self._folder} cannot be used: {error}",
                allowed="a folder that can be written",
            ),
        ):
            self._rows.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._readable():
                self._db = sqlite3.connect(
                    self._folder / "results.sqlite", timeout=60.0, check_same_thread=False
                )
                with self._db:
                    self._db.execute("BEGIN IMMEDIATE")
                    (version,) = self._db.execute("PRAGMA user_version").fetchone()
                    if version not in (0, _VERSION):
                        raise invalid(
                            "cache",
                            f"{self._folder} has format {version}",
                            allowed=f"format {_VERSION}, or another folder",
                        )
                    self._db.execute(
                        "CREATE TABLE IF NOT EXISTS results (key TEXT PRIMARY KEY, value BLOB NOT "
                        "NULL, rows TEXT NOT NULL)"
                    )
                    self._db.execute(f"PRAGMA user_version = {_VERSION}")
        self._remove_stale()

    def close(self) -> None:
        self._db.close()

    def load(self, keys: Sequence[str], rows: bool) -> dict[str, tuple[JobResult, Path | None]]:
        """Return the cached results among these keys, with the folders of their captured rows.

        `rows`: return only results that have such a folder.
        """
        paths: dict[str, tuple[JobResult, Path | None]] = {}
        for start in range(0, len(keys), _QUERY):
            part = keys[start : start + _QUERY]
            text = (
                f"SELECT key, value, rows FROM results WHERE key IN ({','.join('?' * len(part))})"
            )
            with self._readable():
                answers = self._db.execute(text, part).fetchall()
            for key, value, name in answers:
                folder = (
                    self._rows / name
                    if _DIGEST.fullmatch(name) and (self._rows / name).is_dir()
                    else None
                )
                try:
                    if folder is not None or not rows:
                        paths[key] = from_json(value, JobResult), folder
                except (msgspec.ValidationError, msgspec.DecodeError):
                    continue  # written by another version: computed again
        return paths

    def store(self, results: Mapping[str, JobResult], rows: Path | None) -> None:
        """Store the results of one job, by key. `rows`: the folder that `keep` returned."""
        name = rows.name if rows else ""
        with self._readable(), self._db:
            self._db.executemany(
                "INSERT OR REPLACE INTO results VALUES (?, ?, ?)",
                [(key, to_json(result), name) for key, result in results.items()],
            )

    @contextmanager
    def downloads(self) -> Iterator[Path]:
        """Yield a temporary folder for downloads; it is removed at the end, unless `keep` moved
        it.
        """
        folder = Path(tempfile.mkdtemp(prefix=".part-", dir=self._rows))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def keep(self, folder: Path, digest: str) -> Path:
        """Rename the folder of downloads to `digest`, the digest of its request; return its path.

        An existing folder of that name has the same content, and stays.
        """
        target = self._rows / digest
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{digest!r} is not a digest")
        try:
            os.rename(folder, target)
        except OSError:
            if not target.is_dir():
                raise
        return target

    def _remove_stale(self) -> None:
        for folder in self._rows.glob(".part-*"):
            try:
                if time.time() - folder.stat().st_mtime > _STALE_S:
                    shutil.rmtree(folder, ignore_errors=True)
            except OSError:
                continue  # another process removed it

    @contextmanager
    def _readable(self) -> Iterator[None]:
        with Translated(
            sqlite3.Error,
            lambda error: invalid(
                "cache",
                f"{self._folder / 'results.sqlite'}: {error}",
                allowed="a folder that `map` created, or a new one",
            ),
        ):
            yield

"""The identity of a loaded model: a digest of everything that decides its numbers, independent of
where its files are and how ranks divide it.

It covers the names and bytes of the files in the checkpoint's folder (weights, config, tokenizer;
code, also in subfolders; further chat templates; not texts such as README), the dtype, which of
the two sets of longrope factors is used, and vLLM's engine options without those of `SERVING`. See
docs/decisions/0038-model-identity.md.
"""

import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ...schemas.base.errors import MidstreamError, Translated
from ...schemas.base.records import to_json
from ...schemas.jobs.models import encode_bundle
from ...schemas.settings.settings import Settings
from ..runner.hooks.config_rules import as_served
from .options.option_lists import SERVING
from .prompts.tokenizer import bundle_of

logger = logging.getLogger(__name__)

#: Options and values of them that change nothing: those with which the checkpoint's own files are
#: read, and computed by vLLM's own classes.
SAME = [
    *(("load_format", value) for value in ("auto", "hf", "safetensors")),
    *(("config_format", value) for value in ("auto", "hf")),
    *(("model_impl", value) for value in ("auto", "vllm")),
]
#: Prefixes of files in a checkpoint's folder that do not affect its numbers.
_TEXTS = ("LICENSE", "NOTICE", "README", "USE_POLICY")
#: Bytes that a thread reads and hashes at a time.
_PIECE = 1 << 24
#: The largest number of threads.
_THREADS = 8
#: A digest is not kept if its file was written less than this many seconds before it was read: it
#: might be written again within one tick of the file system's clock.
_FRESH_S = 2.0

#: Size, times of modification and of change (ns), inode and device of a file whose digest is known.
Stat = tuple[int, int, int, int, int]


def identity_of(settings: Settings, config: Any) -> str:
    """Returns the identity, 64 hex digits. `config`: vLLM's `ModelConfig`.

    A file is read once; its digest is kept in the data folder and used while the file's `stat` is
    unchanged. Raises MidstreamError if it is unknown what would be loaded.
    """
    digests = digests_in(settings.data_dir)
    options = {
        name: value
        for name, value in settings.engine_options.items()
        if name not in SERVING and (name, value) not in SAME
    }
    _check_remote_code(config, options)
    facts = {
        "dtype": str(config.dtype).removeprefix("torch."),
        "model": content_of(digests, config.model, config),
        # of an architecture without other rules: those depend on the config alone
        # vLLM rotates by longrope's long factors where `max_model_len` exceeds the original length,
        # so workers on both sides of it compute different rows.
        **dict.fromkeys(as_served("", config.hf_text_config, config.max_model_len), "as served"),
    }
    if "hf_config_path" in options:
        options["hf_config_path"] = content_of(digests, options["hf_config_path"], config)
    if config.tokenizer != config.model:
        facts["tokenizer"] = (
            digests.of(Path(config.tokenizer))
            if Path(config.tokenizer).exists()
            else encode_bundle(bundle_of(config))[0]
        )
    return hashlib.sha256(json.dumps([facts, options], sort_keys=True).encode()).hexdigest()


def digests_in(data_dir: str) -> "FileDigests":
    return FileDigests(Path(data_dir).resolve() / "checkpoint-digests.json")


def content_of(digests: "FileDigests", place: str, config: Any) -> str:
    """Returns the digest of a file or folder; for a name on the hub, the name and its commit, whose
    content the hub never changes.
    """
    path = Path(place).expanduser()
    if path.exists():
        return digests.of(path)
    if commit := getattr(config.hf_config, "_commit_hash", None):
        return f"{place}@{commit}"
    raise MidstreamError(
        "engine_failed",
        (
            f"the identity of {place} is unknown: it is not a folder on this machine, and the hub "
            "gave no commit of it"
        ),
        field="model",
        allowed="the folder of a checkpoint, or a name on the hub with the engine option revision",
    )


def _check_remote_code(config: Any, options: Mapping[str, Any]) -> None:
    """Raise MidstreamError if code of another repository runs and no commit of it is named.

    Such an entry of `auto_map` is `owner/repository--file.Class`.
    """
    if not getattr(config, "trust_remote_code", False) or "code_revision" in options:
        return
    elsewhere = str(getattr(config.hf_config, "auto_map", None) or "")
    if "--" in elsewhere:
        raise MidstreamError(
            "engine_failed",
            f"the identity of {config.model} is unknown: its config takes code from another "
            f"repository, whose content may change: auto_map {elsewhere[:200]}",
            field="model",
            allowed="the engine option code_revision with a commit of that repository",
        )


class FileDigests:
    """Digests of files, kept in a JSON file by path and `Stat`."""

    def __init__(self, kept: Path) -> None:
        self._kept = kept
        self._known: dict[str, tuple[Stat, str]] = {}
        try:
            self._known = {
                path: (tuple(stat), digest)
                for path, (stat, digest) in json.loads(kept.read_bytes()).items()
            }
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, AttributeError) as error:
            logger.warning("%s cannot be read, so files are hashed again: %s", kept, error)

    def of(self, path: Path) -> str:
        """Return the SHA-256 over the names and contents of a folder's files, or over one file's
        content.

        Raises MidstreamError if a file cannot be read or changes meanwhile.
        """
        with Translated(
            OSError,
            lambda error: MidstreamError(
                "engine_failed", f"the checkpoint cannot be read: {error}", field="model"
            ),
        ):
            files = (
                {"": path}
                if path.is_file()
                else {
                    str(file.relative_to(path)): file
                    for file in sorted(
                        {
                            *path.iterdir(),
                            *path.glob("[!.]*/**/*.py"),
                            *path.glob("additional_chat_templates/*.jinja"),
                        }
                    )
                    if file.is_file()
                    and not file.name.startswith((".", *_TEXTS))
                    and file.suffix != ".md"
                }
            )
            return hashlib.sha256(json.dumps(self._contents(files)).encode()).hexdigest()

    # Files, not tensors: those would need a reader for each format, and leave out config and
    # tokenizer. Other shards of one checkpoint count as another model: that refuses too much, never
    # too little.
    def _contents(self, files: Mapping[str, Path]) -> list[tuple[str, str]]:
        began = time.time()
        read = 0
        fresh = False
        contents = []
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "hash") as pool:
            for name, file in files.items():
                place = str(file.resolve())
                stat = _stat(file)
                known = self._known.get(place)
                if known is None or known[0] != stat:
                    known = stat, _content(file, stat[0], pool)
                    read += stat[0]
                    if _stat(file) != stat:
                        raise MidstreamError(
                            "engine_failed",
                            f"{file} changed while it was read: start again",
                            field="model",
                        )
                    if max(stat[1:3]) / 1e9 < began - _FRESH_S:
                        self._known[place] = known
                        fresh = True
                contents.append((name, known[1]))
        if fresh:
            self._keep()
            logger.info(
                "hashed %.1f GB of the checkpoint in %.1f s", read / 1e9, time.time() - began
            )
        return contents

    def _keep(self) -> None:
        """Write the known digests of files that still exist, for the next start."""
        aside = self._kept.with_name(f".{self._kept.name}.{secrets.token_hex(4)}")
        try:
            self._kept.parent.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(
                to_json(
                    {path: entry for path, entry in self._known.items() if os.path.exists(path)}
                )
            )
            aside.rename(self._kept)
        except OSError as error:
            logger.warning(
                "%s cannot be written, so the next start hashes the checkpoint again: %s",
                self._kept,
                error,
            )


def _stat(file: Path) -> Stat:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev


# All bytes: a digest of 4 KiB of every MiB could miss an edit of one norm's weights. The engine
# reads the same bytes from the page cache afterwards.
def _content(file: Path, size: int, pool: ThreadPoolExecutor) -> str:
    """Returns the BLAKE2b over the digests of the file's pieces, which threads compute."""
    digest = hashlib.blake2b(size.to_bytes(8, "big"), digest_size=32)
    for piece in pool.map(lambda start: _piece(file, start), range(0, size, _PIECE)):
        digest.update(piece)
    return digest.hexdigest()


def _piece(file: Path, start: int) -> bytes:
    with file.open("rb") as handle:
        handle.seek(start)
        return hashlib.blake2b(handle.read(_PIECE), digest_size=32).digest()

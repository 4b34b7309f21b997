"""Says what a worker that starts waits for, and how long each part took."""

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from .processes import Announce

#: A worker's line about the part of its start that begins.
BEGINS = re.compile(r"^worker begins (.+)$", re.MULTILINE)
#: Such a part → what it waits for.
WAITS = {
    "imports": "importing torch and vLLM",
    "configuration": "reading the model's configuration",
    "core and ranks": "downloading what is missing, and loading the weights",
    "certification": "certifying the hook points",
}
#: Seconds between two lines about a download.
DOWNLOAD_S = 10.0


class StartProgress:
    """The progress of one start. `model`: a folder, or the name of a hub's model."""

    def __init__(self, model: str, say: Announce) -> None:
        self._model = model
        self._say = say
        self._begun: list[tuple[str, float]] = []
        self._download_due = 0.0
        self._downloaded = 0

    def look(self, output: str, at: float | None = None) -> None:
        """Say what has begun since the last look. `output`: of the worker, since it was started."""
        at = time.monotonic() if at is None else at
        for part in BEGINS.findall(output)[len(self._begun) :]:
            self._say(f"worker: {WAITS.get(part, part)}{self._took(at)}")
            self._begun.append((part, at))
            self._download_due = at + DOWNLOAD_S
        if self._begun and at > self._download_due:
            self._download_due = at + DOWNLOAD_S
            self._say_downloaded()

    def _took(self, at: float) -> str:
        if not self._begun:
            return ""
        part, since = self._begun[-1]
        return f" ({part}: {at - since:.1f} s)"

    def _say_downloaded(self) -> None:
        there = downloaded(self._model)
        if there > self._downloaded:
            self._downloaded = there
            self._say(f"worker: {there / 2**20:.0f} MiB of {self._model} downloaded so far")


def downloaded(model: str) -> int:
    """Return the bytes of unfinished files of a hub's model in its cache; 0 if none is downloaded,
    or if the model is a folder.
    """
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = os.environ.get("HF_HUB_CACHE") or f"{home}/hub"
    folder = Path(cache).expanduser() / f"models--{model.replace('/', '--')}" / "blobs"
    if not model:
        return 0
    size = 0
    for file in folder.glob("*.incomplete"):
        with suppress(OSError):  # finished meanwhile
            size += file.stat().st_size
    return size

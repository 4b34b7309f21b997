"""Errors of a rank that could not build or run the model, for the worker: vLLM's own processes
report only that one of them ended.
"""

import contextlib
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

logger = logging.getLogger(__name__)


def reason_of(error: BaseException) -> str:
    """In one line; of a failed validation only what is wrong; of an error without a text, or with
    one that names nothing, where it was.
    """
    text = (
        "; ".join(item["msg"] for item in error.errors())
        if isinstance(error, ValidationError)
        else str(error)
    )
    listing = " ".join(text.split())
    if not isinstance(error, AssertionError | AttributeError | KeyError | TypeError | IndexError):
        return listing or type(error).__name__
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "/vllm/" in frame.filename
    ]
    place = (
        (
            f" at vllm/{frames[-1].filename.rpartition('/vllm/')[2]}:{frames[-1].lineno} "
            f"({frames[-1].line})"
        )
        if frames
        else ""
    )
    return f"{type(error).__name__}{place}{f': {listing}' if listing else ''}"


@contextlib.contextmanager
def kept_for_worker(folder: str, boot: str) -> Iterator[None]:
    """Keep an error for `kept`, on the same machine; another one's ranks have it in their log."""
    try:
        yield
    except Exception as error:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            _file(folder, boot).write_text(reason_of(error))
        except OSError as failure:
            logger.warning("the reason is not kept: %s", failure)
        raise


def kept(folder: str, boot: str) -> str:
    """Return what a rank of this start kept, once; empty where none did."""
    file = _file(folder, boot)
    if not file.exists():
        return ""
    text = file.read_text()
    file.unlink()
    return text


def _file(folder: str, boot: str) -> Path:
    return Path(folder) / f"build-error-{boot}.txt"

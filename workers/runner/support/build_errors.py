"""Passes the error of an engine's process that could not start, build or run the model to the
worker; vLLM reports only that one of its processes ended.
"""

import contextlib
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

logger = logging.getLogger(__name__)

#: The end of the messages that vLLM logs with such errors.
FAILED = "failed to start."


def reason_of(error: BaseException) -> str:
    """Return an error's reason in one line.

    A failed validation is reduced to its messages. Errors of types whose text seldom explains them,
    such as AssertionError, get the place in vLLM's code.
    """
    text = (
        "; ".join(item["msg"] for item in error.errors())
        if isinstance(error, ValidationError)
        else str(error)
    )
    message = " ".join(text.split())
    if not isinstance(error, AssertionError | AttributeError | KeyError | TypeError | IndexError):
        return message or type(error).__name__
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
    return f"{type(error).__name__}{place}{f': {message}' if message else ''}"


@contextlib.contextmanager
def kept_for_worker(folder: str, boot: str) -> Iterator[None]:
    """Write an error of the block to a file for `kept`.

    The first process that fails writes it: the others may only fail because that one is gone.
    `kept` reads it on the same machine; ranks on other machines have it in their log only.
    """
    try:
        yield
    except Exception as error:
        _keep(error, folder, boot)
        raise


class KeptForWorker(logging.Handler):
    """Writes the error that vLLM logs when a process of an engine cannot start to a file for
    `kept`, unless another process was the first to fail.
    """

    def __init__(self, folder: str, boot: str) -> None:
        super().__init__(logging.ERROR)
        self._folder = folder
        self._boot = boot

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and record.getMessage().endswith(FAILED):
            _keep(error, self._folder, self._boot)


def _keep(error: BaseException, folder: str, boot: str) -> None:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with open(_file(folder, boot), "x") as file:
            file.write(reason_of(error))
    except FileExistsError:
        logger.warning("not the first process that failed: %s", error)
    except OSError as failure:
        logger.warning("the error's reason could not be written: %s", failure)


def kept(folder: str, boot: str) -> str:
    """Return and remove the reason that a process of this boot wrote; empty if there is none."""
    file = _file(folder, boot)
    if not file.exists():
        return ""
    text = file.read_text()
    file.unlink()
    return text


def _file(folder: str, boot: str) -> Path:
    return Path(folder) / f"build-error-{boot}.txt"

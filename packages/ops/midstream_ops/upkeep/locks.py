"""Takes a data directory as `midstream up` does, so that no stack starts on it meanwhile."""

import fcntl
from contextlib import ExitStack
from pathlib import Path

from midstream.schemas.base.errors import MidstreamError

from ..redis_server import LOCK as REDIS_LOCK
from ..supervisor import LOCK_FILE


def take(data: Path, stack: ExitStack) -> None:
    """Lock a data directory until the stack is closed. Raises MidstreamError("conflict") if a
    `midstream up` has it, or a Redis that one has left.
    """
    up = stack.enter_context((data / LOCK_FILE).open("a"))
    _lock(up.fileno(), data)
    of_redis = data / "redis" / REDIS_LOCK
    if of_redis.exists():
        with of_redis.open("a") as file:  # not kept: a Redis that is started here needs it
            _lock(file.fileno(), data)


def _lock(descriptor: int, data: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise MidstreamError(
            "conflict",
            f"{data} is in use by a stack: `midstream status --data-dir {data}` shows it",
            field="data_dir",
            hint="stop it first (`midstream down`), or name another folder with --data-dir",
        ) from None

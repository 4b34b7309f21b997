"""Finds the API's address for a client or a command, and verifies which stack answers there.

The first of these is used: an explicit address; the setting `public_url`; the `midstream up` that
runs on the data directory; the settings `api_host` and `api_port`. The state file of the data
directory is used only if it belongs to this user, its `midstream up` is alive, and the API
reports the same instance.
"""

import os
from pathlib import Path

import httpx2
import msgspec

from ...schemas.base.errors import invalid
from ...schemas.base.records import from_json
from ...schemas.service.health import Health
from ...schemas.settings.instance import instance_of
from ...schemas.settings.settings import Settings, load_settings
from .wire import ServerUnreachable

#: State file of `midstream up` in its data directory.
STATE_FILE = "up.json"
#: Timeout in seconds of the request for a running API's instance.
ASK_S = 3.0


class WrittenStack(msgspec.Struct, kw_only=True):
    """What the state file of a `midstream up` says."""

    pid: int = 0
    url: str = ""  # empty while it starts
    model: str = ""
    version: str = ""
    redis_url: str = ""  # of its own Redis, without the password; empty: it uses another one
    started: float = 0.0  # seconds since the epoch
    # name → pid and birth, see `processes.birth`
    processes: dict[str, tuple[int, int]] = {}


class RunningStack(WrittenStack, kw_only=True):
    """State of a running `midstream up`."""

    data: Path
    instance: str


def data_dir(settings: Settings) -> Path:
    return Path(settings.data_dir).expanduser().resolve()


def running(data: Path) -> RunningStack | None:
    """Return the stack that runs on a data directory; None if there is none, or if its process or
    state file belongs to another user.
    """
    state = written(data)
    try:
        own = Path(f"/proc/{state.pid}").stat().st_uid == os.getuid()
        instance = instance_of(state.pid) if own else ""
    except OSError:
        return None
    if not instance or not (data / STATE_FILE).exists():  # it ended in between
        return None
    return RunningStack(data=data, instance=instance, **msgspec.structs.asdict(state))


def written(data: Path, *, own: bool = True) -> WrittenStack:
    """Return what the state file of the last `midstream up` on a data directory says; nothing if
    there is none, or with `own` if it belongs to another user.
    """
    path = data / STATE_FILE
    try:
        if not own or path.stat().st_uid == os.getuid():
            return from_json(path.read_bytes(), WrittenStack)
    except (OSError, AttributeError, msgspec.DecodeError):
        # AttributeError: no os.getuid on this system, so no `midstream up` either
        pass
    return WrittenStack()


def address(url: str | None, api_key: str | None) -> tuple[str, str | None]:
    """Return address and key for a client; without `url`, from the settings. Raises what `find_url`
    raises.

    `url`: may omit `http://`. Raises MidstreamError for what is no URL.
    """
    if url:
        if " " in url:
            raise invalid("url", f"{url!r} is no URL", allowed="such as http://127.0.0.1:8321")
        return (url if "://" in url else f"http://{url}").rstrip("/"), api_key
    settings = load_settings()
    key = settings.api_key or None if api_key is None else api_key
    return find_url(settings).rstrip("/"), key


def find_url(settings: Settings, *, sure: bool = True) -> str:
    """Return the API's address.

    `sure`: check that the configured stack runs there. Raises ServerUnreachable.
    """
    if settings.public_url:
        return settings.public_url
    data = data_dir(settings)
    stack = running(data)
    if stack is not None and stack.url:
        if sure:
            _check_instance(stack)
        return stack.url
    default = Settings()
    has_address = (settings.api_host, settings.api_port) != (default.api_host, default.api_port)
    if sure and not has_address and (stack is not None or settings.data_dir != default.data_dir):
        why = "is still starting" if stack is not None else "is not running"
        raise ServerUnreachable(
            f"the stack on {data} {why}; `midstream up` starts it, and `midstream status` shows it"
        )
    url = f"http://{reachable(settings.api_host)}:{settings.api_port}"
    if (
        sure
        and is_local(settings.api_host)
        and (owner := owner_of(settings.api_port)) not in (None, os.getuid())
    ):
        raise ServerUnreachable(
            f"the server at {url} belongs to another user (uid {owner}): pass `url` "
            "explicitly to use it"
        )
    return url


def _check_instance(stack: RunningStack) -> None:
    """Check that this stack answers at its address. Raises ServerUnreachable if another stack does.

    No answer is not an error: the stack may be restarting.
    """
    try:
        answer = httpx2.get(f"{stack.url}/healthz", timeout=ASK_S)
        instance = from_json(answer.content, Health).instance
    except (httpx2.HTTPError, msgspec.DecodeError):
        return
    if instance != stack.instance:
        raise ServerUnreachable(
            f"the stack at {stack.url} is not the one on {stack.data}: `midstream status` "
            "shows which stack is running"
        )


def reachable(host: str) -> str:
    """Return the host under which a client on this machine reaches a server bound to `host`, as
    written in a URL.
    """
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def is_local(host: str) -> bool:
    return host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "::", "")


# --- Listening sockets (proc(5), tcp)

_LISTEN = "0A"


def _listeners() -> list[tuple[int, int, int]]:
    """Return (port, uid, inode) of every listening TCP socket of this machine."""
    listeners = []
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        for words in map(str.split, lines):
            if words[3] == _LISTEN:
                listeners.append(
                    (int(words[1].rpartition(":")[2], 16), int(words[7]), int(words[9]))
                )
    return listeners


def owner_of(port: int) -> int | None:
    """Return the uid of the process that listens on a port; None if none does, or if its owner is
    unknown.
    """
    return next((uid for listened, uid, _ in _listeners() if listened == port), None)


def ports_of(pid: int) -> list[int]:
    """Return the TCP ports on which a process of this user listens, ascending."""
    inodes = set()
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            inodes.add(os.readlink(descriptor))
    except OSError:
        pass
    return sorted({port for port, _, inode in _listeners() if f"socket:[{inode}]" in inodes})

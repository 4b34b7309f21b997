"""CURVE authentication of senders at the relay: keys in files, and the ZAP authenticator.

A key is one line of Z85 (40 characters): a private key in `NAME.key`, which only its owner can
read, a public key in `NAME.pub`. The relay knows its senders by a folder of public keys,
`WORKER.pub`: a sender with another key fails the handshake, and frames in the name of a worker to
whom the sender's key does not belong are refused one by one.
"""

import fcntl
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import zmq
from zmq.utils import z85

from ...schemas.base.errors import MidstreamError, Translated, invalid
from ...schemas.settings.settings import Settings, SettingsError, refuse_exposed
from ..processes.private_files import private_folder
from ..telemetry.logs import Complaints

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

log = logging.getLogger(__name__)

KEY_BYTES = 32
Z85_CHARACTERS = 40
PRIVATE = ".key"
PUBLIC = ".pub"
CLIENTS = "clients"  # subfolder of workers' public keys, for `curve_clients_dir`
#: ZAP domain: any name will do, but with an empty one every sender is accepted if no authenticator
#: runs.
DOMAIN = "midstream"
#: Seconds between two reads of the folder of known keys: adding or removing a worker takes that
#: long.
LOOK_EVERY_S = 1.0
RELAY = "relay"  # name of the relay's key pair in `curve_dir`; no worker may use it
#: Seconds between two log lines about the same unknown or invalid key.
COMPLAIN_EVERY_S = 10.0

CurveRole = Literal["relay", "worker"]


class KnownClients:
    """The workers that a folder of public keys names, read again from time to time; from any
    thread.
    """

    def __init__(self, folder: Path):
        """Raises SettingsError if the folder cannot be read."""
        self.folder = folder
        self._lock = threading.Lock()
        self._keys: dict[str, str] = {}  # worker → its public key
        self._next_look = 0.0
        self._complaints = Complaints(COMPLAIN_EVERY_S)  # about unknown and invalid keys
        with Translated(
            OSError,
            lambda error: SettingsError(f"curve_clients_dir={str(folder)!r}: {error.strerror}"),
        ):
            self._look()

    def key_of(self, worker: str) -> str | None:
        """Return the public key of `worker`, if known."""
        self._refresh()
        return self._keys.get(worker)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether the sender with public key `key` is accepted; the authenticator calls
        this.
        """
        self._refresh()
        text = key.decode()
        if text not in self._keys.values():
            self._refresh(force=True)  # its file may have been added a moment ago
        if text in self._keys.values():
            return True
        with self._lock:
            if self._complaints.due(text):
                log.error(
                    "rejected a sender: its public key %s is not among the %d in %s",
                    text,
                    len(self._keys),
                    self.folder,
                )
        return False

    def _refresh(self, force: bool = False) -> None:
        if time.monotonic() < self._next_look and not force:
            return
        with self._lock:
            try:
                self._look()
            except OSError as error:
                self._keys = {}
                log.error(
                    "all senders are rejected: cannot read the folder of their public keys: %s",
                    error,
                )

    def _look(self) -> None:
        self._next_look = time.monotonic() + LOOK_EVERY_S
        keys = {}
        for path in sorted(self.folder.iterdir()):
            if not path.name.endswith(PUBLIC):
                continue
            try:
                keys[path.name.removesuffix(PUBLIC)] = public_key(path.read_text(), str(path))
            except (SettingsError, OSError, UnicodeDecodeError) as error:
                if self._complaints.due(path):
                    log.error("ignoring a sender's public key: %s", error)
        if keys != self._keys:
            log.info("senders with known keys: %s", ", ".join(keys) or "none")
        self._keys = keys


class ServerKeys(NamedTuple):
    """Keys of the relay's socket."""

    public: str
    secret: str
    clients: KnownClients

    def guard(
        self, context: "zmq.Context[Any]", socket: "zmq.Socket[bytes]"
    ) -> "ThreadAuthenticator":
        """Encrypt `socket`, which is not bound yet, and accept known clients only. Stop the
        returned authenticator before `context` ends.
        """
        from zmq.auth.thread import ThreadAuthenticator  # imports asyncio, which ranks do not need

        authenticator = ThreadAuthenticator(context, log=log)
        authenticator.start()
        authenticator.configure_curve_callback(DOMAIN, credentials_provider=self.clients)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
        return authenticator


class ClientKeys(NamedTuple):
    """Keys that a worker's sockets present, and the relay's key that they require."""

    public: str
    secret: str
    server: str

    def apply(self, socket: "zmq.Socket[bytes]") -> None:
        """Set the keys of `socket`, which is not connected yet."""
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, self.server)
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, self.secret)


def server_keys(settings: Settings) -> ServerKeys | None:
    """Return the relay's keys; None if it communicates unencrypted.

    Raises SettingsError naming what is wrong or missing.
    """
    settings = with_kept_keys(settings)
    if not settings.curve_secret_file and not settings.curve_clients_dir:
        return None
    if not settings.curve_clients_dir:
        raise SettingsError(
            "curve_secret_file is set without curve_clients_dir: the relay would accept any sender"
        )
    if not settings.curve_secret_file:
        raise SettingsError(
            "curve_clients_dir is set without curve_secret_file: the relay needs its own key"
        )
    return ServerKeys(
        *secret_key(settings.curve_secret_file), KnownClients(Path(settings.curve_clients_dir))
    )


def client_keys(secret_file: str, server_key: str) -> ClientKeys | None:
    """Return a worker's keys; None if it communicates unencrypted.

    Raises SettingsError naming what is wrong or missing.
    """
    if not secret_file and not server_key:
        return None
    if not server_key:
        raise SettingsError(
            "curve_secret_file is set without curve_server_key: a worker needs the relay's "
            "public key"
        )
    if not secret_file:
        raise SettingsError(
            "curve_server_key is set without curve_secret_file: a worker needs its own key"
        )
    return ClientKeys(*secret_key(secret_file), public_key(server_key, "curve_server_key"))


def with_kept_keys(settings: Settings, worker: str = "") -> Settings:
    """Return the settings with the keys that `curve_dir` holds for `worker`, or for the relay;
    missing ones are created.

    An account that can write that folder can send receipts. Raises SettingsError if it cannot be
    used.
    """
    if not settings.curve_dir:
        return settings
    if settings.curve_secret_file or settings.curve_clients_dir or settings.curve_server_key:
        raise SettingsError(
            "curve_dir and other curve_… settings are both set: use one or the other"
        )
    if worker == RELAY:
        raise SettingsError(
            f"worker_id={worker!r}: with curve_dir, this is the name of the relay's key; "
            "use another"
        )
    folder = Path(settings.curve_dir)
    with Translated(
        OSError, lambda error: SettingsError(f"curve_dir={str(folder)!r}: {error.strerror}")
    ):
        # Also for a relay on loopback, which other accounts of the machine can reach.
        private_folder(folder)
        with (folder / "lock").open("a") as lock:  # a worker may start before the relay
            fcntl.flock(lock, fcntl.LOCK_EX)
            secret, public = _kept_keys("relay", RELAY, folder)
            (folder / CLIENTS).mkdir(exist_ok=True)
            if not worker:
                return msgspec.structs.replace(
                    settings,
                    curve_dir="",
                    curve_secret_file=str(secret),
                    curve_clients_dir=str(folder / CLIENTS),
                )
            secret, _ = _kept_keys("worker", worker, folder)
    return msgspec.structs.replace(
        settings,
        curve_dir="",
        curve_secret_file=str(secret),
        curve_server_key=public.read_text().strip(),
    )


def _kept_keys(role: CurveRole, name: str, folder: Path) -> tuple[Path, Path]:
    """Return the files (private, public) of the existing pair, or of a new one.

    An incomplete pair, which a crash can leave, is created again.
    """
    private, public = _files(role, name, folder)
    if (
        private.exists()
        and public.exists()
        and public.read_text().strip() == secret_key(str(private))[0]
    ):
        return private, public
    private.unlink(missing_ok=True)
    public.unlink(missing_ok=True)
    return new_keys(role, name, folder)


def secret_key(path: str) -> tuple[str, str]:
    """Return (public, secret) of a private key's file. Raises SettingsError."""
    with Translated(
        (OSError, UnicodeDecodeError),
        lambda error: SettingsError(
            f"curve_secret_file={path!r}: {getattr(error, 'strerror', None) or 'not a text file'}"
        ),
    ):
        text = Path(path).read_text().strip()
        refuse_exposed(f"curve_secret_file={path!r}", path)
    _check(text, f"curve_secret_file={path!r}")
    return zmq.curve_public(text.encode()).decode(), text


def public_key(text: str, where: str) -> str:
    """Return `text` stripped; raise SettingsError naming `where` if it is not a key."""
    _check(text.strip(), where)
    return text.strip()


def _check(text: str, where: str) -> None:
    # The message does not contain the key: it may be the secret one.
    try:
        fits = len(text) == Z85_CHARACTERS and len(z85.decode(text.encode())) == KEY_BYTES
    except (ValueError, KeyError):  # not its alphabet
        fits = False
    if not fits:
        raise SettingsError(
            f"{where}: not a CURVE key, which is one line of {Z85_CHARACTERS} characters "
            "(Z85): create one with midstream create curve"
        )


def new_keys(role: CurveRole, name: str, folder: Path) -> tuple[Path, Path]:
    """Create a key pair in `folder`, a worker's public key in `folder/clients`; return the files
    (private, public).

    Raises MidstreamError if the name is not valid as a file name, or the key already exists.
    """
    if not name or name != Path(name).name or name.startswith("."):
        raise invalid("name", f"{name!r} is not valid as a file name")
    private, public = _files(role, name, folder)
    for file in (private, public):
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            raise MidstreamError(
                "conflict",
                f"{file} already exists: remove it first, or use another name",
                field="name",
            )
    public_text, secret_text = zmq.curve_keypair()
    for file, key, mode in ((private, secret_text, 0o600), (public, public_text, 0o644)):
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
            out.write(key + b"\n")
    return private, public


def _files(role: CurveRole, name: str, folder: Path) -> tuple[Path, Path]:
    return folder / f"{name}{PRIVATE}", (
        folder / CLIENTS if role == "worker" else folder
    ) / f"{name}{PUBLIC}"

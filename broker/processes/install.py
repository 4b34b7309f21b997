"""Secrets and file modes of one installation on one machine, kept in its data directory.

`midstream up` starts Redis, relay and Flower on loopback, which every account of the machine can
reach. So each of them requires a secret that only the installation's own account can read.
"""

import os
import secrets
import stat
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

import msgspec

from ...schemas.settings.settings import Settings, SettingsError, asks_for_keys, is_loopback
from .private_files import OWNER_ALONE, kept_secret, private_folder

SECRETS = "secrets"  # folder in the data directory
REDIS_PASSWORD = "redis.password"
REDIS_URL = "redis.url"
FLOWER_AUTH = "flower.auth"
CURVE = "curve"
FLOWER_USER = "flower"
PASSWORD_BYTES = 24


def close_folder(data: Path, say: Callable[[str], None]) -> int:
    """Create `data`, or remove other accounts' access to it; returns the umask for files in it.

    If every account has access, the mode comes from a umask, so the group loses its access as well.
    If only the group has access, an operator has granted it, and it stays. Raises SettingsError for
    a folder that is meant to be writable by all, such as /tmp.
    """
    data.mkdir(mode=OWNER_ALONE, parents=True, exist_ok=True)
    mode = data.stat().st_mode
    if mode & stat.S_ISVTX:
        raise SettingsError(
            f"data_dir={str(data)!r} is shared by all accounts: use a folder inside it"
        )
    if mode & stat.S_IRWXO:
        try:
            data.chmod(OWNER_ALONE)
            say(
                f"{data} was readable by other accounts: changed to mode 700 (`chmod g+rx` "
                "admits a group)"
            )
        except PermissionError:
            private_folder(data)  # logs what to do
    return 0o777 & ~(stat.S_IMODE(data.stat().st_mode) & (stat.S_IRWXU | stat.S_IRWXG))


def basic(pair: str) -> str:
    """Return the value of `Authorization` for `user:password`."""
    return f"Basic {b64encode(pair.encode()).decode()}"


def with_secrets(settings: Settings, data: Path, say: Callable[[str], None]) -> Settings:
    """Return the settings, with a folder of CURVE keys and a login for Flower if they lack them."""
    changes = {}
    folder = private_folder(data / SECRETS)
    curve = (
        settings.curve_dir,
        settings.curve_secret_file,
        settings.curve_server_key,
        settings.curve_clients_dir,
    )
    if not any(curve) and not settings.relay_allow_remote:
        changes["curve_dir"] = str(folder / CURVE)
    if not settings.flower_auth and (
        asks_for_keys(settings) or not is_loopback(settings.flower_host)
    ):
        changes["flower_auth"] = kept_secret(
            folder / FLOWER_AUTH, lambda: f"{FLOWER_USER}:{secrets.token_hex(PASSWORD_BYTES)}"
        )
        say(f"flower login: see {folder / FLOWER_AUTH}")
    return msgspec.structs.replace(settings, **changes)


def redis_password(data: Path) -> str:
    """Return the password of the Redis whose data directory is `data`, created at the first call.

    Raises OSError.
    """
    return kept_secret(data / SECRETS / REDIS_PASSWORD, lambda: secrets.token_hex(PASSWORD_BYTES))


def keep_redis_url(url: str, data: Path) -> None:
    """Keep the URL, with its password, of the Redis that has been started on `data`: other
    processes of this account read it as `MIDSTREAM_REDIS_URL_FILE`. Raises OSError.
    """
    file = data / SECRETS / REDIS_URL
    file.unlink(missing_ok=True)
    kept_secret(file, lambda: url)


def kept_redis_url(data: Path) -> str:
    """Return that URL; empty if this account cannot read it."""
    file = data / SECRETS / REDIS_URL
    return file.read_text().strip() if os.access(file, os.R_OK) else ""

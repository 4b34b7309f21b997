"""Access to a bucket: credentials, bounded retries, and errors as the OSErrors that a disk raises.

Credentials are the settings `artifact_access_key` and `artifact_secret_key`; else AWS's own
environment variables; else the profile in AWS's credentials file; else the credentials of the
machine's role. They are in no URI, receipt or log. Credentials of a file are read again every
minute and when they are refused, because temporary ones are replaced before they expire. (obstore
itself renews those of a role.)
"""

import configparser
import errno
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import obstore
from obstore.exceptions import BaseError, PreconditionError

from midstream.schemas.settings.settings import load_settings
from midstream.storage.calls import CALLS, StoreCall
from midstream.storage.store import TRANSIENT

T = TypeVar("T")
R = TypeVar("R")

#: Seconds to connect, and for one request, which transfers a part at most; number of retries, and
#: seconds after which none begins. A request that fails for a transient reason is repeated, and
#: given up before captures that wait for the writers fail
#: (`workers.runner.rows.overload`). A request that is never answered ends so early that the jobs
#: behind it still get their receipts within `capture_timeout_s`.
CONNECT_S = 5
REQUEST_S = 30
RETRIES = 12
RETRY_S = 20
#: Seconds between the tries of a request.
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
#: Seconds for a test write, which callers wait for.
PROBE_S = 5
#: Seconds after which credentials are read again: obstore requests new credentials when its own are
#: valid for less than 5 minutes.
READ_AGAIN_S = 60
RENEWED_S = 300
#: Concurrent requests of this process, over all its stores.
REQUESTS = 32

#: Code of S3, or status → error number, and message for users.
_REASONS: dict[str, tuple[int, str]] = {
    "NoSuchBucket": (errno.ENXIO, "there is no such bucket"),
    "InvalidAccessKeyId": (errno.EACCES, "the access key is unknown there"),
    "SignatureDoesNotMatch": (errno.EACCES, "the secret key does not belong to the access key"),
    "RequestTimeTooSkewed": (
        errno.EACCES,
        ("the clocks of this machine and of the store differ by more than 15 minutes: run NTP"),
    ),
    "ExpiredToken": (errno.EACCES, "the credentials have expired"),
    "InvalidToken": (errno.EACCES, "the session token is not valid"),
    "AccessDenied": (errno.EACCES, "these credentials do not allow it"),
    "AuthorizationHeaderMalformed": (
        errno.EACCES,
        "the bucket is in another region: add ?region=NAME to the store's URI",
    ),
    "PermanentRedirect": (
        errno.EACCES,
        "the bucket is in another region: add ?region=NAME to the store's URI",
    ),
    "XMinioStorageFull": (errno.ENOSPC, "it is full"),
    "QuotaExceeded": (errno.EDQUOT, "its quota is used up"),
    "EntityTooLarge": (errno.EFBIG, "the object is too large for it"),
    "XAmzContentSHA256Mismatch": (errno.EIO, "the bytes that arrived are not those that were sent"),
    "BadDigest": (errno.EIO, "the bytes that arrived are not those that were sent"),
    # An upload was completed twice, because the first response was lost: most servers repeat it.
    "NoSuchUpload": (errno.EBUSY, "it no longer knows the upload"),
    "SlowDown": (errno.EBUSY, "it asks to slow down"),
    "NotImplemented": (errno.ENOSYS, "it does not support the operation"),
    "501": (errno.ENOSYS, "it does not support the operation"),
    "503": (errno.EBUSY, "it is not available"),
    "507": (errno.ENOSPC, "it is full"),
    "416": (errno.ERANGE, "the range is beyond the object's end"),
    "401": (errno.EACCES, "it refuses the credentials"),
    "403": (errno.EACCES, "it refuses the credentials"),
    "429": (errno.EBUSY, "it asks to slow down"),
}
#: Error number → how a request is counted; else `error`.
_OUTCOMES: dict[int | None, str] = {
    errno.ENOENT: "missing",
    errno.ERANGE: "missing",
    errno.ESTALE: "stale",
    errno.EACCES: "refused",
    errno.ENXIO: "refused",
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
}
#: Errors that expired credentials may cause; S3 answers HEAD with 400 and no reason.
REFUSALS = (errno.EACCES, errno.EIO)
#: Codes of a 404 that are not about the object.
_NOT_THE_KEY = frozenset({"NoSuchBucket", "NoSuchUpload"})
_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
#: What obstore's error for a request without a response contains → error number, and message for
#: users, in this order. Such an error has a text but no type, so obstore is pinned to a minor
#: release and a test compares the texts.
_WITHOUT_RESPONSE: dict[str, tuple[int, str]] = {
    r"169\.254\.169\.254": (
        errno.EACCES,
        "{at}: there are no credentials: set artifact_access_key and artifact_secret_key",
    ),
    "kind: Timeout|timed out|Elapsed": (errno.ETIMEDOUT, "{at} does not answer in time"),
    "kind: Connect": (errno.ECONNREFUSED, "{at} cannot be reached"),
    "kind: (Request|Body|Decode)|IncompleteMessage|body error": (
        errno.ECONNRESET,
        "the connection to {at} was cut",
    ),
}


class Stale(OSError):
    """The object is no longer the one that was opened."""


class S3Address(NamedTuple):
    bucket: str
    prefix: str  # without a final "/"
    endpoint: str = ""  # empty: AWS_ENDPOINT_URL, or AWS's own
    region: str = ""  # empty: AWS_REGION, or us-east-1


@lru_cache(maxsize=64)
def client(address: S3Address, quick: bool = False, repeats: bool = False) -> Any:
    """Returns obstore's client of a bucket. Raises SettingsError, OSError.

    `quick`: it fails within `PROBE_S`. `repeats`: it retries requests itself, as an upload in parts
    needs.
    """
    config = {"endpoint": address.endpoint, "region": address.region}
    seconds = PROBE_S if quick else REQUEST_S
    endpoint = (
        address.endpoint
        or os.environ.get("AWS_ENDPOINT_URL_S3")
        or os.environ.get("AWS_ENDPOINT_URL")
        or ""
    )
    options: dict[str, Any] = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=min(CONNECT_S, seconds)),
        "timeout": timedelta(seconds=seconds),
    }
    retries: dict[str, Any] = {
        # obstore does not say how often it repeats, so only the parts of an upload are left to it.
        "max_retries": RETRIES if repeats else 0,
        "retry_timeout": timedelta(seconds=RETRY_S),
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=5),
            "base": 2,
        },
    }
    return obstore.store.S3Store(
        address.bucket,
        prefix=address.prefix or None,
        config={name: value for name, value in config.items() if value},  # type: ignore[arg-type]
        client_options=options,  # type: ignore[arg-type]
        retry_config=retries,  # type: ignore[arg-type]
        credential_provider=_current if _credentials() else None,  # type: ignore[arg-type]
    )


#: The credentials that were read last.
_last: dict[str, str] = {}


def _current() -> dict[str, Any]:
    """Returns the credentials in obstore's form."""
    global _last
    _last = _credentials()
    return {
        "access_key_id": "",
        "secret_access_key": "",
        "token": None,
        "expires_at": datetime.now(UTC) + timedelta(seconds=READ_AGAIN_S + RENEWED_S),
        **_last,
    }


def _credentials_changed() -> bool:
    """Return whether the credentials differ from those that were read last; if so, clients are
    created again.
    """
    replaced = bool(_last) and _credentials() != _last
    if replaced:
        client.cache_clear()
    return replaced


def _credentials() -> dict[str, str]:
    """Returns the credentials of the settings or a file; empty if obstore finds them itself."""
    settings = load_settings()
    if settings.artifact_access_key:
        return {
            "access_key_id": settings.artifact_access_key,
            "secret_access_key": settings.artifact_secret_key,
        }
    if "AWS_ACCESS_KEY_ID" in os.environ:
        return {}
    file = configparser.RawConfigParser()
    file.read(
        Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser()
    )
    profile = os.environ.get("AWS_PROFILE", "default")
    result = dict(file[profile]) if profile in file else {}
    names = {
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "token",
    }
    return {value: result[key] for key, value in names.items() if key in result}


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(REQUESTS, "midstream-s3")


def together(action: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Runs `action` on all items concurrently; returns the results.

    Raises the first error once no action runs any more. An `action` must not call this.
    """
    futures = [_pool().submit(action, item) for item in items]
    wait(futures)
    return [future.result() for future in futures]


def ask(
    address: S3Address, operation: str, action: Callable[[Any, StoreCall], T], key: str = ""
) -> T:
    """Return what `action(client, call)` returns, repeated while it fails for a transient reason.

    Requests are counted under `operation`. Raises OSError.
    """
    until = time.monotonic() + RETRY_S
    pause = FIRST_PAUSE_S
    renewed = False
    for remaining in reversed(range(RETRIES + 1)):
        try:
            with counted(operation) as call, explained(address, key):
                return action(client(address), call)
        except OSError as error:
            if error.errno in REFUSALS and not renewed and _credentials_changed():
                renewed = True
                continue
            if error.errno not in TRANSIENT or not remaining or time.monotonic() + pause > until:
                raise
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, LONGEST_PAUSE_S)
        CALLS.repeated(operation)
    raise AssertionError("the last try returns or raises")


@contextmanager
def counted(operation: str) -> Iterator[StoreCall]:
    with CALLS.call(operation) as call:
        try:
            yield call
        except BaseException as error:
            call.outcome = _outcome(error)
            call.size = 0
            raise


def _outcome(error: BaseException) -> str:
    number = error.errno if isinstance(error, OSError) else None
    return "away" if number in TRANSIENT else _OUTCOMES.get(number, "error")


@contextmanager
def explained(address: S3Address, key: str = "") -> Iterator[None]:
    """Turns obstore's errors into OSErrors: FileNotFoundError for a missing key, `Stale`,
    PermissionError, TimeoutError, …
    """
    try:
        yield
    except PreconditionError:
        raise Stale(
            errno.ESTALE, "the object was changed or removed while it was being read", key
        ) from None
    except (BaseError, FileNotFoundError) as error:
        raise as_os_error(address, key, error) from None


def where(address: S3Address) -> str:
    return f"object storage s3://{address.bucket}" + (
        f" at {address.endpoint}" if address.endpoint else ""
    )


def as_os_error(address: S3Address, key: str, error: Exception) -> OSError:
    text = str(error)
    said = text.partition("\n\nDebug source")[0]
    code = match[1] if (match := _CODE.search(said)) else ""
    status = match[1] if (match := _STATUS.search(said)) else ""
    if isinstance(error, FileNotFoundError) and code not in _NOT_THE_KEY:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
    at = where(address)
    named = f" ({code})" if code else ""
    if (reason := _REASONS.get(code) or _REASONS.get(status)) is not None:
        return OSError(reason[0], f"{at}: {reason[1]}{named}")
    if status:
        number = errno.EBUSY if status.startswith("5") else errno.EIO
        return OSError(number, f"{at} answers {status}{named}")
    for pattern, (number, message) in _WITHOUT_RESPONSE.items():
        if re.search(pattern, text):
            return OSError(number, message.format(at=at))
    return OSError(errno.EIO, f"{at}: {said[:300]}")

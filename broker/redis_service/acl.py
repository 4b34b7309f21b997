"""Redis users: one per role, as lines for Redis' `aclfile`.

A role may run the commands on data, by Redis' own categories, except those that Redis calls
dangerous (KEYS, FLUSHALL, CONFIG, SHUTDOWN, …). The only dangerous command that it may run is INFO,
which reports memory usage. Key patterns separate the roles: only the API reaches API keys; only the
API, which creates webhook secrets, and `callbacks`, which signs with them, reach these secrets.
"""

import hashlib
import os
import secrets
from pathlib import Path
from typing import NamedTuple

from ...schemas.base.errors import MidstreamError, Translated
from ...schemas.jobs.ledger_shares import shares

PASSWORD_BYTES = 32
USERS_FILE = "users.acl"

#: These patterns exclude `ms:keys` (API keys), `ms:key-session:…` (logins to the web page) and
#: `ms:hook-secret:…` (secrets of webhooks).
OPEN_KEYS = (
    "~ms:[^kh]*",
    "~ms:held:*",
    "~ms:hooks",
    "~ms:hook:*",
    "~ms:hook-[^s]*",
    *(pattern for share in shares() for pattern in share.keys),
)
HOOK_SECRETS = ("~ms:hook-secret:*",)
#: Celery's lists of messages: a script that changes a job may append a message to one of them.
QUEUES = ("~midstream.*",)
#: Celery's keys: the queues, delivered messages, the table of queues, queues of events, replies to
#: remote control.
QUEUE_KEYS = (*QUEUES, "~midstream:*", "~_kombu.binding*", "~*.pidbox*", "~celeryev*")
OUR_CHANNELS = ("&ms:changed:*",)
#: Celery's channels of one database. `TASK_CHANNELS`: the events of tasks, which scripts publish.
#: `QUEUE_CHANNELS`: all events, and remote control. A pattern subscription requires permission for
#: exactly that pattern.
TASK_CHANNELS = "&/midstream:{db}.celeryev/task.*"
QUEUE_CHANNELS = ("&/midstream:{db}.celeryev/*", "&/midstream:{db}.celery.pidbox")

DATA = (
    "+@string +@hash +@set +@sortedset +@stream +@list +@keyspace +@transaction "
    "+@scripting +@pubsub +@connection"
)
EVERY_ROLE = (
    f"resetkeys resetchannels -@all {DATA} -@dangerous -script +script|load "
    "+script|exists +info +time"
)


#: The default user is off, so nobody can log in as it. It needs all permissions: from version 7 on,
#: Redis loads its append-only file as this user, and drops what scripts and transactions wrote if
#: the user may not run their commands.
DEFAULT_USER = "user default reset off ~* &* +@all"


class RedisRole(NamedTuple):
    """A part of Midstream, and what it needs of Redis."""

    keys: tuple[str, ...]
    channels: tuple[str, ...]


ROLES: dict[str, RedisRole] = {
    "api": RedisRole(("~ms:*", *QUEUE_KEYS), (*OUR_CHANNELS, *QUEUE_CHANNELS)),
    "worker": RedisRole((*OPEN_KEYS, *QUEUE_KEYS), (*OUR_CHANNELS, *QUEUE_CHANNELS)),
    # if ranks disagree, the relay puts their job back into its queue
    "relay": RedisRole((*OPEN_KEYS, *QUEUES), (*OUR_CHANNELS, TASK_CHANNELS)),
    "callbacks": RedisRole(
        (*OPEN_KEYS, *HOOK_SECRETS, *QUEUE_KEYS), (*OUR_CHANNELS, *QUEUE_CHANNELS)
    ),
    "flower": RedisRole(QUEUE_KEYS, QUEUE_CHANNELS),
}
#: For people, and for replicas at their master: all permissions, with a password.
OPERATOR = "operator"


def rules(role: str, database: int = 0) -> str:
    """Return the permissions of the role's user in the syntax of Redis' ACL SETUSER, without its
    password.
    """
    if role == OPERATOR:
        return "allkeys allchannels +@all"
    return " ".join(
        [
            EVERY_ROLE,
            *ROLES[role].keys,
            *(channel.format(db=database) for channel in ROLES[role].channels),
        ]
    )


def user_line(role: str, password: str, database: int = 0) -> str:
    """Return a line of an aclfile; it contains only the password's SHA-256."""
    return (
        f"user {role} reset on #{hashlib.sha256(password.encode()).hexdigest()} "
        f"{rules(role, database)}"
    )


#: Stands for host and port in a URL that its reader completes.
HOST = "HOST:6379"


def write_users(folder: Path, database: int = 0, host: str = HOST) -> list[Path]:
    """Write `users.acl`, one `<role>.password` per user, and one `<role>.url` per process of
    Midstream, which only their owner can read; return their paths. The default user is switched
    off.

    `database`: the number of the database that Midstream uses. `host`: host and port in the URLs.
    Raises MidstreamError("conflict") if a file exists already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = [DEFAULT_USER]
    written = []
    for role in (*ROLES, OPERATOR):
        password = secrets.token_hex(PASSWORD_BYTES)
        written.append(_write(folder / f"{role}.password", password))
        lines.append(user_line(role, password, database))
        if role in ROLES:
            url = f"rediss://{role}:{password}@{host}/{database}"
            written.append(_write(folder / f"{role}.url", url))
    return [_write(folder / USERS_FILE, "\n".join(lines)), *written]


def _write(path: Path, text: str) -> Path:
    with (
        Translated(
            FileExistsError,
            lambda error: MidstreamError("conflict", f"{path} already exists: use another folder"),
            hidden=True,
        ),
        os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file,
    ):
        file.write(text + "\n")
    return path

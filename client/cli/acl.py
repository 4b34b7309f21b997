"""`midstream acl`: users of Redis for the parts of Midstream."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add `acl` to `midstream`."""
    app.command("acl")(acl)


#: Where Redis' own files name these users.
SERVER_SETTINGS = {
    "replica": "masteruser replica, masterauth: the content of",
    "sentinel": "sentinel auth-user NAME sentinel, sentinel auth-pass NAME: the content of",
}


#: The most databases that a Redis may be configured to have, less one.
MAX_DATABASE = (1 << 31) - 2


def acl(
    folder: Annotated[Path, typer.Option("--dir", help="Folder for the files.")] = Path("acl"),
    database: Annotated[
        int,
        typer.Option(min=0, max=MAX_DATABASE, help="Number of the database that Midstream uses."),
    ] = 0,
) -> None:
    """Write an ACL file for Redis with one least-privilege user per part of Midstream, and their
    passwords.
    """
    from ...broker.ops.acl import ROLES, SERVERS, USERS_FILE, write_users

    write_users(folder, database)
    print(f"redis: aclfile {(folder / USERS_FILE).resolve()}")
    for role in ROLES:
        url, password = f"rediss://{role}@HOST:6379/{database}", folder / f"{role}.password"
        print(f"{role}: MIDSTREAM_REDIS_URL={url} MIDSTREAM_REDIS_PASSWORD_FILE={password}")
    for role in SERVERS:
        print(f"{role}: {SERVER_SETTINGS[role]} {folder / f'{role}.password'}")

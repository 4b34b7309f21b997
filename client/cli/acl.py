"""`midstream acl`: users of Redis for the parts of Midstream."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add `acl` to `midstream`."""
    app.command("acl")(acl)


def acl(
    folder: Annotated[Path, typer.Option("--dir", help="Folder for the files.")] = Path("acl"),
) -> None:
    """Write an ACL file for Redis with one least-privilege user per part of Midstream, and their passwords."""
    from ...broker.ops.acl import ROLES, USERS_FILE, write_users

    write_users(folder)
    print(f"redis: aclfile {(folder / USERS_FILE).resolve()}")
    for role in ROLES:
        print(f"{role}: MIDSTREAM_REDIS_URL=rediss://{role}@HOST:6379/0 MIDSTREAM_REDIS_PASSWORD_FILE={folder / f'{role}.password'}")

"""The commands about a whole installation. What they do is imported when it is needed: a client
without Redis' library has these commands, too.
"""

from pathlib import Path
from typing import Annotated

import typer

from midstream.client.cli.terminal import Connector

from ..running import DataDir

DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")
]


def drain(
    open_: Annotated[
        bool, typer.Option("--open", help="Take new jobs again, and end a drain.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for jobs that run or wait; 0: no limit.", min=0)
    ] = 0.0,
    dry_run: DryRunOption = False,
    data_dir: DataDir = None,
) -> None:
    """Take no new jobs and harvests, and wait until the accepted jobs have ended.

    New ones get 503 `overloaded` from now on, over every address, also after restarts, until
    `midstream drain --open`. Ctrl-C ends the wait, not the drain: a second call goes on waiting.
    """
    from .drain import run

    run(data_dir, opens=open_, timeout=timeout, dry_run=dry_run)


def backup(
    folder: Annotated[Path, typer.Argument(help="A new folder, or that of a backup cut off.")],
    captures: Annotated[
        bool, typer.Option("--captures", help="Copy the files of captures and harvests, too.")
    ] = False,
    sample: Annotated[
        int, typer.Option(help="Number of captures to compare byte for byte.", min=0)
    ] = 20,
    dry_run: DryRunOption = False,
    data_dir: DataDir = None,
) -> None:
    """Copy Redis' data, registered artifacts, settings and secrets, while the service runs; then
    verify the copy by restoring it beside the service.

    A second call goes on where the first was cut off. The folder has prompts, outputs and secrets,
    and is readable to this account alone.
    """
    from .backup import run

    run(folder, data_dir, captures=captures, sample=sample, dry_run=dry_run)


def restore(
    backup: Annotated[Path, typer.Argument(help="The folder of a complete backup.")],
    dry_run: DryRunOption = False,
    data_dir: DataDir = None,
) -> None:
    """Make the data directory of a backup, for the next `midstream up`.

    A folder that is in use, or that has data of its own, is refused. Every file is compared with
    its checksum. A second call goes on where the first was cut off; `midstream up` refuses the
    folder until then.
    """
    from .restore import run

    run(backup, data_dir, dry_run=dry_run)


def rollback(dry_run: DryRunOption = False, data_dir: DataDir = None) -> None:
    """Check whether this version can go on with the data of a newer one, and prepare them for it.

    Run it with the older version, while the stack is stopped. Everything that jobs still need is
    read; what this version cannot read is named, with the version that wrote it, and nothing is
    changed.
    """
    from .rollback import run

    run(data_dir, dry_run=dry_run)


def delete_model(_: Connector, name: str, /, *, dry_run: bool = False) -> None:
    """Delete a model's entry, its registered artifacts, names of source runs and global steering.

    Jobs, captures, and files of artifacts on disk stay. A model with a live worker, or with
    unfinished jobs or harvests, is refused.
    """
    from .models import delete

    if not delete(name, dry_run=dry_run):
        raise typer.Exit

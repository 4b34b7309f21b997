"""The `midstream` command, whose commands other modules have, and installed packages add."""

import re
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ...schemas.base.errors import MidstreamError
from ...schemas.base.version import full_version
from ...schemas.jobs.kinds import of_kinds
from ...schemas.packages import load_all, part
from ...schemas.settings.settings import SettingsError
from ..extras import PACKAGED, MissingExtraError, absent, explained
from ..sdk.client import VERBS
from . import jobs, requests, service, verbs
from .kinds import KINDS
from .terminal import out

#: Entry points of packages: any name → a function that adds commands to the app that it is given.
ADDED_COMMANDS = "midstream.commands"
#: Section of `midstream --help` → its commands, in this order.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Start and stop": ("up", "serve", "demo", "status", "logs", "down", "fetch"),
    "Requests": (
        *("submit", "sweep", "attribute", "dose", "lens", "attention"),
        *("harvest", "survey", "fit"),
    ),
    "Jobs and harvests": ("wait", "events", "cancel", "pause", "resume"),
    "Things, by kind": (*("list", "get", "put", "change", "delete", "export", "check", "create"),),
    "Operations": (
        *("mark", "replay", "top", "doctor", "drain", "backup", "restore", "rollback"),
        *("redeliver", "convert"),
    ),
}
#: Section of the commands of other packages.
ADDED = "Of other packages"
#: First guess at a command → the command, besides those of `VERBS`.
_MEANT = {
    **dict.fromkeys(("run", "generate", "complete"), "submit"),
    **dict.fromkeys(("result", "show"), "get"),
    "features": "submit --set features.sae=NAME",
    "train": "fit probe",
    **dict.fromkeys(("enable policy", "activate policy"), "change policy NAME --set mode=active"),
    **dict.fromkeys(
        ("disable policy", "deactivate policy"), "change policy NAME --set mode=shadow"
    ),
    "dynamic": "get ranks",
    "version": "get server",
    "verify": "doctor --deep",
    "acl": "create acl",
    "stream": "export harvest",
    "start": "up",
    "stop": "down",
}
#: Of click, or of typer's copy of it.
_UsageError: Any = typer.BadParameter.__base__
#: What an error about a command's words names that may be a field.
_FIELD = re.compile(r"No such option: --(\S+)|\((\w[\w.]*)=(\S*)\)")


class Commands(TyperGroup):
    """The commands, in sections; for an unknown one, suggests what was probably meant.

    Those of installed packages are loaded for a list of all, and for a word that is no command of
    this package.
    """

    _whole = False

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands in the order of their sections."""
        self._complete()
        known = [name for names in SECTIONS.values() for name in names]
        added = [name for name in self.commands if name not in known]
        return [name for name in known if name in self.commands] + added

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, with its section set.

        Raises MissingExtraError for a command whose package is not installed.
        """
        if cmd_name not in self.commands:
            self._complete()
        command: Any = super().get_command(ctx, cmd_name)
        if command is not None:
            sections = (title for title, names in SECTIONS.items() if command.name in names)
            command.rich_help_panel = next(sections, ADDED)
        elif cmd_name in PACKAGED:
            raise absent(cmd_name)
        return command

    def _complete(self) -> None:
        """Add the commands of installed packages; one of this package keeps its name."""
        if self._whole:
            return
        self._whole = True
        added = typer.Typer()
        for add in load_all(ADDED_COMMANDS):
            add(added)
        if added.registered_commands or added.registered_groups:
            self.commands = {**typer.main.get_group(added).commands, **self.commands}

    def invoke(self, ctx: Any) -> Any:
        """Run a command. An error about a word that may be a field says how fields are given."""
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            found = _FIELD.search(error.message)
            if near := getattr(error, "possibilities", None):
                error.message += f" (did you mean {near[0]}?)"
                error.possibilities = None
            if found and any("--set" in option.opts for option in error.ctx.command.params):
                name = (found[1] or found[2]).replace("-", "_")
                error.message += f"; a field is given as --set {name}={found[3] or 'VALUE'}"
            raise

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read what stands before the command. An unknown option there may be the command's."""
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            error.message += "; options stand behind the command: midstream list jobs --url URL"
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            self._complete()
        known = {*self.commands, *PACKAGED}
        if args and args[0] not in known and (meant := self._meant(*args[:2])):
            ctx.fail(f"No such command {args[0]!r}. Did you mean 'midstream {meant}'?")
        return super().resolve_command(ctx, args)

    def _meant(self, word: str, after: str = "") -> str:
        """Return the command that is meant by a verb's other name, or by a kind before its verb, as
        in `jobs list`; empty if none is.
        """
        for kind in KINDS:
            if word in (kind.name, kind.plural):
                verb = _MEANT.get(after) or VERBS.get(after, after)
                verb = verb if verb in self.commands else next(iter(kind.acts))
                found = f"{verb} {kind.plural.split()[0] if verb == 'list' else kind.name}"
                return _MEANT.get(f"{after} {kind.name}", found)
        return _MEANT.get(f"{word} {after}") or _MEANT.get(word) or VERBS.get(word, "")


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"midstream {full_version()}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version, with its commit.",
        ),
    ] = False,
) -> None:
    """Activation steering, capture and patching on stock vLLM, as a job service."""


for _commands in (
    *(requests.COMMANDS, jobs.COMMANDS, verbs.COMMANDS, service.COMMANDS),
    *map(part, of_kinds("verbs")),
):
    for _command in _commands:
        app.command(_command.__name__.rstrip("_"))(_command)


def main(arguments: list[str] | None = None) -> Any:
    """Run the console script; every error is one readable line on stderr and a non-zero exit
    status.
    """
    try:
        return app(arguments, prog_name="midstream")
    except (MidstreamError, SettingsError, TimeoutError, OSError) as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        explanation = explained(error)
        if not isinstance(explanation, MissingExtraError):
            raise
        _fail(str(explanation))


def _fail(message: str) -> None:
    out.file.flush()
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(1)


if __name__ == "__main__":
    main()

"""The commands `up` and `serve`, which start the stack on this machine."""

import inspect
import logging
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from midstream.client.cli.options import HOOKS_FORM, overrides
from midstream.client.extras import need
from midstream.schemas.service.global_capture import from_settings
from midstream.schemas.settings.settings import Settings, chosen, engine_options, load_settings

from .engine_packages import COMMANDS, need_engine

#: Where the context has the given flags of `vllm serve`, by the names of vLLM's arguments.
_GIVEN = "midstream.vllm_flags"
_KEYWORD = inspect.Parameter.KEYWORD_ONLY

DataDirOption = Annotated[
    Path | None, typer.Option(help="Folder for Redis data, captures and logs.")
]
EngineOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engine", metavar="NAME=VALUE", help="An option of vLLM, such as seed=1; repeatable."
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any other setting; repeatable."),
]


class ServeCommand(TyperCommand):
    """The command `serve` with the flags of `vllm serve`, which are made when it is parsed: the
    other commands do not wait for them.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the command's parameters and all flags."""
        known = {parameter.name for parameter in self.params}
        self.params += [flag for flag in _flags() if flag.name not in known]
        return super().get_params(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; `--max_model_len` is `--max-model-len`, as for vLLM."""
        return super().parse_args(ctx, [_dashed(arg) for arg in args])

    def invoke(self, ctx: Any) -> Any:
        """Run the command, with the given flags in the context's `meta`."""
        flags = {name: ctx.params.pop(name) for name in [*ctx.params] if name.startswith("flag_")}
        ctx.meta[_GIVEN] = {
            name.removeprefix("flag_"): value for name, value in flags.items() if value is not None
        }
        return super().invoke(ctx)


def _dashed(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


@cache
def _flags() -> list[Any]:
    """Return the flags of `vllm serve` as options, named `flag_` and vLLM's argument."""
    from . import serve_flags as table

    def parameter(name: str) -> inspect.Parameter:
        flag = table.flag(name)
        switch = table.is_switch(name)
        option = typer.Option(
            f"{flag}/--no-{flag[2:]}" if switch else flag,
            *table.SPELLINGS.get(name, "").split(),
            help=table.SETTINGS.get(name)
            or ("no effect" if name in table.NO_EFFECT else "engine option"),
            metavar=None if switch else "…",
            hidden=name not in table.COMMON,
            rich_help_panel="Flags of vllm serve, and the settings that they become",
        )
        kind: Any = Annotated[(bool if switch else str) | None, option]
        return inspect.Parameter(f"flag_{name}", _KEYWORD, default=None, annotation=kind)

    def command(**_: Any) -> None: ...

    names = (*table.COMMON, *(name for name in table.arguments() if name not in table.COMMON))
    vars(command)["__signature__"] = inspect.Signature(list(map(parameter, names)))
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return list(typer.main.get_command(app).params)


def up(
    model: Annotated[
        str | None, typer.Option(help="Checkpoint folder or hub name; default: the demo model.")
    ] = None,
    data_dir: DataDirOption = None,
    port: Annotated[int | None, typer.Option(help="Port of the API; 0: any free port.")] = None,
    flower_port: Annotated[
        int | None, typer.Option(help="Port of Flower; 0: any free port.")
    ] = None,
    global_capture: Annotated[
        str | None,
        typer.Option(
            metavar=HOOKS_FORM,
            help="Capture these sites for every request, such as post_block:all;pre_attn:0-17.",
        ),
    ] = None,
    systemd: Annotated[
        bool,
        typer.Option(
            "--systemd", help="Start nothing: write a unit of systemd that runs it, and say how."
        ),
    ] = False,
    engine: EngineOption = None,
    set_: Set = None,
) -> None:
    """Run the whole stack on this machine until Ctrl-C.

    Settings come from the file named by MIDSTREAM_CONFIG, MIDSTREAM_* in the environment, and these
    options, in increasing precedence.
    """
    options = {
        "model": model,
        "data_dir": str(data_dir) if data_dir else None,
        "api_port": port,
        "flower_port": flower_port,
        "global_capture.sites": global_capture,
        "engine_options": engine_options(engine or []) or None,
    }
    _run("up", set_, options, unit=systemd)


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Checkpoint folder or hub name.")],
    data_dir: DataDirOption = None,
    set_: Set = None,
) -> None:
    """Run the whole stack with this model until Ctrl-C, with the flags of `vllm serve`.

    Every flag of `vllm serve` becomes a setting or an option of the engine, or is refused with the
    reason. Settings also come from MIDSTREAM_CONFIG and the environment, as with `midstream up`.
    """
    from .serve_flags import translated

    options = {
        "model": model,
        "data_dir": str(data_dir) if data_dir else None,
    }
    _run("serve", set_, options | translated(context.meta[_GIVEN]))


def check_engine(settings: Settings) -> None:
    """Check the options of the engine. Raises SettingsError."""
    from midstream.workers.engines import check_options

    logging.disable(logging.WARNING)  # vLLM logs when it is imported
    check_options(settings)
    logging.disable(logging.NOTSET)


def _run(
    command: str, set_: list[str] | None, options: dict[str, Any], *, unit: bool = False
) -> None:
    """Check the settings, and run the stack until Ctrl-C; with `unit`, write a unit instead."""
    given = overrides(set_ or [])
    settings = load_settings(given=given, **options)
    fixed = chosen(given=given, **options).keys()
    if settings.engine == Settings().engine:
        from .serve_flags import check_quickly

        check_quickly(settings.engine_options)
        parts = [part for part in COMMANDS[command] if part != "model" or not settings.model]
        need_engine(f"`midstream {command}`", *parts)
    else:
        need("up", f"`midstream {command}`", "client", "up")
    from midstream.broker.ledger.people.keys import of_settings

    from .supervisor import Supervisor

    from_settings(settings)  # raises for an invalid global capture before anything starts
    of_settings(settings)  # likewise, for an invalid key
    check_engine(settings)
    if unit:
        from .systemd import write

        print(*write(settings, chosen(given=given, **options)), sep="\n")
        return
    stack = Supervisor(settings, say=lambda line: print(line, flush=True), fixed=fixed)
    raise typer.Exit(stack.run())

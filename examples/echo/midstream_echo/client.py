"""The client's call `echo`, and the command of that name."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from midstream.client.cli.terminal import AsJson, out, print_json, with_client
from midstream.client.render.forms import Form
from midstream.client.sdk.calls import Awaits, Calls, M, call
from midstream.client.sdk.jobs import Jobs
from midstream.schemas.jobs.results import JobResult

from .records import EchoRequest, EchoResult


class Echoes(Calls[M]):
    """Echoes of prompts."""

    @call
    async def run(self, /, request: EchoRequest | None = None, **fields: Any) -> JobResult:
        """Run an echo, by struct or by its fields (`prompts=[…], layer=…`); the result has it as
        `echo`, beside its captures.
        """
        body = await self._body(request, fields, EchoRequest)
        view = await self._submit("/v1/echoes", body, None)
        return await Jobs[Awaits](self._io)._ended(view.id)


def shown(result: EchoResult) -> list[str]:
    return [f"{text!r}, layer {result.layer}" for text in result.texts]


@with_client
def echo(
    client: Any,
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="Prompts.")],
    layer: Annotated[int, typer.Option(help="Whose rows are captured.")] = 0,
    json_: AsJson = False,
) -> None:
    """Echo prompts, and capture one layer."""
    result = client.echo(None, prompts=prompts, layer=layer)
    if not print_json(result, json_):
        out.print(*shown(result.echo), sep="\n")


COMMANDS = [echo]
#: Class → its form.
FORMS = {EchoResult: Form(printed=shown)}

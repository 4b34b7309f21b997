"""The served models, and their tokenizers."""

import asyncio
from collections.abc import Sequence

import anyio.to_thread

from ....broker.ledger.jobs.ledger import Ledger
from ....schemas.base.errors import MidstreamError, invalid, suggestion
from ....schemas.base.records import from_msgpack
from ....schemas.jobs.models import ModelInfo, TokenizerBundle
from ....schemas.service.compatibility import misfit_of
from ....schemas.settings.settings import Settings
from ...web.aside import on
from ..prompts.tokenizer import Codec, CodecAnswer, CodecQuestion
from ..prompts.tokenizer_pool import Helpers


class Served:
    """Models by name, with the tokenizers that this process has read. Belongs to one event loop."""

    def __init__(self, settings: Settings, ledger: Ledger) -> None:
        self._ledger = ledger
        self._helpers = Helpers(settings)
        self._codecs: dict[tuple[str, int], Codec] = {}
        self._reading = asyncio.Lock()

    async def close(self) -> None:
        await self._helpers.close()

    async def model(self, name: str) -> ModelInfo:
        """Return the model of this name. Raises `not_found`, which lists the served models."""
        return await self.usable(name, await self._ledger.model(name))

    async def usable(self, name: str, info: ModelInfo | None) -> ModelInfo:
        """Return `info`, read under this name. Raises what `model` raises."""
        if info is None:
            raise unknown_model(name, [model.name for model in await self._ledger.models()])
        if (trouble := misfit_of(info)) is not None:
            raise trouble
        return info

    async def the_model(self, name: str | None) -> ModelInfo:
        """Return the named model, or without a name the only served one.

        Raises `not_found`, and a 400 if no name is given and several models are served.
        """
        if name is not None:
            return await self.model(name)
        models = await self._ledger.models()
        if len(models) > 1:
            live = {worker.model for worker in await self._ledger.workers()}
            models = [model for model in models if model.name in live] if len(live) == 1 else models
        if len(models) > 1:
            raise invalid(
                "model",
                "is required: several models are served",
                allowed=", ".join(model.name for model in models),
            )
        if not models:
            raise unknown_model("", [])
        return models[0]

    async def codec(self, info: ModelInfo) -> Codec:
        """Return the model's tokenizer, which a process reads once per content hash and model
        length.
        """

        async def fetch() -> bytes:
            raw = await self._ledger.get_blob(info.tokenizer)
            if raw is None:
                raise MidstreamError(
                    "unavailable",
                    f"the tokenizer of {info.name!r} has not been published yet",
                    field="model",
                )
            return raw

        key = (info.tokenizer, info.max_model_len)
        async with self._reading:
            # concurrent first requests share one read
            known = self._codecs.get(key)
            if known is None:
                raw = await fetch()
                loop = asyncio.get_running_loop()

                async def helpers(question: CodecQuestion) -> CodecAnswer:
                    return await on(loop, self._helpers.ask(info.tokenizer, fetch, question))

                known = await anyio.to_thread.run_sync(
                    lambda: Codec(from_msgpack(raw, TokenizerBundle), info.max_model_len, helpers)
                )
                self._codecs[key] = known
        return known


def unknown_model(name: str, served: Sequence[str]) -> MidstreamError:
    """Return the error for a model that no worker has ever served; it lists those `served`."""
    if not served:
        return MidstreamError(
            "unavailable", "no model is served: no worker has started yet", field="model"
        )
    return MidstreamError(
        "not_found",
        f"unknown model {name!r}",
        field="model",
        allowed=", ".join(sorted(served)),
        hint=suggestion(name, served),
    )

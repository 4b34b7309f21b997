"""Models and workers in the ledger: what each worker publishes, and which workers are alive."""

import msgspec
import redis.asyncio

from ....schemas.base.errors import MidstreamError
from ....schemas.base.records import from_json, to_json
from ....schemas.jobs.models import SHOWN_IDENTITY, GradientInfo, ModelInfo, WorkerInfo
from ....schemas.jobs.queues import Queue
from ....schemas.service.compatibility import OLDEST_WIRE, WIRE
from ....schemas.settings.settings import Settings
from ..core import scripts
from ..core.connection import LedgerConnection
from ..core.reachable import reachable


def _encoded(info: ModelInfo | WorkerInfo) -> bytes:
    """Encode as JSON, with the wire versions that this process supports."""
    return to_json(msgspec.structs.replace(info, wire=WIRE, oldest_wire=OLDEST_WIRE))


class Fleet(LedgerConnection):
    """The models that workers have served, and the live workers."""

    def __init__(self, client: redis.asyncio.Redis, settings: Settings) -> None:
        super().__init__(client, settings)
        self._models: dict[str, tuple[bytes, ModelInfo]] = {}  # as stored, and decoded

    @reachable
    async def publish_model(self, info: ModelInfo | GradientInfo, worker: WorkerInfo) -> None:
        """Publish the model of `worker` with the wire versions that this process supports, or what
        it knows of the model as a gradient worker, and record that the worker is alive.

        Raises MidstreamError("model_changed") while another live worker serves a model of another
        identity under the name. While vLLM workers serve the name, gradient workers have to fit
        them; otherwise those that live.
        """
        reply = await self.run(
            "publish",
            name=worker.model,
            queue=worker.queue,
            worker=worker.worker,
            boot=worker.boot,
            identity=info.identity,
            model=_encoded(info) if isinstance(info, ModelInfo) else to_json(info),
            info=_encoded(worker),
            lease_s=self.settings.lease_s,
        )
        outcome, *rest = scripts.text(reply)
        if outcome == "refused":
            other, identity = rest
            raise MidstreamError(
                "model_changed",
                f"the live worker {other!r} serves {worker.model!r} with the identity "
                f"{identity[:SHOWN_IDENTITY] or '(not reported)'}, and "
                f"this worker's model has {info.identity[:SHOWN_IDENTITY]}: one name stands for "
                "one model. Stop the workers of the other "
                "one first (its accepted jobs then fail, or wait: setting on_model_change), or "
                "serve this one under another model_name",
                field="model",
            )

    @reachable
    async def gradients(self, name: str) -> GradientInfo | None:
        """Return what a gradient worker of this model name has published last; None: there was
        none. While the model is being replaced, the identity may be another than `model` has.
        """
        raw = await self.redis.hget("ms:gradients", name)
        return None if raw is None else from_json(raw, GradientInfo)

    @reachable
    async def model(self, name: str) -> ModelInfo | None:
        return self._read_model(name, await self.redis.hget("ms:models", name))

    @reachable
    async def watched_model(self, name: str) -> tuple[ModelInfo | None, list[str]]:
        """Return the model, and the names of the policies that apply to all its traffic, ascending;
        in one round trip, because every submission needs both.
        """
        async with self.redis.pipeline(transaction=False) as pipe:
            pipe.hget("ms:models", name)
            pipe.smembers(f"ms:policies-watching:{name}")
            raw, watching = await pipe.execute()
        return self._read_model(name, raw), sorted(policy.decode() for policy in watching)

    def _read_model(self, name: str, raw: bytes | None) -> ModelInfo | None:
        if raw is None:
            return None
        if self._models.get(name, (b"",))[0] != raw:  # read by every request, rarely changed
            self._models[name] = raw, from_json(raw, ModelInfo)
        return self._models[name][1]

    @reachable
    async def serves(self, name: str, identity: str) -> bool:
        """Return whether jobs for the model of this identity can be accepted: it is published under
        the name, and so is its tokenizer.

        False after Redis has lost its data.
        """
        info = await self.model(name)
        return (
            info is not None
            and info.identity == identity
            and bool(await self.redis.exists(f"ms:blob:{info.tokenizer}"))
        )

    @reachable
    async def models(self) -> list[ModelInfo]:
        """Return every model that a worker has ever served, by name."""
        raw = await self.redis.hgetall("ms:models")
        return [from_json(raw[name], ModelInfo) for name in sorted(raw)]

    @reachable
    async def heartbeat(self, info: WorkerInfo) -> None:
        """Record that this worker is alive for another `lease_s`."""
        async with self.redis.pipeline(transaction=True) as pipe:
            pipe.hset("ms:workers", info.worker, _encoded(info))
            pipe.set(f"ms:alive:{info.worker}", info.boot, px=int(self.settings.lease_s * 1000))
            await pipe.execute()

    @reachable
    async def workers(self, queue: Queue | None = "") -> list[WorkerInfo]:
        """Return the workers of a queue whose heartbeat is fresh, by id; None: of all queues."""
        raw = await self.redis.hgetall("ms:workers")
        infos = [from_json(raw[name], WorkerInfo) for name in sorted(raw)]
        boots = (
            await self.redis.mget([f"ms:alive:{info.worker}" for info in infos]) if infos else []
        )
        return [
            info
            for info, boot in zip(infos, boots, strict=True)
            if boot is not None
            and boot.decode() == info.boot
            and (queue is None or info.queue == queue)
        ]

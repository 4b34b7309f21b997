"""The certification run: real requests before the first request of a user, whose rows prove each
hook point of the loaded model.

`docs/architectures.md` says what is proven, and why so. The requests go through scheduler, KV cache
and sites as any other: vLLM's dummy run skips attention, and a forward pass of our own would skip
scheduler and cache. All rows together grow with the model's depth, so the ranks judge their rows
(`workers.runner.certificate`), and the rows that one stage hands to the next are compared here.
"""

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from ....broker.processes.private_files import private_folder
from ....schemas.base.errors import KindError, MidstreamError
from ....schemas.base.records import to_json
from ....schemas.base.tensors import Tensor, content_hash, from_numpy
from ....schemas.jobs.certificates import Certificate, LawFigure
from ....schemas.jobs.jobs import Output
from ....schemas.jobs.models import ModelInfo
from ....schemas.model.banks import banks_of
from ....schemas.prompts.selectors import HOOKS, INSIDE, Hook
from ....schemas.requests.specs import StoredCapture, StoredSteering, content_key
from ...runner.certificate.laws import (
    STREAM,
    TOLERANCES,
    CertificatePlan,
    Copy,
    JudgedShape,
    Judgement,
    LawFinding,
    LawFindings,
    LayerEdit,
    direction,
    judge_boundary,
    judge_entered,
    verdict,
    verdict_inside,
)
from ..protocol import EngineRequest
from ..requests import trial_request
from .comparison import (
    BEYOND,
    STREAM_TENSORS,
    ComparedPrompt,
    Comparison,
    Difference,
    FinalLogits,
    RowsOfSites,
    figures,
    longer,
    suspects,
    verdict as compared_verdict,
)
from .reference import Checkpoint

#: The job of all requests of the run. No job of a user has this id.
JOB = "certificate"
BASE, CHUNKED, AGAIN, MIXED = range(4)  # numbers of requests; requests with edits follow
GENERATED = 6  # tokens that the base request generates
CHUNK = 5  # tokens of a chunk, for the request that is prefilled in chunks
LEAST = 8  # tokens of the prompt
MOST = 64
# about how many positions of the prompt are compared; with routed experts their median counts
COMPARED = 8
TIMEOUT_S = 60.0
_SEED = 1


class Uncertified(KindError):
    """The residual stream could not be proven: the engine must not start."""

    KIND = "engine_failed"


@dataclass(frozen=True)
class Access:
    """The engine's functions that the run uses."""

    generate: Callable[[EngineRequest], Any]
    call: Callable[[str, tuple[Any, ...]], Awaitable[list[Any]]]
    holding: Callable[..., AbstractAsyncContextManager[None]]
    llm: Any
    stages: Sequence[range]
    steering_rows: int
    chunked: bool
    step_tokens: int


async def certify(
    access: Access,
    info: ModelInfo,
    source: Checkpoint,
    *,
    trusted: bool = False,
    required: bool = False,
    **facts: Any,
) -> Certificate:
    """Run the certification for the hooks of `info`; afterwards the ranks forget the run.

    `source`: where transformers finds the checkpoint. `required`: refuse a checkpoint that cannot
    be compared, instead of adding a caveat. `trusted`: serve a hook whose neighbours are not
    installed although it is unproven; the certificate and every manifest then have a caveat.
    `facts`: fields of the certificate that only the engine knows.

    Raises Uncertified if `pre_attn` and `post_block` cannot be proven, or if rows differ from
    transformers'.
    """
    started = time.monotonic()
    unshown: dict[Hook, str] = {}
    caveats = list(info.caveats)
    comparing = Comparison(source, info.dtype)
    try:
        await access.call("midstream_certify", ("begin", {}))
        run = _Run(access, info)
        findings, skipped = await run.findings()
        hooks = [hook for hook in HOOKS if hook in info.hooks]
        of_inside = [finding for finding in findings if set(finding.hooks) & info.inside.keys()]
        of_stream = [finding for finding in findings if not set(finding.hooks) & info.inside.keys()]
        absent, laws = verdict(
            hooks, of_stream, info.num_layers, unshown=unshown if trusted else None
        )
        refused, more = verdict_inside(list(info.inside), of_inside, info.num_layers)
        laws = [*laws, *more]
        caveats += [
            f"{hook} is unproven: the setting hooks leaves out what would prove it"
            for hook in unshown
        ]
        compared, uncompared = await run.compare(comparing)
        if comparing.refused:
            caveats.append(f"not compared with transformers: {comparing.refused}")
    except MidstreamError as error:
        raise Uncertified(
            f"the certification run failed: {error.detail}; certify=false serves the model unproven"
        ) from error
    finally:
        await access.call("midstream_certify", ("end", {"caveats": caveats}))
    compared_laws, lacking = figures(compared, [*hooks])
    certificate = Certificate(
        model=info.name,
        architecture=info.architecture,
        version=info.version,
        runner=info.runner,
        dtype=info.dtype,
        tp=info.tp,
        pp=info.pp,
        created=time.time(),
        seconds=time.monotonic() - started,
        proven=[
            hook for hook in [*hooks, *info.inside] if hook not in {*absent, *unshown, *refused}
        ],
        unproven={str(hook): why for hook, why in unshown.items()},
        absent={**{str(hook): why for hook, why in absent.items()}, **refused},
        laws=[*(_figure(law) for law in laws), *compared_laws],
        not_compared=skipped | uncompared | lacking,
        row_norms=run.norms_of(run.sizes),
        first_norms=run.norms_of(run.first_sizes),
        caveats=caveats,
        readings=run.readings,
        extensions=info.extensions,
        **facts,
    )
    if not (certificate.proven or unshown) or any(hook in absent for hook in STREAM):
        what = "the residual stream" if certificate.proven else "any of its hooks"
        broken = "; ".join(f"{hook}: {why}" for hook, why in absent.items())
        raise Uncertified(f"{info.architecture}: the rows of {what} could not be proven: {broken}")
    if comparing.refused and required:
        raise Uncertified(
            f"{info.architecture} cannot be compared with transformers (setting "
            f"compare=require): {comparing.refused}"
        )
    if (wrong := compared_verdict(compared)) is not None and comparing.reference is not None:
        fields = ", ".join(suspects(comparing.reference.config)) or "none"
        raise Uncertified(
            f"{info.architecture}: {wrong}: vLLM computes this checkpoint otherwise than "
            "transformers, which defines it. Fields of "
            f"config.json that are not transformers' defaults: {fields}. With compare=off "
            "it is served all the same, and a caveat says so"
        )
    return certificate


def keep(certificate: Certificate, folder: Path) -> Path:
    """Write the certificate to a file named by its content without times; returns the path."""
    content = msgspec.to_builtins(msgspec.structs.replace(certificate, created=0.0, seconds=0.0))
    name = re.sub(r"[^A-Za-z0-9._-]", "-", certificate.model)
    path = private_folder(folder) / f"{name}-{content_key(content)[:12]}.json"
    partial = path.with_suffix(".partial")
    partial.write_bytes(to_json(certificate))
    partial.replace(path)
    return path


def _figure(law: LawFindings) -> LawFigure:
    tolerance = TOLERANCES[law.kind]
    figure = law.figure * tolerance
    return LawFigure(
        law=law.law,
        figure=float(f"{figure:.3g}") if figure < 1e9 else -1.0,
        tolerance=tolerance,
        checked=law.checked,
        layer=law.layer,
        hooks=list(law.hooks),
        ok=law.ok,
    )


class _Run:
    """One certification."""

    def __init__(self, access: Access, info: ModelInfo) -> None:
        self._access = access
        self._info = info
        self._hooks: list[Hook] = [hook for hook in HOOKS if hook in info.hooks]
        self._layers = list(range(info.num_layers))
        length = min(max(16, info.num_layers + 4), MOST, info.max_model_len - GENERATED - 2)
        if length < LEAST:
            least = LEAST + GENERATED + 2
            raise Uncertified(
                f"max_model_len {info.max_model_len} leaves no room for the certification run, "
                f"which needs {least}"
            )
        self._prompt = self._tokens(_SEED, length)
        self._first = length - 1
        self._compared = sorted({1, *range(length - 1, 1, -max(1, length // COMPARED))})
        self._generated: list[int] = []
        self._positions: list[int] = []  # captured positions of the base request
        self._number = MIXED
        self.readings: dict[str, str] = {}  # kind of reading → why it is not served
        # hook → layer → root mean square of the base request's rows, and of its first one
        self.sizes: dict[str, dict[int, float]] = {}
        self.first_sizes: dict[str, dict[int, float]] = {}

    def _tokens(self, seed: int, length: int) -> list[int]:
        # Special tokens, such as those that stand for images, are at either end of a vocabulary.
        size = self._info.vocab_size
        draws = np.random.default_rng(seed).integers(size // 8, size // 2, size=length)
        tokens: list[int] = draws.tolist()
        return tokens

    async def _ask(self, action: str, **arguments: Any) -> list[Any]:
        """Make a call of the certification on every rank."""
        return await self._access.call("midstream_certify", (action, arguments))

    async def findings(self) -> tuple[list[LawFinding], dict[str, str]]:
        """Run the requests; return the findings, and law → why it was not compared."""
        self._positions = positions = [
            *self._compared,
            *range(len(self._prompt), len(self._prompt) + GENERATED - 1),
        ]
        everything = StoredCapture(
            sites={hook: self._layers for hook in self._hooks}, positions=positions, tag="base"
        )
        first = msgspec.structs.replace(everything, positions=[0], tag="first")
        await self._ask("watch", request=BASE)
        inside = {hook: self._layers for hook in INSIDE if hook in self._info.inside}
        inside_captures = [
            StoredCapture(
                sites=sites,
                positions="all_prompt",
                tag="inside",
                row=self._info.inside[next(iter(sites))],
            )
            for sites in banks_of(inside).values()
        ]
        base = await self._generate(
            BASE, self._prompt, [everything, first, *inside_captures], max_tokens=GENERATED
        )
        await self._ended([BASE])
        await self._ask("unwatch")
        self._generated = base.token_ids
        self.sizes = await self._sizes(positions)
        self.first_sizes = await self._sizes([0])
        plan = CertificatePlan(
            base=BASE,
            tokens=[*self._prompt, *self._generated],
            positions=positions,
            first=self._first,
            copies=[],
            edits=[],
        )
        await self._run_batch(plan, everything, self.sizes)
        judged = await self._ask("judge", **msgspec.to_builtins(plan, builtin_types=(bytes,)))
        judgements = [msgspec.convert(judgement, Judgement) for judgement in judged]
        self.readings = {
            kind: why for judgement in judgements for kind, why in judgement.readings.items()
        }
        skipped = {
            law: why for judgement in judgements for law, why in judgement.not_compared.items()
        }
        if not self._access.chunked:
            skipped["rows of a chunked prefill"] = "the engine does not split prefills"
        findings = [finding for judgement in judgements for finding in judgement.findings] + list(
            self._stages(judgements)
        )
        return findings, skipped

    async def _sizes(self, positions: list[int]) -> dict[str, dict[int, float]]:
        """Return hook → layer → root mean square of the base request's rows at the positions."""
        sizes: dict[str, dict[int, float]] = {hook: {} for hook in self._hooks}
        for rank in await self._ask("sizes", request=BASE, positions=positions):
            for hook, of_layers in rank.items():
                sizes[hook] |= {int(layer): size for layer, size in of_layers.items()}
        return sizes

    def norms_of(self, sizes: dict[str, dict[int, float]]) -> dict[str, list[float]]:
        """Return hook → of each layer, the norm of a row of this root mean square."""
        width = math.sqrt(self._info.hidden_size)
        return {
            hook: [float(f"{of_layers[layer] * width:.3g}") for layer in self._layers]
            for hook, of_layers in sizes.items()
        }

    async def compare(self, comparing: Comparison) -> tuple[list[Difference], dict[str, str]]:
        """Compare rows of the first layers, and logits, with transformers'; return the differences,
        and law → why it was not compared.

        Compares the base request, and a prompt that is longer than the windows of the model's
        layers as far as the engine takes it.
        """
        if not (hooks := [hook for hook in self._hooks if hook in STREAM_TENSORS]):
            comparing.refused = (
                comparing.refused or "the setting hooks leaves out pre_attn and post_block"
            )
        if (reference := await comparing.plan()) is None:
            return [], {}
        kept, kinds, missing = reference.truncation
        layers = self._layers[:kept]
        skipped = {}
        base = [*self._prompt, *self._generated]
        prompts = [
            ComparedPrompt(
                base,
                self._positions,
                await self._rows_of(BASE, self._positions, self._hooks, layers),
            )
        ]
        room = (
            self._info.max_model_len - 2
            if self._access.chunked
            else min(self._info.max_model_len, self._access.step_tokens) - 2
        )
        length, beyond = longer(reference.config.get_text_config(), len(base), room)
        if length:
            prompts.append(await self._long(length, layers))
        if beyond:
            skipped["transformers' rows beyond a window"] = (
                f"{', '.join(beyond)}: longer than the {max(length, len(base))} tokens compared"
            )
        if missing:
            skipped["transformers' rows of every kind of layer"] = (
                f"{missing} of {kinds} kinds begin above the {kept} layers compared"
            )
        head = None
        later = [position for position in self._positions if position >= self._first]
        of_ranks = await self._ask("logits", request=BASE, positions=later)
        logits = next(filter(None, of_ranks), None)
        if "post_block" in hooks and logits:
            rows = await self._rows_of(BASE, later, ["post_block"], self._layers[-1:])
            head = FinalLogits(
                rows["post_block", self._layers[-1]],
                torch.stack([_floats(logit) for logit in logits]),
            )
        else:
            skipped["logits = transformers'"] = (
                "vLLM's own logits, or what leaves the last layer, were not seen"
            )
        return await comparing.judge(prompts, head), skipped

    async def _long(self, length: int, layers: Sequence[int]) -> ComparedPrompt:
        tokens = self._tokens(_SEED + 1, length)
        positions = list(range(length - BEYOND, length + 1))
        number = self._next()
        captured = StoredCapture(
            sites={hook: list(layers) for hook in self._hooks}, positions=positions, tag="long"
        )
        output = await self._generate(number, tokens, [captured], max_tokens=2)
        await self._ended([number])
        return ComparedPrompt(
            [*tokens, *output.token_ids],
            positions,
            await self._rows_of(number, positions, self._hooks, layers),
        )

    async def _rows_of(
        self, request: int, positions: Sequence[int], hooks: Sequence[Hook], layers: Sequence[int]
    ) -> RowsOfSites:
        ranks = await self._ask(
            "rows",
            request=request,
            positions=list(positions),
            hooks=list(hooks),
            layers=list(layers),
        )
        return {(hook, layer): self._rows(raw) for rank in ranks for hook, layer, raw in rank}

    async def _run_batch(
        self, plan: CertificatePlan, everything: StoredCapture, sizes: dict[str, dict[int, float]]
    ) -> None:
        """Run all requests after the base in one batch, and the edit of the last layer after it;
        add them to `plan`.
        """
        prompts = StoredCapture(sites=everything.sites, positions=self._compared, tag="base")
        tokens = [*self._prompt, *self._generated[:-1]]
        later = [position for position in plan.positions if position > self._first]
        requests: list[Coroutine[Any, Any, Output]] = []
        if self._access.chunked:
            requests.append(self._generate(CHUNKED, self._prompt, [prompts], chunk=CHUNK))
            plan.copies.append(
                Copy("rows of a chunked prefill = those of a whole one", CHUNKED, self._compared)
            )
        requests.append(self._generate(AGAIN, tokens, [everything]))
        plan.copies.append(
            Copy("rows of decoding = those of a prefill of the same tokens", AGAIN, later)
        )
        # an unedited request captures the layers and positions that edits are compared at
        groups = list(self._groups())
        diagonals = [self._diagonal(group, f"group{number}") for number, group in enumerate(groups)]
        requests.append(
            self._generate(
                MIXED,
                self._prompt,
                [prompts, *(capture for group in diagonals for capture in group)],
            )
        )
        plan.copies.append(Copy("rows in a mixed batch = those alone", MIXED, self._compared))
        vector = from_numpy(direction(self._info.hidden_size))
        name = content_hash(vector)
        for hook in self._hooks:
            stream = "pre_attn" if "pre_attn" in sizes else hook
            size = sizes[hook if hook == "mlp_in" else stream]
            for group, captures in zip(groups, diagonals, strict=True):
                edited = [
                    layer
                    for layer in group
                    if not (hook == "post_block" and layer == self._layers[-1])
                ]
                if edited:
                    number = self._next()
                    edits = [
                        LayerEdit(
                            number, MIXED, hook, layer, self._place(group, layer), size[layer]
                        )
                        for layer in edited
                    ]
                    plan.edits += edits
                    steering = self._steering(edits, name)
                    requests.append(self._generate(number, self._prompt, captures, steering))

        async def fetch(_: str) -> Tensor:
            return vector

        async with self._access.holding([name], fetch):
            await self._together(requests)
            if self._info.exits:
                plan.copies.append(await self._shallow())
            if "post_block" in self._hooks:
                last = self._layers[-1]
                plan.final = LayerEdit(
                    self._next(), BASE, "post_block", last, self._first, sizes["post_block"][last]
                )
                capture = StoredCapture(
                    sites={"post_block": [last]}, positions=[self._first], tag="final"
                )
                await self._ask("watch", request=plan.final.request)
                await self._generate(
                    plan.final.request, self._prompt, [capture], self._steering([plan.final], name)
                )
                await self._ask("unwatch")
        await self._ended(
            [BASE, *([CHUNKED] if self._access.chunked else []), *range(AGAIN, self._number + 1)]
        )

    async def _shallow(self) -> Copy:
        """Run a request alone whose forward ends at half of the layers."""
        depth = max(1, len(self._layers) // 2)
        number = self._next()
        sites = {hook: self._layers[:depth] for hook in self._hooks}
        capture = StoredCapture(sites=sites, positions=self._compared, tag="shallow")
        await self._generate(number, self._prompt, [capture], max_tokens=0)
        law = "rows of a forward that ends early = those of a whole one"
        return Copy(law, number, self._compared, depth)

    async def _together(self, requests: Sequence[Coroutine[Any, Any, Output]]) -> list[Output]:
        """Run requests that begin in the same step, as far as they fit; returns their outputs."""
        llm = self._access.llm
        await llm.pause_generation(mode="keep", clear_cache=False)
        running = [asyncio.ensure_future(request) for request in requests]
        try:
            for _ in range(100):
                if len(llm.output_processor.request_states) >= len(running) or any(
                    item.done() for item in running
                ):
                    break
                await asyncio.sleep(0.001)
        finally:
            await llm.resume_generation()
        try:
            return list(await asyncio.gather(*running))
        finally:
            for item in running:
                item.cancel()

    def _groups(self) -> Iterator[list[int]]:
        """Yields groups of layers that one request edits, each layer at its own position: as many
        as the prompt has positions and the steering table rows. So the cost grows with layers plus
        positions, not with their product.
        """
        size = max(1, min(len(self._prompt) - 2, self._access.steering_rows))
        for first in range(0, len(self._layers), size):
            yield self._layers[first : first + size]

    def _place(self, group: Sequence[int], layer: int) -> int:
        """Returns the position at which a layer is edited. Higher layers are edited at earlier
        positions, so that no edited row depends on another edit.
        """
        return self._first - group.index(layer)

    def _diagonal(self, group: Sequence[int], tag: str) -> list[StoredCapture]:
        captures = []
        for layer in group:
            sites = {hook: [layer] for hook in self._hooks}
            if "pre_attn" in sites and layer + 1 < len(self._layers):
                sites["pre_attn"] = [layer, layer + 1]
            captures.append(
                StoredCapture(
                    sites=sites, positions=[self._place(group, layer)], tag=f"{tag}-{layer}"
                )
            )
        return captures

    def _next(self) -> int:
        self._number += 1
        return self._number

    @staticmethod
    def _steering(edits: Sequence[LayerEdit], vector: str) -> list[StoredSteering]:
        return [
            StoredSteering(
                layers=[edit.layer],
                hook=edit.hook,
                positions=[edit.position],
                family="add",
                tensors=[vector],
                scale=edit.scale,
            )
            for edit in edits
        ]

    async def _generate(
        self,
        number: int,
        tokens: list[int],
        captures: list[StoredCapture],
        steering: Sequence[StoredSteering] = (),
        *,
        max_tokens: int = 1,
        chunk: int = 0,
    ) -> Output:
        ask = trial_request(
            JOB, number, tokens, max_tokens, captures=captures, steering=list(steering), chunk=chunk
        )
        async for progress in self._access.generate(ask):
            if progress.finished is not None:
                output: Output = progress.finished
        return output

    async def _ended(self, requests: Sequence[int]) -> None:
        """Wait until every rank has the rows of these requests.

        Raises Uncertified with the reason of the first request that failed.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            ranks = await self._ask("ended")
            for rank, ended in enumerate(ranks):
                for request, why in ended.items():
                    if why:
                        raise Uncertified(f"request {request} on rank {rank}: {why}")
            if all(
                int(request) in {int(key) for key in ended}
                for ended in ranks
                for request in requests
            ):
                return
            if time.monotonic() > deadline:
                raise Uncertified(
                    f"the certification run took longer than {TIMEOUT_S:g} s to record its rows"
                )
            await asyncio.sleep(0.002)

    def _stages(self, judgements: Sequence[Judgement]) -> Iterator[LawFinding]:
        """Yields findings on the rows that one stage hands to the next, of the recording ranks."""
        recording = [judgement.edges for judgement in judgements if judgement.edges]
        shape = JudgedShape(self._hooks, torch.finfo(getattr(torch, self._info.dtype)).eps)
        for held, before, after in zip(self._access.stages, recording, recording[1:], strict=False):
            layer = held[-1]
            if "last" in before and "first" in after:
                yield judge_boundary(
                    shape, self._rows(before["last"]), self._rows(after["first"]), layer
                )
            if (edited := before.get(f"edited {layer}")) and (
                entered := after.get(f"entered {layer}")
            ):
                remaining, added = self._rows(edited)
                yield judge_entered(shape, remaining[None], added[None], self._rows(entered), layer)

    def _rows(self, raw: bytes) -> torch.Tensor:
        return _floats(raw).view(-1, self._info.hidden_size)


def _floats(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.float32)

"""A rank's part of the certification run: keeps the rows of real requests, and judges them with the
loaded modules.

`workers.engine.proof.certificate` makes the requests. Rows pass the same sites, planner and writer
threads as any capture. Only the writers' last step differs: rows stay in memory, and no receipt
leaves the rank. Of hook points inside attention and MLP, the loaded modules, applied to their rows,
must give the rows of other hooks: every rank judges its own columns, and all ranks of a stage call
modules that reduce over the ranks, in the same order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from vllm.distributed import get_pp_group, get_tp_group
from vllm.forward_context import set_forward_context

from ....schemas.model.attention import AttentionKind, weights
from ....schemas.prompts.selectors import HOOKS, Hook
from ....schemas.readings.lens import StoredLens
from ..hooks.layer_kinds import attention_of, choosers
from ..hooks.sites import decoder, held_layers, without_sites
from ..plane.inside_hooks import Inner
from .laws import (
    CertificatePlan,
    JudgedShape,
    Judgement,
    LawFinding,
    judge_boundary,
    judge_edit,
    judge_layer,
    judge_same,
    rowwise,
)
from .module_laws import JudgedStage, ModuleLaws, after_norms, first_output, norms_behind
from .observed import KeptRows, ObservedRequests
from .together import StageRanks


class InsideLaws:
    """Judges one rank's rows of a prompt, whose positions were all captured at the hooks inside, in
    order.
    """

    def __init__(
        self,
        inners: Mapping[Hook, Sequence[Inner]],
        stage: JudgedStage,
        kept: KeptRows,
        plan: CertificatePlan,
    ) -> None:
        """`inners`: the hooks' locations."""
        self._inners = inners
        self._stage = stage
        self._layers = stage.layers
        self._shape = stage.shape
        self._kept = kept
        self._plan = plan
        # positions at which the residual hooks were captured too, and their rows
        self._places = [position for position in plan.positions if position <= plan.first]
        self._compared = kept.of(plan.base, self._places)

    def findings(self, together: StageRanks) -> Iterator[LawFinding]:
        """Yield the findings of all laws whose hooks are present.

        If a module raises on all ranks, its law has no finding, and the run continues.
        """
        laws: dict[str, Callable[[int, int], Iterator[LawFinding]]] = {
            "output": partial(self._through, "z", "attn_out"),
            "down": partial(self._through, "mlp_act", "mlp_out"),
            "router": self._router,
            "attention": self._attention,
            "projections": self._projections,
        }
        for name, law in laws.items():
            for place, number in enumerate(self._layers):
                found: list[LawFinding] = []
                # a generator, which runs within the attempt
                judge = partial(found.extend, law(place, number))
                together.attempt(f"{name} of layer {number}", judge)
                yield from found

    def _held(self, hook: Hook, number: int) -> torch.Tensor | None:
        """Return the rows of the whole prompt; None if another rank records them."""
        if (self._plan.base, hook, number) not in self._kept.rows:
            return None
        return self._kept.of(self._plan.base, range(self._plan.first + 1))(hook, number)

    def _all_held(self, hooks: Sequence[Hook], number: int) -> list[torch.Tensor]:
        """Return the rows of these hooks; none if one is absent, or another rank records it."""
        if not set(hooks) <= self._inners.keys():
            return []
        held = [row for hook in hooks if (row := self._held(hook, number)) is not None]
        return held if len(held) == len(hooks) else []

    def _through(self, hook: Hook, into: Hook, place: int, number: int) -> Iterator[LawFinding]:
        """Judge whether the projection after `hook` computes the rows of `into`, directly or with a
        norm after the branch.
        """
        rows = self._held(hook, number) if hook in self._inners else None
        if rows is None or into not in self._shape.hooks:
            return
        given = self._stage.loaded(rows)[self._places]
        output = first_output(self._inners[hook][place].module(given))
        if not self._stage.records:
            return
        expected = self._compared(into, number)
        tolerance = self._shape.tolerance("module")
        figure = min(
            rowwise(item, expected, tolerance, median=self._shape.routes(number))
            for item in after_norms(output, norms_behind(self._layers[number]))
        )
        yield LawFinding(f"projection({hook}) = {into}", (hook,), number, figure, "module")

    def _router(self, place: int, number: int) -> Iterator[LawFinding]:
        if "router" not in self._inners or "mlp_in" not in self._shape.hooks:
            return
        rows = [self._compared("mlp_in", number)] if self._stage.records else []
        given = self._stage.shared(rows, len(self._places))
        logits = first_output(self._inners["router"][place].module(given))
        if (held := self._held("router", number)) is not None:
            figure = rowwise(
                logits.float().cpu(), held[self._places], self._shape.tolerance("module")
            )
            yield LawFinding("gate(mlp_in) = router", ("router",), number, figure, "module")

    def _attention(self, place: int, number: int) -> Iterator[LawFinding]:
        if not (rows := self._all_held(("q", "k", "v", "z"), number)):
            return
        query, key, value, z = rows
        # with one rank and no gathering: the kind of this rank's heads
        kind = attention_of(number, self._layers[number], lambda values: values, 1)
        if kind is None or kind.refused:
            return
        output = attend(query, key, value, kind, self._inners["k"][place].columns.row.width)
        yield LawFinding(
            "attention(q, k, v) = z",
            ("q", "k", "v"),
            number,
            rowwise(output, z, self._shape.tolerance("batch")),
            "batch",
        )

    def _projections(self, place: int, number: int) -> Iterator[LawFinding]:
        if not (rows := self._all_held(("q_proj", "k_proj", "q", "k"), number)):
            return
        layer = self._layers[number]
        attention = self._inners["q"][place].module
        parent = next(
            (
                part
                for part in layer.modules()
                if any(child is attention for child in part.children())
            ),
            layer,
        )
        norms = _norms(parent)
        width = self._inners["q"][place].columns.row.width
        query, key = (
            _normed(norms.get(letter), self._stage.loaded(row), width)
            for letter, row in zip("qk", rows[:2], strict=True)
        )
        candidates = [(query, key)]
        rotary = next(
            (
                child
                for name, child in parent.named_children()
                if "rotary" in name or "rope" in name
            ),
            None,
        )
        if rotary is not None:
            positions = torch.arange(len(query), device=self._stage.device)
            candidates.append(rotary(positions, query.clone(), key.clone()))
        tolerance = self._shape.tolerance("module")
        hooks = ("q_proj", "k_proj")
        computed = zip(*candidates, strict=True)
        for hook, expected, given in zip(hooks, rows[2:], computed, strict=True):
            figure = min(
                rowwise(item.reshape(expected.shape).float().cpu(), expected, tolerance)
                for item in given
            )
            yield LawFinding(
                f"norm and rotary embedding of {hook}", (hook,), number, figure, "module"
            )


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kind: AttentionKind, width: int
) -> torch.Tensor:
    """Return causal attention of `kind` over a whole prompt, float32 `[tokens, heads × value
    width]`. `width`: of query and key heads.
    """
    queries, keys, values = (rows.double().numpy() for rows in (query, key, value))
    heads = queries.shape[1] // width
    key_heads = keys.shape[1] // width
    positions = np.arange(len(queries))
    values = values.reshape(len(values), key_heads, -1)
    outputs = []
    for head in range(heads):
        shared = head * key_heads // heads
        pattern = weights(
            queries[:, head * width : (head + 1) * width],
            keys[:, shared * width : (shared + 1) * width],
            kind,
            head,
            positions,
            positions,
        )
        outputs.append(pattern @ values[:, shared])
    return torch.from_numpy(np.concatenate(outputs, axis=1)).float()


def _norms(parent: nn.Module) -> dict[str, nn.Module]:
    """Return `q` or `k` → its norm."""
    return {
        letter: child
        for letter in "qk"
        for name, child in parent.named_children()
        if name.startswith(f"{letter}_") and "norm" in name
    }


def _normed(norm: nn.Module | None, rows: torch.Tensor, width: int) -> torch.Tensor:
    if norm is None:
        return rows
    by_head = max((parameter.numel() for parameter in norm.parameters()), default=width) <= width
    return first_output(norm(rows.reshape(-1, width) if by_head else rows)).reshape(rows.shape)


if TYPE_CHECKING:
    from ..hooks.architectures import Adapter
    from ..plane.data_plane import DataPlane


class Certifier:
    """Certification on one rank; exists while the certification runs."""

    def __init__(
        self,
        plane: "DataPlane",
        worker: Any,
        adapter: "Adapter",
        config: Any,
        hooks: Sequence[Hook],
        inside: Mapping[Hook, Sequence[Inner]],
        *,
        traced: bool,
    ) -> None:
        """`hooks`: hooks of the residual stream; `inside`: locations of the other hooks."""
        self._inside = inside
        self._plane = plane
        self._config = config
        self._model: Any = worker.get_model()
        layers = dict(held_layers(self._model, adapter))
        self._stage = JudgedStage(
            model=self._model,
            adapter=adapter,
            layers=layers,
            parent=decoder(self._model, adapter),
            dtype=config.model_config.dtype,
            shape=_shape(adapter, layers, hooks, config.model_config.dtype),
            records=get_tp_group().rank_in_group == 0,
        )
        self._layers = layers
        self._shape = self._stage.shape
        self._records = self._stage.records
        self._together = StageRanks(get_tp_group())
        self._seen = ObservedRequests(plane, worker, adapter, layers, traced=traced)
        self._kept = self._seen.kept
        self._findings: list[LawFinding] = []
        self._skipped: dict[str, str] = {}
        self._edges: dict[str, bytes] = {}  # see `Judgement`

    # --- While requests run

    def watch(self, request: int) -> None:
        """See `ObservedRequests.watch`."""
        self._seen.watch(request)

    def unwatch(self) -> None:
        self._seen.unwatch()

    def ended(self) -> dict[int, str]:
        return dict(self._kept.ended)

    def sizes(self, request: int, positions: list[int]) -> dict[str, dict[int, float]]:
        """Return hook → layer → root mean square of the rows, by which edits are scaled."""
        if not self._records:
            return {}
        rows = self._kept.of(request, positions)
        return {
            hook: {layer: float(rows(hook, layer).square().mean().sqrt()) for layer in self._layers}
            for hook in self._shape.hooks
        }

    def rows(
        self, request: int, positions: list[int], hooks: list[Hook], layers: list[int]
    ) -> list[tuple[Hook, int, bytes]]:
        """Return float32 rows of a request at the hooks and layers that this rank records."""
        if not self._records:
            return []
        kept = self._kept.of(request, positions)
        held = [layer for layer in layers if layer in self._layers]
        return [(hook, layer, self._raw(kept(hook, layer))) for hook in hooks for layer in held]

    def logits(self, request: int, positions: list[int]) -> list[bytes]:
        """Return the float32 logits that vLLM's sampler got for a request; empty if this rank did
        not see all of them.
        """
        result = [self._seen.logits.get((request, position)) for position in positions]
        return (
            [self._raw(item[0]) for item in result if item is not None]
            if all(item is not None for item in result)
            else []
        )

    # --- Judging

    def judge(self, plan: CertificatePlan) -> Judgement:
        """Judge all laws of `plan`.

        Every rank of a stage calls the same modules in the same order, since these reduce over the
        ranks; only one rank has rows to compare. Raises FailedAloneError.
        """
        lens = self._plane.readings.reader(StoredLens)
        modules = ModuleLaws(self._stage, self._seen, lens, self._findings, self._skipped)
        if self._seen.skipped:
            self._skipped["EAGLE-3 auxiliary states"] = self._seen.skipped
        self._together.attempt("rows", lambda: self._judge_rows(plan), needed=True)
        with (
            torch.inference_mode(),
            set_forward_context(None, self._config),
            without_sites(self._model),
        ):
            self._attempt("MLP", modules.mlp, plan)
            if self._inside:
                self._attempt("hooks inside attention and MLP", self._judge_inside, plan)
            if get_pp_group().is_first_rank:
                self._attempt("embedding", modules.embedding, plan)
            if get_pp_group().is_last_rank:
                self._attempt("logits", modules.logits, plan)
            self._attempt("logit lens", modules.lens, plan)
        if self._seen.most < 2:
            self._skipped["rows in a mixed batch"] = "no step had more than one request"
        return Judgement(self._findings, self._skipped, self._edges, modules.readings)

    def _judge_rows(self, plan: CertificatePlan) -> None:
        if self._records:
            self._sums(plan)
            self._copies(plan)
            self._edits(plan)
            self._states(plan)
            self._ends(plan)

    def _judge_inside(self, plan: CertificatePlan) -> None:
        laws = InsideLaws(self._inside, self._stage, self._kept, plan)
        self._findings += laws.findings(self._together)

    def _attempt(
        self, law: str, judge: Callable[[CertificatePlan], None], plan: CertificatePlan
    ) -> None:
        """Judge a law; if no rank can call its module alone, the law is only skipped."""
        if why := self._together.attempt(law, lambda: judge(plan)):
            self._skipped[law] = f"its module cannot be called separately: {why}"

    def _sums(self, plan: CertificatePlan) -> None:
        rows = self._kept.of(plan.base, plan.positions)
        for layer in self._layers:
            self._findings += judge_layer(self._shape, rows, layer)
            if "post_block" in self._shape.hooks and self._joined(layer):
                self._findings.append(
                    judge_boundary(
                        self._shape, rows("post_block", layer), rows("pre_attn", layer + 1), layer
                    )
                )

    def _copies(self, plan: CertificatePlan) -> None:
        for copy in plan.copies:
            got = self._kept.of(copy.request, copy.positions)
            expected = self._kept.of(plan.base, copy.positions)
            for layer in self._layers:
                if copy.depth and layer >= copy.depth:
                    break
                for hook in self._shape.hooks:
                    name = f"{hook}: {copy.law}"
                    self._findings.append(
                        judge_same(
                            self._shape, name, hook, layer, got(hook, layer), expected(hook, layer)
                        )
                    )

    def _edits(self, plan: CertificatePlan) -> None:
        for edit in plan.edits:
            layer = edit.layer
            at = [edit.position]
            edited = self._kept.of(edit.request, at)
            if layer not in self._layers:
                if edit.hook == "post_block" and self._joined(layer):
                    self._edges[f"entered {layer}"] = self._raw(edited("pre_attn", layer + 1))
                continue
            added = self._stage.added(edit.scale)
            entered = (
                edited("pre_attn", layer + 1)
                if edit.hook == "post_block" and self._joined(layer)
                else None
            )
            self._findings += judge_edit(
                shape=self._shape,
                hook=edit.hook,
                layer=layer,
                edited=edited,
                plain=self._kept.of(edit.plain, at),
                added=added,
                entered=entered,
            )
            if edit.hook == "post_block" and entered is None:
                self._edges[f"edited {layer}"] = self._raw(
                    torch.cat([edited("post_block", layer), added])
                )

    def _joined(self, layer: int) -> bool:
        """Return whether this rank has the rows that enter the next layer."""
        return layer + 1 in self._layers and "pre_attn" in self._shape.hooks

    def _states(self, plan: CertificatePlan) -> None:
        positions = [position for position in plan.positions if position <= plan.first]
        for layer, states in self._seen.aux.items():
            if "post_block" in self._shape.hooks:
                rows = self._kept.of(plan.base, positions)("post_block", layer)
                figure = rowwise(rows, states[positions].float(), self._shape.tolerance("same"))
                self._findings.append(
                    LawFinding(
                        "post_block = vLLM's EAGLE-3 auxiliary state",
                        ("post_block",),
                        layer,
                        figure,
                        "same",
                    )
                )

    def _ends(self, plan: CertificatePlan) -> None:
        rows = self._kept.of(plan.base, plan.positions)
        if {"pre_attn", "post_block"} <= set(self._shape.hooks):
            self._edges["first"] = self._raw(rows("pre_attn", min(self._layers)))
            self._edges["last"] = self._raw(rows("post_block", max(self._layers)))

    @staticmethod
    def _raw(rows: torch.Tensor) -> bytes:
        return bytes(rows.float().contiguous().numpy().tobytes())

    def end(self, caveats: list[str]) -> None:
        """End the run, and drop its rows. `caveats`: written to every later manifest."""
        self._seen.close()
        self._plane.describe(caveats=tuple(caveats))


def _shape(
    adapter: "Adapter", layers: Mapping[int, nn.Module], hooks: Sequence[Hook], dtype: torch.dtype
) -> JudgedShape:
    routing = {number for number, layer in layers.items() if choosers(layer)}
    # A later stage does not know the layers of earlier ones, and assumes that they have experts:
    # most models have experts in all layers but the first.
    first = min(routing if get_pp_group().is_first_rank else layers) if routing else len(layers)
    return JudgedShape(
        [hook for hook in HOOKS if hook in hooks],
        torch.finfo(dtype).eps,
        lambda layer: adapter.of(layer).laws,
        routing.__contains__,
        lambda layer: bool(routing) and layer >= first,
    )

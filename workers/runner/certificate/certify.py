"""A rank's part of the certification run: keeps the rows of real requests, and judges them on the
loaded modules.

The requests are those of `workers.engine.certificate`. Rows come through the same sites, planner
and writer threads as any capture; only the writers' last step is another: rows stay here in memory,
and no receipt leaves the rank.
"""

import logging
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import nn
from vllm.distributed import get_pp_group, get_tp_group
from vllm.forward_context import set_forward_context

from ....schemas.base.dtypes import DTYPES
from ....schemas.jobs.receipts import Receipt
from ....schemas.prompts.selectors import HOOKS, Hook
from ....schemas.requests.readings import StoredLens
from ..files.finished_rows import FinishedCapture, Outcome
from ..hooks.routing_kinds import choosers
from ..hooks.sites import decoder, held_layers, language_model, without_sites
from ..readings.logit_lens import Lens
from .certify_inside import InsideLaws
from .laws import (
    Finding,
    Rows,
    Shape,
    factor_of,
    judge_boundary,
    judge_edit,
    judge_layer,
    judge_module,
    judge_parts,
    judge_same,
    rowwise,
    sumwise,
)

if TYPE_CHECKING:
    from ..base.engine_step import StepView
    from ..hooks.architectures import Adapter
    from ..plane.data_plane import DataPlane
    from ..plane.inside_hooks import Inner

#: Children of a decoder layer that are not its MLP.
_NOT_MLP = re.compile(r"norm|(^|_)ln(_|$)|attn|attention|rotary|mamba|mixer|conv|drop|^act")
#: Children of the module that holds the layers which do not come between embedding and first layer.
_FINAL_NORM = re.compile(r"^(norm|norm_f|ln_f|final_norm|final_layer_?norm)$")
_NORM = re.compile(r"norm|ln_f")

#: Copies of an edited row whose experts a router chooses, which differ by one rounding at most.
NUDGES = 8

logger = logging.getLogger(__name__)


class EditRun(msgspec.Struct):
    """A request that adds a vector at `hook` of each of `layers`, at the position of the same place
    in `positions`.
    """

    request: int
    plain: int  # the request next to it with the same tokens and no edits
    hook: Hook
    layers: list[int]
    positions: list[int]
    scales: list[float]


class Copy(msgspec.Struct):
    """A request whose rows must be those of the base, at these positions."""

    law: str
    request: int
    positions: list[int]


class Plan(msgspec.Struct):
    """Laws that all ranks judge. Requests are numbers."""

    base: int
    tokens: list[int]  # prompt and generated
    positions: list[int]  # captured of the base, ascending
    first: int  # the first position with a next token: the last of the prompt
    copies: list[Copy]
    edits: list[EditRun]
    final: EditRun | None = None  # an edit of the last layer's `post_block` at `first`


class Judgement(msgspec.Struct):
    """Judgement of one rank."""

    findings: list[Finding]
    not_compared: dict[str, str]
    # float32 rows at the stage's first and last layer, for the neighbouring stages
    edges: dict[str, bytes]
    readings: dict[str, str] = {}  # kind of reading → why it is not served after all


def direction(hidden_size: int) -> np.ndarray:
    """The vector of all edits, float32 `[hidden_size]`, of about unit size in every element."""
    return np.random.default_rng(16).normal(size=hidden_size).astype(np.float32)


class Kept:
    """Takes the place of consumers and outbox. Called from writer threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # (request, hook, layer) → position → row
        self.rows: dict[tuple[int, str, int], dict[int, torch.Tensor]] = {}
        self.ended: dict[int, str] = {}  # request → why it failed; empty: it did not

    def consume(self, captures: Sequence[FinishedCapture]) -> list[Outcome]:
        for capture in captures:
            for hook, layers in capture.sites.items():
                for layer in layers:
                    raw = np.frombuffer(
                        b"".join(capture.rows(hook, layer)), dtype=DTYPES[capture.dtype].raw
                    )
                    held = (
                        torch.from_numpy(raw.copy())
                        .view(getattr(torch, capture.dtype))
                        .view(-1, capture.hidden_size)
                    )
                    with self._lock:
                        self.rows.setdefault((capture.spec.request, hook, layer), {}).update(
                            zip(capture.positions, held, strict=True)
                        )
        return [Outcome()] * len(captures)

    def receipt(self, receipt: Receipt) -> None:
        with self._lock:
            self.ended[receipt.request] = (
                "" if receipt.status == "ok" else receipt.message or receipt.status
            )

    def of(self, request: int, positions: Sequence[int]) -> Rows:
        """float32 rows of a request at these positions.

        Raises KeyError where one was not captured.
        """
        return lambda hook, layer: torch.stack(
            [self.rows[request, hook, layer][position] for position in positions]
        ).float()


class Certifier:
    """One per rank, while the certification runs."""

    def __init__(
        self,
        plane: "DataPlane",
        runner: Any,
        adapter: "Adapter",
        config: Any,
        hooks: Sequence[Hook],
        inside: "Mapping[Hook, Sequence[Inner]]",
        *,
        traced: bool,
    ) -> None:
        """`hooks`: of the residual stream; `inside`: where the others are."""
        self._inside = inside
        self._plane, self._runner, self._adapter, self._config, self._traced = (
            plane,
            runner,
            adapter,
            config,
            traced,
        )
        self._model: Any = runner.get_model()
        self._dtype: torch.dtype = config.model_config.dtype
        self._kept = Kept()
        self._layers = dict(held_layers(self._model, adapter))
        self._parent = decoder(self._model, adapter)
        routing = {number for number, layer in self._layers.items() if choosers(layer)}
        # Of the layers of earlier stages this rank does not know; most models have experts in all
        # layers but the first.
        first = (
            min(routing if get_pp_group().is_first_rank else self._layers)
            if routing
            else len(self._layers)
        )
        eps, laws = torch.finfo(self._dtype).eps, (lambda layer: adapter.of(layer).laws)
        present = [hook for hook in HOOKS if hook in hooks]
        self._shape = Shape(
            present, eps, laws, routing.__contains__, lambda layer: bool(routing) and layer >= first
        )
        self._records = get_tp_group().rank_in_group == 0
        self._findings: list[Finding] = []
        self._skipped: dict[str, str] = {}
        self._readings: dict[str, str] = {}
        # layer → what vLLM itself reads behind it for EAGLE-3
        self._aux: dict[int, torch.Tensor] = {}
        self._most = 0  # requests in one step
        # the watched request and its last position, in its own step
        self._alone: tuple[int, int] | None = None
        self._watched = -1  # request
        # (request, position) → what vLLM's sampler got
        self._logits: dict[tuple[int, int], torch.Tensor] = {}
        # (request, position) → the final hidden state that it got them from
        self._final: dict[tuple[int, int], torch.Tensor] = {}
        plane.divert(self._kept)
        plan, compute_logits = plane.plan, self._model.compute_logits

        def noted(view: "StepView") -> None:
            self._most = max(self._most, len(view.requests))
            only = view.requests[0] if len(view.requests) == 1 and self._watched >= 0 else None
            self._alone = (
                (self._watched, only.first_position + only.num_rows - 1)
                if only is not None
                else None
            )
            plan(view)

        def computed(*args: Any, **kwargs: Any) -> Any:
            logits = compute_logits(*args, **kwargs)
            state = next(iter((*args, *kwargs.values())))
            if self._alone is not None and len(state) == 1:
                # on every rank, also on those that get no logits
                self._final[self._alone] = state.detach().clone()
                if logits is not None:
                    self._logits[self._alone] = logits.detach().float().cpu()
            return logits

        plane.plan = noted  # type: ignore[method-assign]
        self._restore = compute_logits
        self._model.compute_logits = computed

    # -- while requests run
    # ----------------------------------------------------------------------------------------------

    def watch(self, request: int) -> None:
        """Keep the logits of the one request that runs now; of the first, also what vLLM reads
        behind the layers for EAGLE-3.
        """
        self._watched = request
        if request:
            return
        why = self._unwatched()
        if why:
            self._skipped["EAGLE-3 auxiliary states"] = why
            return
        layers = sorted(self._layers)
        try:
            self._model.set_aux_hidden_state_layers(tuple(layer + 1 for layer in layers))
        except Exception as error:
            self._skipped["EAGLE-3 auxiliary states"] = (
                f"the model does not take the layers: {error}"
            )
            return
        forward = self._model.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if not isinstance(output, tuple):
                return output
            hidden, states = output
            if not self._aux:
                self._aux = {
                    layer: state.detach().cpu().clone()
                    for layer, state in zip(layers, states, strict=True)
                }
            return hidden

        self._model.forward = watched

    def _unwatched(self) -> str:
        if self._traced:
            return "the forward pass is compiled"
        if not hasattr(self._model, "set_aux_hidden_state_layers"):
            return "the model has none"
        if self._adapter.variant.backend:
            return "vLLM's Transformers backend would keep its hooks"
        if not get_pp_group().is_last_rank or get_pp_group().world_size > 1:
            return "pipeline stages"
        return (
            "drafts use them"
            if getattr(self._runner, "use_aux_hidden_state_outputs", False)
            else ""
        )

    def unwatch(self) -> None:
        self._watched = -1
        if "forward" in self._model.__dict__ and "EAGLE-3 auxiliary states" not in self._skipped:
            del self._model.forward
            self._model.set_aux_hidden_state_layers(())

    def ended(self) -> dict[int, str]:
        return dict(self._kept.ended)

    def sizes(self, request: int, positions: list[int]) -> dict[str, dict[int, float]]:
        """Hook → layer → root mean square of the rows: an edit is made as large as what it is added
        to.
        """
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
        """float32 rows of a request, of the hooks and layers that this rank records."""
        if not self._records:
            return []
        kept, held = (
            self._kept.of(request, positions),
            [layer for layer in layers if layer in self._layers],
        )
        return [(hook, layer, self._raw(kept(hook, layer))) for hook in hooks for layer in held]

    def logits(self, request: int, positions: list[int]) -> list[bytes]:
        """float32 logits that vLLM's sampler got of a request; empty where this rank did not see
        all of them.
        """
        result = [self._logits.get((request, position)) for position in positions]
        return (
            [self._raw(item[0]) for item in result if item is not None]
            if all(item is not None for item in result)
            else []
        )

    # -- judging
    # ----------------------------------------------------------------------------------------------

    def judge(self, plan: Plan) -> Judgement:
        """Every rank of a stage takes the same path through the modules, which reduce over the
        ranks; one has rows to compare.
        """
        edges: dict[str, bytes] = {}
        if self._records:
            self._sums(plan)
            self._copies(plan)
            self._edits(plan, edges)
            self._states(plan)
            self._edges(plan, edges)
        with (
            torch.inference_mode(),
            set_forward_context(None, self._config),
            without_sites(self._model),
        ):
            self._attempt("MLP", self._modules, plan)
            if self._inside:
                self._attempt("hooks inside attention and MLP", self._judge_inside, plan)
            if get_pp_group().is_first_rank:
                self._attempt("embedding", self._embedding, plan)
            if get_pp_group().is_last_rank:
                self._attempt("logits", self._output, plan)
            self._attempt("logit lens", self._lens, plan)
        if self._most < 2:
            self._skipped["rows in a mixed batch"] = "no step had more than one request"
        return Judgement(self._findings, self._skipped, edges, self._readings)

    def _judge_inside(self, plan: Plan) -> None:
        prompt, compared = (
            range(plan.first + 1),
            [position for position in plan.positions if position <= plan.first],
        )
        rows = self._kept.of(plan.base, compared)

        def held(hook: Hook, number: int) -> torch.Tensor | None:
            present = self._kept.rows.get((plan.base, hook, number))
            return None if present is None else self._kept.of(plan.base, prompt)(hook, number)

        def shared(hook: Hook, number: int) -> torch.Tensor:
            return self._shared([rows(hook, number)] if self._records else [], len(compared))

        laws = InsideLaws(
            self._inside,
            self._layers,
            self._shape,
            held=held,
            compared=rows if self._records else None,
            places=compared,
            shared=shared,
            dtype=self._dtype,
            device=next(self._parent.parameters()).device,
        )
        self._findings += laws.findings()

    def _attempt(self, law: str, judge: Callable[[Plan], None], plan: Plan) -> None:
        """A module that cannot be called alone proves nothing, and breaks nothing else."""
        try:
            judge(plan)
        except Exception as error:
            logger.warning("certification: %s", law, exc_info=True)
            self._skipped[law] = (
                f"its module cannot be called by itself: {error or type(error).__name__}"
            )

    def _sums(self, plan: Plan) -> None:
        rows = self._kept.of(plan.base, plan.positions)
        for layer in self._layers:
            self._findings += judge_layer(self._shape, rows, layer)
            if "post_block" in self._shape.hooks and self._joined(layer):
                self._findings.append(
                    judge_boundary(
                        self._shape, rows("post_block", layer), rows("pre_attn", layer + 1), layer
                    )
                )

    def _copies(self, plan: Plan) -> None:
        for copy in plan.copies:
            got, needed = (
                self._kept.of(copy.request, copy.positions),
                self._kept.of(plan.base, copy.positions),
            )
            for layer in self._layers:
                for hook in self._shape.hooks:
                    name = f"{hook}: {copy.law}"
                    self._findings.append(
                        judge_same(
                            self._shape, name, hook, layer, got(hook, layer), needed(hook, layer)
                        )
                    )

    def _edits(self, plan: Plan, edges: dict[str, bytes]) -> None:
        for edit in plan.edits:
            for layer, position, scale in zip(
                edit.layers, edit.positions, edit.scales, strict=True
            ):
                if layer not in self._layers:
                    if (
                        edit.hook == "post_block"
                        and layer + 1 in self._layers
                        and "pre_attn" in self._shape.hooks
                    ):
                        edges[f"entered {layer}"] = self._raw(
                            self._kept.of(edit.request, [position])("pre_attn", layer + 1)
                        )
                    continue
                edited, added = self._kept.of(edit.request, [position]), self._added(scale)
                entered = (
                    edited("pre_attn", layer + 1)
                    if edit.hook == "post_block" and self._joined(layer)
                    else None
                )
                self._findings += judge_edit(
                    self._shape,
                    edit.hook,
                    layer,
                    edited,
                    self._kept.of(edit.plain, [position]),
                    added,
                    entered,
                )
                if edit.hook == "post_block" and entered is None:
                    edges[f"edited {layer}"] = self._raw(
                        torch.cat([edited("post_block", layer), added])
                    )

    def _joined(self, layer: int) -> bool:
        """Return whether this rank sees what enters the next layer."""
        return layer + 1 in self._layers and "pre_attn" in self._shape.hooks

    def _added(self, scale: float) -> torch.Tensor:
        """The vector as the ranks hold it: scaled, in the model's dtype."""
        return (
            (torch.from_numpy(direction(self._adapter.hidden_size)) * scale)
            .to(self._dtype)
            .float()[None]
        )

    def _states(self, plan: Plan) -> None:
        positions = [position for position in plan.positions if position <= plan.first]
        for layer, states in self._aux.items():
            if "post_block" in self._shape.hooks:
                rows = self._kept.of(plan.base, positions)("post_block", layer)
                figure = rowwise(rows, states[positions].float(), self._shape.tolerance("same"))
                self._findings.append(
                    Finding(
                        "post_block = vLLM's EAGLE-3 auxiliary state",
                        ("post_block",),
                        layer,
                        figure,
                        "same",
                    )
                )

    def _edges(self, plan: Plan, edges: dict[str, bytes]) -> None:
        rows = self._kept.of(plan.base, plan.positions)
        if {"pre_attn", "post_block"} <= set(self._shape.hooks):
            edges["first"] = self._raw(rows("pre_attn", min(self._layers)))
            edges["last"] = self._raw(rows("post_block", max(self._layers)))

    @staticmethod
    def _raw(rows: torch.Tensor) -> bytes:
        return bytes(rows.float().contiguous().numpy().tobytes())

    # -- the model's own modules
    # ----------------------------------------------------------------------------------------------

    def _modules(self, plan: Plan) -> None:
        have = set(self._shape.hooks)
        source: Hook = "mlp_in" if "mlp_in" in have else "post_attn"
        parts = {"mlp_in", "post_attn", "post_block"} <= have and "mlp_out" not in have
        if not parts and not {source, "mlp_out"} <= have:
            self._skipped["MLP"] = f"the model has no {source}, or no mlp_out"
            return
        edits = {
            layer: item
            for edit in plan.edits
            if edit.hook == "mlp_in"
            for layer, item in _places(edit)
        }
        for number, layer in self._layers.items():
            inputs = []
            if self._records:
                inputs = [self._kept.of(plan.base, plan.positions)(source, number)]
                if number in edits and source == "mlp_in":
                    request, position, scale = edits[number]
                    inputs.append(
                        (self._kept.of(request, [position])(source, number) + self._added(scale))
                        * self._nudges(number)
                    )
            count = len(plan.positions) + (
                len(self._nudges(number)) if number in edits and source == "mlp_in" else 0
            )
            rows = self._shared(inputs, count)
            outputs = list(self._through(layer, rows))
            if not self._records:
                continue
            if not outputs:
                self._skipped["MLP"] = "no module of the layer is its MLP"
                continue
            base, plain = self._kept.of(plan.base, plan.positions), len(plan.positions)
            of_base = [
                self._judge_mlp(base, output[:plain], number, source, parts=parts)
                for output in outputs
            ]
            best = min(range(len(outputs)), key=lambda place: of_base[place][0].figure)
            self._findings += of_base[best]
            if count > plain:
                request, position, _ = edits[number]
                edited, shown = self._kept.of(request, [position]), outputs[best]
                if parts:
                    factor = factor_of(
                        shown[:plain], base("post_block", number) - base("post_attn", number)
                    )
                    left, right = edited("post_block", number), edited("post_attn", number)
                    figures = [
                        sumwise(left, [right, factor * row[None]], self._shape.tolerance("module"))
                        for row in shown[plain:]
                    ]
                else:
                    figures = [
                        rowwise(
                            row[None], edited("mlp_out", number), self._shape.tolerance("module")
                        )
                        for row in shown[plain:]
                    ]
                into = "post_block" if parts else "mlp_out"
                law = f"edit at mlp_in: {into} has it"
                self._findings.append(
                    Finding(law, ("mlp_in", into), number, min(figures), "module", edit=True)
                )

    def _nudges(self, number: int) -> torch.Tensor:
        """`[copies, 1]`: what an edited row is multiplied with.

        Near a tie of a router's, one rounding or the other chooses its experts.
        """
        copies = NUDGES if self._shape.routes(number) else 1
        return 1 + torch.finfo(self._dtype).eps * torch.linspace(0, 1, copies)[:, None]

    def _judge_mlp(
        self, rows: Rows, output: torch.Tensor, number: int, source: Hook, *, parts: bool
    ) -> list[Finding]:
        if parts:
            return judge_parts(
                self._shape, output, rows("post_attn", number), rows("post_block", number), number
            )
        return [
            judge_module(self._shape, output, rows("mlp_out", number), number, (source, "mlp_out"))
        ]

    def _shared(self, rows: Sequence[torch.Tensor], count: int) -> torch.Tensor:
        """`[count, hidden]` in the model's dtype on its device: those that the recording rank has,
        on all of its stage.
        """
        device = next(self._parent.parameters()).device
        if rows:
            held = torch.cat(list(rows)).to(self._dtype).to(device)
        else:
            held = torch.empty(count, self._adapter.hidden_size, dtype=self._dtype, device=device)
        return get_tp_group().broadcast(held, src=0) if get_tp_group().world_size > 1 else held

    def _through(self, layer: nn.Module, rows: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield what the layer's MLP gives for these rows, as it is and through each norm that may
        lie behind it.
        """
        children = dict(layer.named_children())
        batched = self._adapter.variant.backend
        behind: list[Callable[[torch.Tensor], Any]] = [lambda output: output]
        behind += [
            child for name, child in children.items() if name.startswith("post") and "norm" in name
        ]
        if "fc1" in children and "fc2" in children:
            chains: list[list[nn.Module]] = [
                [children[name] for name in ("fc1", "activation_fn", "fc2") if name in children]
            ]
        else:
            chains = [[child] for name, child in children.items() if not _NOT_MLP.search(name)]
        made = []
        for chain in chains:
            # a module may write to what it gets
            output: Any = rows[None] if batched else rows.clone()
            for module in chain:
                output = _tensor(module(output))
            made.append(output.view(rows.shape))
        if len(made) > 1:
            made.append(sum(made))
        for output in made:
            for norm in behind:
                yield _tensor(norm(output.clone())).float().cpu()

    def _embedding(self, plan: Plan) -> None:
        embed = getattr(self._model, "embed_input_ids", None)
        if embed is None or "pre_attn" not in self._shape.hooks or 0 not in self._layers:
            self._skipped["embedding"] = "the model offers no embed_input_ids, or no pre_attn"
            return
        ids = torch.tensor(
            [plan.tokens[position] for position in plan.positions],
            device=next(self._parent.parameters()).device,
        )
        embedded = embed(ids)
        if not self._records:
            return
        rows = self._kept.of(plan.base, plan.positions)("pre_attn", 0)
        # some normalise it
        given = [
            _tensor(norm(embedded.clone())).float().cpu()
            for norm in [nn.Identity(), *self._norms()]
        ]
        figure = min(
            rowwise(rows, factor_of(item, rows) * item, self._shape.tolerance("module"))
            for item in given
        )
        finding = Finding("pre_attn[0] = embedding", ("pre_attn",), 0, figure, "module")
        names = [name for name, child in self._parent.named_children() if _between(name, child)]
        if finding.ok or not names:
            self._findings.append(finding)
        else:
            self._skipped["embedding"] = (
                f"{', '.join(names)} lies between the embedding and the first layer"
            )

    def _output(self, plan: Plan) -> None:
        """The last `post_block`, through the model's norm, up to one factor, and output matrix,
        against what vLLM's sampler got.
        """
        if "post_block" not in self._shape.hooks:
            return
        last, positions = (
            self._adapter.num_layers - 1,
            [position for position in plan.positions if position >= plan.first],
        )
        places = [
            *((plan.base, position) for position in positions),
            *([(plan.final.request, plan.first)] if plan.final else []),
        ]
        rows = []
        if self._records:
            rows = [self._kept.of(plan.base, positions)("post_block", last)]
            if plan.final:
                rows.append(
                    self._kept.of(plan.final.request, [plan.first])("post_block", last)
                    + self._added(plan.final.scales[0])
                )
        held = self._shared(rows, len(places))
        best = [math.inf] * len(places)
        for norm in [*self._norms(), nn.Identity()]:
            state = _tensor(norm(held.clone()))
            if all(place in self._final for place in places):
                factor = factor_of(
                    state.float(), torch.cat([self._final[place] for place in places]).float()
                )
                if abs(factor - 1) > self._shape.tolerance("module"):
                    # some models scale what the norm gives
                    state = factor * state
            logits = self._model.compute_logits(state)
            if logits is None or not self._records:
                continue
            errors = [
                self._off(row, self._logits.get(place))
                for row, place in zip(logits.float().cpu(), places, strict=True)
            ]
            best = min(best, errors, key=lambda item: item[0])
        if not self._records:
            return
        law, edit = "logits(last post_block) = vLLM's own", "edit at post_block: the logits have it"
        visited = {
            place: figure
            for place, figure in zip(places, best, strict=True)
            if place in self._logits and place[0] == plan.base
        }
        # Greedy: those logits are the ones that its sampler got.
        if not visited or any(
            int(self._logits[place].argmax()) != plan.tokens[place[1] + 1] for place in visited
        ):
            self._skipped[law] = "vLLM's own logits were not seen"
        else:
            self._findings.append(
                Finding(law, ("post_block",), last, max(visited.values()), "logits")
            )
        if plan.final and (plan.final.request, plan.first) in self._logits:
            self._findings.append(Finding(edit, ("post_block",), last, best[-1], "edit", edit=True))

    def _lens(self, plan: Plan) -> None:
        """The same of the lens's copy of norm and output matrix, of which this rank may have a
        shard: there is no factor here.
        """
        lens = self._plane.readings.reader(StoredLens)
        places = [
            (plan.base, position)
            for position in plan.positions
            if (plan.base, position) in self._logits
        ]
        if not isinstance(lens, Lens) or not self._records or not places:
            return
        rows = self._kept.of(plan.base, [position for _, position in places])(
            "post_block", self._adapter.num_layers - 1
        )
        logits = lens.head.logits(lens.head.norm(rows.to(self._dtype).to(lens.head.device))).cpu()
        shard = slice(lens.head.shard.start, lens.head.shard.stop)
        off = max(
            self._off(row, self._logits[place][:, shard])
            for row, place in zip(logits, places, strict=True)
        )
        if not off <= 1:
            self._readings["lens"] = (
                "its final norm and output matrix give other logits than the model's own "
                f"({off:.3g} times the tolerance)"
            )

    def _norms(self) -> list[nn.Module]:
        """Return those next to the layers, and next to what holds them."""
        root = language_model(self._model)
        path = next(name for name, module in root.named_modules() if module is self._parent).split(
            "."
        )
        holders = [root.get_submodule(".".join(path[:depth])) for depth in range(len(path), -1, -1)]
        norms = [
            child
            for holder in holders
            for name, child in holder.named_children()
            if _NORM.search(name)
        ]
        return [
            norm
            for norm in norms
            if all(
                parameter.shape[-1] == self._adapter.hidden_size for parameter in norm.parameters()
            )
        ]

    def _off(self, row: torch.Tensor, own: torch.Tensor | None) -> float:
        """Largest error of these logits, over their tolerance; infinite where vLLM's own were not
        seen.
        """
        if own is None:
            return math.inf
        known = own[0].isfinite()
        error = float((row - own[0])[known].abs().max()) if known.any() else math.inf
        return error / (self._shape.tolerance("logits") * float(own[0][known].abs().max()))

    def end(self, caveats: list[str]) -> None:
        """Rows, receipts and counters of the run are forgotten.

        `caveats`: of all later manifests.
        """
        self.unwatch()
        self._model.compute_logits = self._restore
        del self._plane.plan
        self._plane.divert(None)
        self._plane.stamp(caveats)


def _places(edit: EditRun) -> Iterator[tuple[int, tuple[int, int, float]]]:
    for layer, position, scale in zip(edit.layers, edit.positions, edit.scales, strict=True):
        yield layer, (edit.request, position, scale)


def _tensor(output: Any) -> torch.Tensor:
    """Return the tensor of a module that may also return a bias or router logits."""
    tensor: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _between(name: str, child: nn.Module) -> bool:
    """Return whether this child may change the stream between the token embedding and the first
    layer.
    """
    tokens = re.search(
        r"^(embed_tokens|wte|embed_in|word_embeddings|tok_embeddings|embeddings?)$", name
    )
    held = any(True for _ in child.parameters())
    return (
        held
        and not tokens
        and not _FINAL_NORM.search(name)
        and not isinstance(child, nn.ModuleList)
    )

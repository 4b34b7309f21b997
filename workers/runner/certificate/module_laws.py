"""Proof of hook points by the model's own modules: applied to captured rows, they must give the
rows of the next hook, or the logits of vLLM's sampler.

Every rank of a stage calls the same modules in the same order, since these reduce over the ranks.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.distributed import get_tp_group

from ....schemas.prompts.selectors import Hook
from ..hooks.output_head import FINAL_NORM, norms_near
from ..hooks.sites import language_model
from ..readings.logit_lens import LensReader
from .laws import (
    CertificatePlan,
    JudgedShape,
    LawFinding,
    RowsAt,
    direction,
    factor_of,
    judge_module,
    judge_parts,
    rowwise,
    sumwise,
)
from .observed import ObservedRequests

if TYPE_CHECKING:
    from ..hooks.architectures import Adapter

#: Children of a decoder layer that are not its MLP.
_NOT_MLP = re.compile(r"norm|(^|_)ln(_|$)|attn|attention|rotary|mamba|mixer|conv|drop|^act")
_NORM = re.compile(r"norm|ln_f")

#: Number of copies of an edited row that are tried where a router chooses experts. They differ by
#: one rounding step at most; the copy that fits best is judged.
NUDGES = 8


@dataclass(frozen=True)
class JudgedStage:
    """The part of the loaded model that a rank holds, with facts for judging it."""

    model: Any
    adapter: "Adapter"
    layers: Mapping[int, nn.Module]
    parent: nn.Module  # module that holds the layers
    dtype: torch.dtype
    shape: JudgedShape
    records: bool  # this rank records the rows of its stage

    @property
    def device(self) -> torch.device:
        return next(self.parent.parameters()).device

    def added(self, scale: float) -> torch.Tensor:
        """Return the edits' vector as the ranks hold it: scaled, rounded to the model's dtype."""
        return (
            (torch.from_numpy(direction(self.adapter.hidden_size)) * scale)
            .to(self.dtype)
            .float()[None]
        )

    def loaded(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows in the model's dtype, on its device."""
        return rows.to(self.dtype).to(self.device)

    def shared(self, rows: Sequence[torch.Tensor], count: int) -> torch.Tensor:
        """Broadcast the recording rank's rows `[count, hidden]` to all ranks of the stage, in the
        model's dtype and on its device.
        """
        held = (
            self.loaded(torch.cat(list(rows)))
            if rows
            else torch.empty(count, self.adapter.hidden_size, dtype=self.dtype, device=self.device)
        )
        return get_tp_group().broadcast(held, src=0) if get_tp_group().world_size > 1 else held


class ModuleLaws:
    """Judges one rank's rows with the modules of its stage."""

    def __init__(
        self,
        stage: JudgedStage,
        observed: ObservedRequests,
        lens: object,
        findings: list[LawFinding],
        skipped: dict[str, str],
    ) -> None:
        """`lens`: the rank's logit lens reader, if any. Results are added to `findings` and
        `skipped` (law → why it was not judged).
        """
        self._stage = stage
        self._observed = observed
        self._lens = lens
        self._shape = stage.shape
        self._kept = observed.kept
        self._findings = findings
        self._skipped = skipped
        self.readings: dict[str, str] = {}  # kind of reading → why the run disproved it

    def mlp(self, plan: CertificatePlan) -> None:
        """Compare the outputs of the layers' MLPs, for captured and for edited rows, with the rows
        of the next hook.
        """
        have = set(self._shape.hooks)
        source: Hook = "mlp_in" if "mlp_in" in have else "post_attn"
        as_difference = {"mlp_in", "post_attn", "post_block"} <= have and "mlp_out" not in have
        if not as_difference and not {source, "mlp_out"} <= have:
            self._skipped["MLP"] = f"the model has no {source}, or no mlp_out"
            return
        edits = {edit.layer: edit for edit in plan.edits if edit.hook == source == "mlp_in"}
        base = self._kept.of(plan.base, plan.positions)
        plain = len(plan.positions)
        for number, layer in self._stage.layers.items():
            edit = edits.get(number)
            inputs = [base(source, number)] if self._stage.records else []
            count = plain
            if edit is not None:
                edited = self._kept.of(edit.request, [edit.position])
                nudges = self._nudges(number)
                count += len(nudges)
                if self._stage.records:
                    row = edited(source, number) + self._stage.added(edit.scale)
                    inputs.append(row * nudges)
            outputs = list(self._through(layer, self._stage.shared(inputs, count)))
            if not self._stage.records:
                continue
            if not outputs:
                self._skipped["MLP"] = "no module of the layer is its MLP"
                continue
            of_base = [
                self._judge_mlp(base, output[:plain], number, source, as_difference=as_difference)
                for output in outputs
            ]
            best = min(range(len(outputs)), key=lambda place: of_base[place][0].figure)
            self._findings += of_base[best]
            if edit is not None:
                shown = outputs[best]
                tolerance = self._shape.tolerance("module")
                if as_difference:
                    factor = factor_of(
                        shown[:plain], base("post_block", number) - base("post_attn", number)
                    )
                    after = edited("post_block", number)
                    before = edited("post_attn", number)
                    figures = [
                        sumwise(after, [before, factor * row[None]], tolerance)
                        for row in shown[plain:]
                    ]
                else:
                    figures = [
                        rowwise(
                            row[None],
                            edited("mlp_out", number),
                            tolerance,
                        )
                        for row in shown[plain:]
                    ]
                into = "post_block" if as_difference else "mlp_out"
                law = f"edit at mlp_in: {into} has it"
                self._findings.append(
                    LawFinding(law, ("mlp_in", into), number, min(figures), "module", edit=True)
                )

    def _nudges(self, number: int) -> torch.Tensor:
        """Return the factors of an edited row's copies, `[copies, 1]`.

        Near a tie of the router, rounding decides which experts it chooses.
        """
        copies = NUDGES if self._shape.routes(number) else 1
        return 1 + torch.finfo(self._stage.dtype).eps * torch.linspace(0, 1, copies)[:, None]

    def _judge_mlp(
        self, rows: RowsAt, output: torch.Tensor, number: int, source: Hook, *, as_difference: bool
    ) -> list[LawFinding]:
        if as_difference:
            return judge_parts(
                self._shape,
                output,
                rows("post_attn", number),
                rows("post_block", number),
                number,
            )
        return [
            judge_module(self._shape, output, rows("mlp_out", number), number, (source, "mlp_out"))
        ]

    def _through(self, layer: nn.Module, rows: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield candidates for the layer's MLP output: of each child that may be its MLP, directly
        and after each norm that may follow.
        """
        children = dict(layer.named_children())
        batched = self._stage.adapter.variant.backend
        if "fc1" in children and "fc2" in children:
            chains: list[list[nn.Module]] = [
                [children[name] for name in ("fc1", "activation_fn", "fc2") if name in children]
            ]
        else:
            chains = [[child] for name, child in children.items() if not _NOT_MLP.search(name)]
        outputs = []
        for chain in chains:
            # a module may overwrite its input
            output: Any = rows[None] if batched else rows.clone()
            for module in chain:
                output = first_output(module(output))
            outputs.append(output.view(rows.shape))
        if len(outputs) > 1:
            outputs.append(sum(outputs))
        for output in outputs:
            yield from after_norms(output, norms_behind(layer))

    def embedding(self, plan: CertificatePlan) -> None:
        """Compare the embedded tokens, up to one factor, with the first `pre_attn`."""
        embed = getattr(self._stage.model, "embed_input_ids", None)
        if embed is None or "pre_attn" not in self._shape.hooks or 0 not in self._stage.layers:
            self._skipped["embedding"] = "the model offers no embed_input_ids, or no pre_attn"
            return
        ids = torch.tensor(
            [plan.tokens[position] for position in plan.positions],
            device=self._stage.device,
        )
        embedded = embed(ids)
        if not self._stage.records:
            return
        rows = self._kept.of(plan.base, plan.positions)("pre_attn", 0)
        # some models normalise the embedding
        figure = min(
            rowwise(rows, factor_of(item, rows) * item, self._shape.tolerance("module"))
            for item in after_norms(embedded, self._norms())
        )
        finding = LawFinding("pre_attn[0] = embedding", ("pre_attn",), 0, figure, "module")
        names = [
            name for name, child in self._stage.parent.named_children() if _between(name, child)
        ]
        if finding.ok or not names:
            self._findings.append(finding)
        else:
            self._skipped["embedding"] = (
                f"{', '.join(names)} lies between the embedding and the first layer"
            )

    def logits(self, plan: CertificatePlan) -> None:
        """Apply the model's final norm, up to one factor, and output matrix to the last
        `post_block`; compare the result with the logits that vLLM's sampler got.
        """
        if "post_block" not in self._shape.hooks:
            return
        last = self._stage.adapter.num_layers - 1
        positions = [position for position in plan.positions if position >= plan.first]
        places = [
            *((plan.base, position) for position in positions),
            *([(plan.final.request, plan.first)] if plan.final else []),
        ]
        rows = []
        if self._stage.records:
            rows = [self._kept.of(plan.base, positions)("post_block", last)]
            if plan.final:
                rows.append(
                    self._kept.of(plan.final.request, [plan.first])("post_block", last)
                    + self._stage.added(plan.final.scale)
                )
        held = self._stage.shared(rows, len(places))
        best = [math.inf] * len(places)
        for norm in [*self._norms(), nn.Identity()]:
            state = first_output(norm(held.clone()))
            if all(place in self._observed.final for place in places):
                final = torch.cat([self._observed.final[place] for place in places])
                factor = factor_of(state.float(), final.float())
                if abs(factor - 1) > self._shape.tolerance("module"):
                    # some models scale the norm's output
                    state = factor * state
            logits = self._stage.model.compute_logits(state)
            if logits is None or not self._stage.records:
                continue
            errors = [
                self._error(row, self._observed.logits.get(place))
                for row, place in zip(logits.float().cpu(), places, strict=True)
            ]
            best = min(best, errors, key=lambda item: item[0])
        if not self._stage.records:
            return
        law = "logits(last post_block) = vLLM's own"
        edit = "edit at post_block: the logits have it"
        figures = {
            place: figure
            for place, figure in zip(places, best, strict=True)
            if place in self._observed.logits and place[0] == plan.base
        }
        # Sampling is greedy, so the observed logits are the sampler's if they choose its tokens.
        if not figures or any(
            int(self._observed.logits[place].argmax()) != plan.tokens[place[1] + 1]
            for place in figures
        ):
            self._skipped[law] = "vLLM's own logits were not seen"
        else:
            self._findings.append(
                LawFinding(law, ("post_block",), last, max(figures.values()), "logits")
            )
        if plan.final and (plan.final.request, plan.first) in self._observed.logits:
            self._findings.append(
                LawFinding(edit, ("post_block",), last, best[-1], "edit", edit=True)
            )

    def lens(self, plan: CertificatePlan) -> None:
        """Compare the logits of the lens, which copies the final norm and this rank's shard of the
        output matrix, with those that vLLM's sampler got. Unlike in `logits`, no factor is allowed.
        """
        lens = self._lens
        places = [
            (plan.base, position)
            for position in plan.positions
            if (plan.base, position) in self._observed.logits
        ]
        if not isinstance(lens, LensReader) or not self._stage.records or not places:
            return
        rows = self._kept.of(plan.base, [position for _, position in places])(
            "post_block", self._stage.adapter.num_layers - 1
        )
        logits = lens.head.logits(
            lens.head.norm(rows.to(self._stage.dtype).to(lens.head.device))
        ).cpu()
        shard = slice(lens.head.shard.start, lens.head.shard.stop)
        error = max(
            self._error(row, self._observed.logits[place][:, shard])
            for row, place in zip(logits, places, strict=True)
        )
        if not error <= 1:
            self.readings["lens"] = (
                "its final norm and output matrix give other logits than the model's own "
                f"({error:.3g} times the tolerance)"
            )

    def _norms(self) -> list[nn.Module]:
        """Return the norms that are siblings of the layers, or of a module that holds them."""
        stage = self._stage
        root = language_model(stage.model)
        return norms_near(root, stage.parent, stage.adapter.hidden_size, _NORM)

    def _error(self, row: torch.Tensor, expected: torch.Tensor | None) -> float:
        """Return the largest error of these logits, over their tolerance; infinite if vLLM's own
        logits were not observed.
        """
        if expected is None:
            return math.inf
        known = expected[0].isfinite()
        error = float((row - expected[0])[known].abs().max()) if known.any() else math.inf
        return error / (self._shape.tolerance("logits") * float(expected[0][known].abs().max()))


def norms_behind(layer: nn.Module) -> list[nn.Module]:
    """Return the norms that may follow a branch of the layer."""
    return [
        child
        for name, child in layer.named_children()
        if name.startswith("post") and "norm" in name
    ]


def after_norms(output: torch.Tensor, norms: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Yield `output`, and what each norm makes of it, in float32 on the CPU."""
    for norm in [nn.Identity(), *norms]:
        # a module may overwrite its input
        yield first_output(norm(output.clone())).float().cpu()


def first_output(output: Any) -> torch.Tensor:
    """Return the first output of a module that may also return a bias or router logits."""
    return output[0] if isinstance(output, tuple) else output


def _between(name: str, child: nn.Module) -> bool:
    """Return whether this child may change the stream between the token embedding and the first
    layer.
    """
    tokens = re.search(
        r"^(embed_tokens|wte|embed_in|word_embeddings|tok_embeddings|embeddings?)$", name
    )
    held = any(True for _ in child.parameters())
    return (
        held and not tokens and not FINAL_NORM.search(name) and not isinstance(child, nn.ModuleList)
    )

"""Proof of hook points by the model's own modules: what they make of captured rows must be the rows
of the next hook, or the logits of vLLM's sampler.

Every rank of a stage takes the same path through the modules, which reduce over the ranks.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.distributed import get_tp_group

from ....schemas.prompts.selectors import Hook
from ..hooks.sites import language_model
from ..readings.logit_lens import Lens
from .laws import Finding, Rows, Shape, factor_of, judge_module, judge_parts, rowwise, sumwise
from .observed import Observed
from .plans import Plan, direction, places

if TYPE_CHECKING:
    from ..hooks.architectures import Adapter

#: Children of a decoder layer that are not its MLP.
_NOT_MLP = re.compile(r"norm|(^|_)ln(_|$)|attn|attention|rotary|mamba|mixer|conv|drop|^act")
#: Children of the module that holds the layers which do not come between embedding and first layer.
_FINAL_NORM = re.compile(r"^(norm|norm_f|ln_f|final_norm|final_layer_?norm)$")
_NORM = re.compile(r"norm|ln_f")

#: Copies of an edited row whose experts a router chooses, which differ by one rounding at most.
NUDGES = 8


@dataclass(frozen=True)
class Stage:
    """The part of the loaded model that a rank holds, and how it is judged."""

    model: Any
    adapter: "Adapter"
    layers: Mapping[int, nn.Module]
    parent: nn.Module  # of the layers
    dtype: torch.dtype
    shape: Shape
    records: bool  # this rank has the rows of its stage

    def added(self, scale: float) -> torch.Tensor:
        """The vector as the ranks hold it: scaled, in the model's dtype."""
        return (
            (torch.from_numpy(direction(self.adapter.hidden_size)) * scale)
            .to(self.dtype)
            .float()[None]
        )

    def shared(self, rows: Sequence[torch.Tensor], count: int) -> torch.Tensor:
        """`[count, hidden]` in the model's dtype on its device: those that the recording rank has,
        on all of its stage.
        """
        device = next(self.parent.parameters()).device
        if rows:
            held = torch.cat(list(rows)).to(self.dtype).to(device)
        else:
            held = torch.empty(count, self.adapter.hidden_size, dtype=self.dtype, device=device)
        return get_tp_group().broadcast(held, src=0) if get_tp_group().world_size > 1 else held


class ModuleLaws:
    """Judges one rank's rows with the modules of its stage."""

    def __init__(
        self,
        stage: Stage,
        seen: Observed,
        lens: object,
        findings: list[Finding],
        skipped: dict[str, str],
    ) -> None:
        """`lens`: the rank's reader of logit lenses, if it has one. `findings`, `skipped` (law →
        why it was not judged): what this adds to.
        """
        self._stage, self._seen, self._lens = stage, seen, lens
        self._shape, self._kept = stage.shape, seen.kept
        self._findings, self._skipped = findings, skipped
        self.readings: dict[str, str] = {}  # kind of reading → why it is not served after all

    def mlp(self, plan: Plan) -> None:
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
            for layer, item in places(edit)
        }
        for number, layer in self._stage.layers.items():
            inputs = []
            if self._stage.records:
                inputs = [self._kept.of(plan.base, plan.positions)(source, number)]
                if number in edits and source == "mlp_in":
                    request, position, scale = edits[number]
                    inputs.append(
                        (
                            self._kept.of(request, [position])(source, number)
                            + self._stage.added(scale)
                        )
                        * self._nudges(number)
                    )
            count = len(plan.positions) + (
                len(self._nudges(number)) if number in edits and source == "mlp_in" else 0
            )
            rows = self._stage.shared(inputs, count)
            outputs = list(self._through(layer, rows))
            if not self._stage.records:
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
                            row[None],
                            edited("mlp_out", number),
                            self._shape.tolerance("module"),
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
        return 1 + torch.finfo(self._stage.dtype).eps * torch.linspace(0, 1, copies)[:, None]

    def _judge_mlp(
        self, rows: Rows, output: torch.Tensor, number: int, source: Hook, *, parts: bool
    ) -> list[Finding]:
        if parts:
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
        """Yield what the layer's MLP gives for these rows, as it is and through each norm that may
        lie behind it.
        """
        children = dict(layer.named_children())
        batched = self._stage.adapter.variant.backend
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

    def embedding(self, plan: Plan) -> None:
        embed = getattr(self._stage.model, "embed_input_ids", None)
        if embed is None or "pre_attn" not in self._shape.hooks or 0 not in self._stage.layers:
            self._skipped["embedding"] = "the model offers no embed_input_ids, or no pre_attn"
            return
        ids = torch.tensor(
            [plan.tokens[position] for position in plan.positions],
            device=next(self._stage.parent.parameters()).device,
        )
        embedded = embed(ids)
        if not self._stage.records:
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
        names = [
            name for name, child in self._stage.parent.named_children() if _between(name, child)
        ]
        if finding.ok or not names:
            self._findings.append(finding)
        else:
            self._skipped["embedding"] = (
                f"{', '.join(names)} lies between the embedding and the first layer"
            )

    def logits(self, plan: Plan) -> None:
        """The last `post_block`, through the model's norm, up to one factor, and output matrix,
        against what vLLM's sampler got.
        """
        if "post_block" not in self._shape.hooks:
            return
        last, positions = (
            self._stage.adapter.num_layers - 1,
            [position for position in plan.positions if position >= plan.first],
        )
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
                    + self._stage.added(plan.final.scales[0])
                )
        held = self._stage.shared(rows, len(places))
        best = [math.inf] * len(places)
        for norm in [*self._norms(), nn.Identity()]:
            state = _tensor(norm(held.clone()))
            if all(place in self._seen.final for place in places):
                factor = factor_of(
                    state.float(), torch.cat([self._seen.final[place] for place in places]).float()
                )
                if abs(factor - 1) > self._shape.tolerance("module"):
                    # some models scale what the norm gives
                    state = factor * state
            logits = self._stage.model.compute_logits(state)
            if logits is None or not self._stage.records:
                continue
            errors = [
                self._off(row, self._seen.logits.get(place))
                for row, place in zip(logits.float().cpu(), places, strict=True)
            ]
            best = min(best, errors, key=lambda item: item[0])
        if not self._stage.records:
            return
        law, edit = "logits(last post_block) = vLLM's own", "edit at post_block: the logits have it"
        visited = {
            place: figure
            for place, figure in zip(places, best, strict=True)
            if place in self._seen.logits and place[0] == plan.base
        }
        # Greedy: those logits are the ones that its sampler got.
        if not visited or any(
            int(self._seen.logits[place].argmax()) != plan.tokens[place[1] + 1] for place in visited
        ):
            self._skipped[law] = "vLLM's own logits were not seen"
        else:
            self._findings.append(
                Finding(law, ("post_block",), last, max(visited.values()), "logits")
            )
        if plan.final and (plan.final.request, plan.first) in self._seen.logits:
            self._findings.append(Finding(edit, ("post_block",), last, best[-1], "edit", edit=True))

    def lens(self, plan: Plan) -> None:
        """The same of the lens's copy of norm and output matrix, of which this rank may have a
        shard: there is no factor here.
        """
        lens = self._lens
        places = [
            (plan.base, position)
            for position in plan.positions
            if (plan.base, position) in self._seen.logits
        ]
        if not isinstance(lens, Lens) or not self._stage.records or not places:
            return
        rows = self._kept.of(plan.base, [position for _, position in places])(
            "post_block", self._stage.adapter.num_layers - 1
        )
        logits = lens.head.logits(
            lens.head.norm(rows.to(self._stage.dtype).to(lens.head.device))
        ).cpu()
        shard = slice(lens.head.shard.start, lens.head.shard.stop)
        off = max(
            self._off(row, self._seen.logits[place][:, shard])
            for row, place in zip(logits, places, strict=True)
        )
        if not off <= 1:
            self.readings["lens"] = (
                "its final norm and output matrix give other logits than the model's own "
                f"({off:.3g} times the tolerance)"
            )

    def _norms(self) -> list[nn.Module]:
        """Return those next to the layers, and next to what holds them."""
        root = language_model(self._stage.model)
        path = next(
            name for name, module in root.named_modules() if module is self._stage.parent
        ).split(".")
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
                parameter.shape[-1] == self._stage.adapter.hidden_size
                for parameter in norm.parameters()
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

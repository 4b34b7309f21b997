"""Proof of the hook points inside attention and MLP: the loaded modules, applied to their rows,
must give the rows of other hooks.

Every rank judges its own columns. All ranks of a stage call modules that reduce over the ranks, in
the same order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from ....schemas.model.attention import AttentionKind
from ....schemas.prompts.selectors import Hook
from ..hooks.layer_kinds import attention_of
from ..plane.inside_hooks import Inner
from .laws import JudgedShape, LawFinding, RowsAt, rowwise
from .module_laws import first_output
from .together import StageRanks

#: (hook, layer) → rows on this rank; None if another rank records them.
HeldRows = Callable[[Hook, int], torch.Tensor | None]
#: (hook, layer) → the recording rank's rows `[rows, hidden]`, on all ranks of the stage.
Shared = Callable[[Hook, int], torch.Tensor]


class InsideLaws:
    """Judges one rank's rows of a prompt, whose positions were all captured at the hooks inside, in
    order.
    """

    def __init__(
        self,
        inners: Mapping[Hook, Sequence[Inner]],
        layers: Mapping[int, nn.Module],
        shape: JudgedShape,
        *,
        held: HeldRows,
        compared: RowsAt | None,
        places: Sequence[int],
        shared: Shared,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`inners`: the hooks' locations. `compared`: rows of the residual hooks at the positions
        `places`, on the rank that records them.
        """
        self._inners, self._layers, self._shape = inners, layers, shape
        self._held, self._compared, self._places, self._shared = (
            held,
            compared,
            list(places),
            shared,
        )
        self._dtype, self._device = dtype, device

    def findings(self, together: StageRanks) -> Iterator[LawFinding]:
        """Yield the findings of all laws whose hooks are present.

        If a module raises on all ranks, its law has no finding, and the run continues.
        """
        laws: list[Callable[[int, int], Iterator[LawFinding]]] = [
            self._output,
            self._down,
            self._router,
            self._attention,
            self._projections,
        ]
        for law in laws:
            for place, number in enumerate(self._layers):
                found: list[LawFinding] = []
                judge = partial(_judge, law, place, number, found)
                together.attempt(f"{law.__name__.strip('_')} of layer {number}", judge)
                yield from found

    def _rows(self, hook: Hook, number: int) -> torch.Tensor | None:
        """Return the rows in the model's dtype, on its device."""
        rows = self._held(hook, number)
        return None if rows is None else rows.to(self._dtype).to(self._device)

    def _through(self, hook: Hook, into: Hook, place: int, number: int) -> Iterator[LawFinding]:
        """Judge whether the projection after `hook` computes the rows of `into`, directly or with a
        norm after the branch.
        """
        rows = self._rows(hook, number) if hook in self._inners else None
        if rows is None or into not in self._shape.hooks:
            return
        output = first_output(self._inners[hook][place].module(rows[self._places]))
        if self._compared is None:
            return
        expected = self._compared(into, number)
        norms = [
            child
            for name, child in self._layers[number].named_children()
            if name.startswith("post") and "norm" in name
        ]
        candidates = [output, *(first_output(norm(output.clone())) for norm in norms)]
        tolerance = self._shape.tolerance("module")
        figure = min(
            rowwise(item.float().cpu(), expected, tolerance, median=self._shape.routes(number))
            for item in candidates
        )
        yield LawFinding(f"projection({hook}) = {into}", (hook,), number, figure, "module")

    def _output(self, place: int, number: int) -> Iterator[LawFinding]:
        yield from self._through("z", "attn_out", place, number)

    def _down(self, place: int, number: int) -> Iterator[LawFinding]:
        yield from self._through("mlp_act", "mlp_out", place, number)

    def _router(self, place: int, number: int) -> Iterator[LawFinding]:
        if "router" not in self._inners or "mlp_in" not in self._shape.hooks:
            return
        logits = first_output(self._inners["router"][place].module(self._shared("mlp_in", number)))
        rows = self._held("router", number)
        if rows is not None:
            figure = rowwise(
                logits.float().cpu(), rows[self._places], self._shape.tolerance("module")
            )
            yield LawFinding("gate(mlp_in) = router", ("router",), number, figure, "module")

    def _attention(self, place: int, number: int) -> Iterator[LawFinding]:
        hooks: tuple[Hook, ...] = ("q", "k", "v", "z")
        if not set(hooks) <= self._inners.keys():
            return
        query, key, value, z = (self._held(hook, number) for hook in hooks)
        if query is None or key is None or value is None or z is None:
            return
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
        if not {"q_proj", "k_proj", "q", "k"} <= self._inners.keys():
            return
        rows = [
            row for hook in ("q_proj", "k_proj") if (row := self._rows(hook, number)) is not None
        ]
        projections = [row for hook in ("q", "k") if (row := self._held(hook, number)) is not None]
        if len(rows) + len(projections) < 4:
            return
        layer, attention = self._layers[number], self._inners["q"][place].module
        parent = next(
            (
                part
                for part in layer.modules()
                if any(child is attention for child in part.children())
            ),
            layer,
        )
        norms, width = _norms(parent), self._inners["q"][place].columns.row.width
        normed = [
            _normed(norms.get(letter), row, width) for letter, row in zip("qk", rows, strict=True)
        ]
        candidates = [tuple(normed)]
        rotary = next(
            (
                child
                for name, child in parent.named_children()
                if "rotary" in name or "rope" in name
            ),
            None,
        )
        if rotary is not None:
            positions = torch.arange(len(normed[0]), device=self._device)
            candidates.append(tuple(rotary(positions, normed[0].clone(), normed[1].clone())))
        tolerance = self._shape.tolerance("module")
        for place_of, (hook, rows_of) in enumerate(
            zip(("q_proj", "k_proj"), projections, strict=True)
        ):
            figure = min(
                rowwise(row[place_of].reshape(rows_of.shape).float().cpu(), rows_of, tolerance)
                for row in candidates
            )
            yield LawFinding(
                f"norm and rotary embedding of {hook}", (hook,), number, figure, "module"
            )


def _judge(
    law: Callable[[int, int], Iterator[LawFinding]],
    place: int,
    number: int,
    found: list[LawFinding],
) -> None:
    found += law(place, number)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kind: AttentionKind, width: int
) -> torch.Tensor:
    """Return causal attention of `kind` over a whole prompt, float32 `[tokens, heads × value
    width]`. `width`: of query and key heads.
    """
    count, heads = len(query), query.shape[1] // width
    q = query.view(count, heads, width).transpose(0, 1)
    shared = heads // (key.shape[1] // width)
    k, v = (
        rows.view(count, heads // shared, -1).transpose(0, 1).repeat_interleave(shared, dim=0)
        for rows in (key, value)
    )
    scores = kind.scale * q @ k.transpose(1, 2)
    if kind.softcap:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    distance = torch.arange(count)[:, None] - torch.arange(count)[None]
    if kind.slopes:
        scores = scores - torch.tensor(kind.slopes)[:, None, None] * distance
    attended = (distance >= 0) & ((distance < kind.window) if kind.window else torch.tensor(True))
    if kind.chunk:
        attended &= (
            torch.arange(count)[:, None] // kind.chunk == torch.arange(count)[None] // kind.chunk
        )
    scores = scores.masked_fill(~attended, float("-inf"))
    if kind.sinks:
        scores = torch.cat(
            [scores, torch.tensor(kind.sinks)[:, None, None].expand(-1, count, 1)], dim=2
        )
    return (scores.softmax(dim=2)[:, :, :count] @ v).transpose(0, 1).reshape(count, -1)


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

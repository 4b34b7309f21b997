"""Engine requests of a sweep's units: tokens, patches, captures, entry layer and grading."""

from collections.abc import Iterable, Mapping, Sequence

from midstream.schemas.base.records import by_key
from midstream.schemas.jobs.jobs import Job
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.jobs.receipts import CapturedFile, Receipt
from midstream.schemas.prompts.selectors import Hook, PositionSelector, as_ranges
from midstream.schemas.prompts.sites import hook_layers
from midstream.schemas.requests.source_runs import (
    ZEROS,
    RunFile,
    RunFiles,
    RunRow,
    parse_key,
    row_name,
    run_key,
)
from midstream.schemas.requests.specs import (
    EntryPoint,
    Grade,
    StoredCapture,
    StoredSteering,
    dims_name,
)
from midstream.workers.engine.protocol import EngineRequest
from midstream.workers.engine.requests import unit_request

from ..records.sweep_paths import SiteKey, StoredEnd, StoredPath, place_of, reaches
from ..records.sweep_units import Node, SweepWork
from ..records.sweeps import PatchPlace, Unit

# tags of captures; FIRST: what the receivers of a path compute in its first pass
BASE = "base"
SOURCE = "source"
FIRST = "first"


class SweepRequests:
    """Engine requests of one attempt at one sweep.

    Pure; cheap enough per cell that a sweep of 20,000 cells costs the worker about a second.
    """

    def __init__(
        self, job: Job, attempt: int, info: ModelInfo, enters: bool, reuses: bool = True
    ) -> None:
        """`enters`: forward passes may begin at the patched layer, from the `pre_attn` rows that
        the base runs capture. `reuses`: with or without that, they may begin at the first patched
        position, after the KV blocks that the base runs keep.
        """
        work = job.work_as(SweepWork)
        self._job = job
        self._attempt = attempt
        self._sweep = work.sweep
        self._info = info
        self.units = work.units
        self._enters = enters and "pre_attn" in info.hooks
        self._reuses = reuses
        # pair → whether its base runs capture rows for entry; as `_enters` for pairs not named
        self._for_entry: dict[int, bool] = {}
        #: pair → (hook, layer) → dimensions, the one in which the rows of its two prompts differ
        #: most first; of pairs with columns by rank
        self.ranked: dict[int, Mapping[SiteKey, list[int]]] = {}
        #: number of a unit that patches a feature → the names of the rows that it writes
        self.rows: dict[int, list[str]] = {}
        self._captured = {BASE: sum(map(len, self.units.nodes)), SOURCE: len(work.sweep.pairs)}
        if work.sweep.ablation is not None:
            del self._captured[SOURCE]
        if work.sweep.path is not None:
            self._captured[FIRST] = (
                work.sweep.num_cells if self.units.passes > 1 else len(work.sweep.pairs)
            )

    def reference(self, pair: int) -> Unit:
        """Return the unit of the clean prompt, whose distribution `kl` compares with."""
        return self.units.base(pair) if self._sweep.patches_clean else self.units.source(pair)

    def kept(self, pair: int) -> str:
        """Return the name under which the ranks keep that distribution."""
        return f"{self._job.id}.{self._attempt}.{pair}"

    def asks(self, unit: Unit, captures: bool = True) -> list[EngineRequest]:
        """Return the requests of a unit; of a kind `sender`, its first pass."""
        if unit.kind in ("base", "source"):
            return self.control(unit, captures=captures)
        return [self.first(unit)] if unit.kind == "sender" else self.patched(unit)

    def control(self, unit: Unit, *, captures: bool = True) -> list[EngineRequest]:
        """Return the requests of a base or source unit, one per node."""
        stored = self._sweep.pairs[unit.pair]
        tag = SOURCE if unit.kind == "source" else BASE
        asks = []
        for place, node in enumerate(self.units.nodes[unit.pair]):
            captured = self._split(self._capture(unit.pair, place, tag)) if captures else []
            prompt = stored.source if unit.kind == "source" else stored.base
            kept = self._key(unit, place, BASE) if unit.kind == "base" and self._reuses else ""
            asks.append(self._ask(unit, place, prompt, node, captures=captured, keep_blocks=kept))
        return asks

    def patched(self, unit: Unit) -> list[EngineRequest]:
        """Return the requests of a cell or a noise unit, one per node; for a cell with two passes,
        those of its second pass.
        """
        stored = self._sweep.pairs[unit.pair]
        path = self._sweep.path
        layers, places = self.units.patched(unit)
        asks = []
        for place, node in enumerate(self.units.nodes[unit.pair]):
            base = self._key(self.units.base(unit.pair), place, BASE)
            steering = (
                self._patches(unit, layers, places, base)
                if path is None or unit.kind == "noise"
                else self._on_path(path, unit, layers, places, base)
            )
            lowest = min((at for entry in steering for at in entry.layers), default=layers[0])
            enters = self._enters and self._for_entry.get(unit.pair, True)
            entry = EntryPoint(run=base, layer=lowest) if enters and lowest > 0 else None
            reused = base if self._reuses else ""
            asks.append(
                self._ask(
                    unit, place, stored.base, node, steering=steering, entry=entry, base=reused
                )
            )
        return asks

    def _on_path(
        self,
        path: StoredPath,
        unit: Unit,
        layers: list[int],
        places: list[PatchPlace],
        base: str,
    ) -> list[StoredSteering]:
        """Return the patches of a path's cell: of its second pass, or of its only pass."""
        sweep = self._sweep
        (layer,) = layers
        site = sweep.hooks[unit.hook], layer
        if path.sender is not None:
            sender = self.units.sender(unit.pair)
            assert sender is not None
            run = self.first_key(sender)
            mask = self._mask(unit)
            return [_row(RunRow(run, *site, to), to, mask) for to, _ in places]
        if not path.receivers:
            return [
                *self._patches(unit, layers, places, base),
                *self._frozen(path, unit.pair, site, places, base),
            ]
        run = self.first_key(unit)
        # A receiver's output is replaced instead of its input, on which alone it depends.
        reached = [end for end in path.receivers if reaches(site, end.site)]
        after = range(places[0][0], len(sweep.pairs[unit.pair].base))
        return [
            _row(RunRow(run, *end.site, to), to, _dims_of(end)) for to in after for end in reached
        ]

    def _frozen(
        self,
        path: StoredPath,
        pair: int,
        sender: SiteKey,
        places: list[PatchPlace],
        base: str,
    ) -> list[StoredSteering]:
        """Return patches that hold the frozen branches as they are in the run `base`, wherever the
        sender has an effect.
        """
        # To hold a branch's output is to hold all its heads, with a fraction of the rows that the
        # `z` of each would take.
        sites = path.frozen_sites(sender, self._top(path))
        after = range(places[0][0], len(self._sweep.pairs[pair].base))
        return [_row(RunRow(base, *site, to), to) for to in after for site in hook_layers(sites)]

    def _top(self, path: StoredPath) -> int:
        """Return the highest layer that affects the receivers."""
        if path.sender is not None:
            return self._sweep.layers[-1]
        return max((end.layer for end in path.receivers), default=self._info.num_layers - 1)

    def first(self, unit: Unit) -> EngineRequest:
        """Return the first pass of a cell with two passes, or of the sender that all cells of a
        pair share; it captures what the receivers compute.
        """
        path = self._sweep.path
        pair = self._sweep.pairs[unit.pair]
        assert path is not None
        base = self._key(self.units.base(unit.pair), 0, BASE)
        if path.sender is None:
            (layer,), places = self.units.patched(unit)
            steering = self._patches(unit, [layer], places, base)
            site = self._sweep.hooks[unit.hook], layer
        else:
            site = path.sender.site
            places = pair.sender
            source = self._key(self.units.source(unit.pair), 0, SOURCE)
            mask = _dims_of(path.sender)
            steering = [_row(RunRow(source, *site, of), to, mask) for to, of in places]
        steering += self._frozen(path, unit.pair, site, places, base)
        (node,) = self.units.nodes[unit.pair]
        return self._ask(
            unit,
            self.units.first_request(unit) - self.units.request(unit, 0),
            pair.base,
            node,
            steering=steering,
            captures=self._split(self._first_capture(unit)),
        )

    def _first_capture(self, unit: Unit) -> StoredCapture:
        sweep = self._sweep
        assert sweep.path is not None
        first = 0
        needed = sweep.sites
        if sweep.path.sender is None:
            (layer,), places = self.units.patched(unit)
            first = places[0][0]
            sender = sweep.hooks[unit.hook], layer
            receivers = [end.site for end in sweep.path.receivers]
            needed = [receiver for receiver in receivers if reaches(sender, receiver)]
        positions = list(range(first, len(sweep.pairs[unit.pair].base)))
        return StoredCapture(sites=_sites(needed), positions=positions, tag=FIRST)

    def _split(self, capture: StoredCapture | None) -> list[StoredCapture]:
        return [] if capture is None else capture.split(self._info.inside)

    def first_key(self, unit: Unit) -> str:
        """Return the key of the run that the first pass of this unit captures."""
        return run_key(self._job.id, self.units.first_request(unit), FIRST)

    def first_files(self, unit: Unit, receipts: Sequence[Receipt]) -> RunFiles:
        """Return the files of that run, which the receipts name.

        Raises ValueError when they name no file.
        """
        return self._run_files(
            self.first_key(unit),
            self._first_capture(unit),
            receipts,
            len(self._sweep.pairs[unit.pair].base),
        )

    def compares(self, unit: Unit) -> bool:
        """Return whether the unit's distribution is compared with the clean prompt's."""
        compared = unit.kind != "sender" and unit != self.reference(unit.pair)
        return self._sweep.metric == "kl" and compared

    def take_over(self, pair: int, receipts: Sequence[Receipt]) -> None:
        """Use the base runs that an earlier attempt captured for the pair, with these receipts.

        That attempt's engine may have captured for entry where this engine does not, or vice versa.
        """
        request = self.units.request(self.units.base(pair), 0)
        files = _files_of(receipts, request, BASE)
        present = {site for file in files for site in hook_layers(file.sites)}
        tokens = len(self._sweep.pairs[pair].base)
        entered = self._base_capture(pair, 0, for_entry=True)
        self._for_entry[pair] = (
            entered is not None
            and present == {*hook_layers(entered.sites)}
            and all(file.positions == tokens for file in files)
        )

    def runs(self, pair: int) -> list[str]:
        """Return the keys of the runs that the pair's patched units need."""
        keys = [
            self._key(self.units.base(pair), place, BASE)
            for place in range(len(self.units.nodes[pair]))
            if self._capture(pair, place, BASE) is not None
        ]
        if self._capture(pair, 0, SOURCE) is not None:
            keys.append(self._key(self.units.source(pair), 0, SOURCE))
        return keys

    def control_runs(self, pair: int) -> tuple[str, str]:
        """Return the keys of the runs of the pair's unpatched prompts: the prompt that is patched,
        and the prompt that rows come from.
        """
        return self._key(self.units.base(pair), 0, BASE), self._key(
            self.units.source(pair), 0, SOURCE
        )

    def files(self, pair: int, key: str, receipts: list[Receipt]) -> RunFiles:
        """Return the files of one of `runs`, which the receipts of its unit name.

        Raises ValueError when they name no file.
        """
        _, request, tag = parse_key(key)
        if (capture := self._capture(pair, request % self.units.width, tag)) is None:
            raise ValueError(f"nothing was captured for {key}")
        node = self.units.nodes[pair][request % self.units.width]
        tokens = len(
            self._sweep.pairs[pair].base if tag == BASE else self._sweep.pairs[pair].source
        ) + len(node.prefix)
        return self._run_files(key, capture, receipts, tokens)

    def _run_files(
        self, key: str, capture: StoredCapture, receipts: Sequence[Receipt], tokens: int
    ) -> RunFiles:
        _, request, tag = parse_key(key)
        captured = _files_of(receipts, request, tag)
        if not captured:
            raise ValueError(f"nothing was captured for {key}")
        return RunFiles(
            key=key,
            sites=capture.sites,
            positions=list(capture.select(0, tokens, tokens)),
            hidden_size=self._info.hidden_size,
            bytes=sum(file.bytes for file in captured),
            files=[
                RunFile(path=file.path, offset=file.offset, bytes=file.bytes, crc32=file.crc32)
                for file in captured
            ],
        )

    def _ask(
        self,
        unit: Unit,
        place: int,
        prompt: list[int],
        node: Node,
        *,
        steering: Sequence[StoredSteering] = (),
        captures: Sequence[StoredCapture] = (),
        entry: EntryPoint | None = None,
        base: str = "",
        keep_blocks: str = "",
    ) -> EngineRequest:
        return unit_request(
            self._job,
            self._info,
            patched=unit.kind not in ("base", "source"),
            request=self.units.request(unit, place),
            attempt=self._attempt,
            token_ids=[*prompt, *node.prefix],
            steering=list(steering),
            captures=list(captures),
            captured=self._captured if captures else {},
            entry=entry,
            grade=self._grade(unit, place, node),
            base=base,
            keep_blocks=keep_blocks,
        )

    def _grade(self, unit: Unit, place: int, node: Node) -> Grade | None:
        """Return what is computed of a request's next token; None for a first pass, which has no
        value.
        """
        if unit.kind == "sender":
            return None
        # the clean prompt's distribution is kept, and others are compared with it
        kept = self.kept(unit.pair) if self._sweep.metric == "kl" and place == 0 else ""
        return Grade(
            token_ids=list(node.token_ids),
            keep=kept if unit == self.reference(unit.pair) else "",
            against=kept if self.compares(unit) else "",
        )

    def _key(self, unit: Unit, place: int, tag: str) -> str:
        return run_key(self._job.id, self.units.request(unit, place), tag)

    def _patches(
        self, unit: Unit, layers: list[int], places: list[PatchPlace], base: str
    ) -> list[StoredSteering]:
        """Return the unit's patches. `base`: the key of the unpatched run of the same tokens."""
        sweep = self._sweep
        hook = self._sweep.hooks[unit.hook]
        mask = self._mask(unit)
        everywhere = [position for position, _ in places]
        # The prompt's own row, written into itself, takes the path of a cell: the same batches,
        # entry and rows. A plain rerun would show less noise than a cell is subject to.
        if unit.kind == "noise":
            return [
                _row(RunRow(base, hook, at, to), to, mask, sweep.alpha)
                for to in everywhere
                for at in layers
            ]
        if unit.feature is not None:
            return [
                _patch(sweep.alpha, mask, hook, layers, [to], name)
                for to, name in zip(everywhere, self.rows[unit.number], strict=True)
            ]
        if sweep.ablation == "zeros":
            return [_patch(sweep.alpha, mask, hook, layers, everywhere, ZEROS)]
        if sweep.ablation == "mean":
            # the mean is over the prompt alone, without a prefix of the answer
            prompt = self._key(self.units.base(unit.pair), 0, BASE)
            rows = [RunRow(prompt, hook, at, None) for at in layers]
            return [
                _patch(sweep.alpha, mask, hook, [row.layer], everywhere, row_name(row))
                for row in rows
            ]
        source = self._key(self.units.source(unit.pair), 0, SOURCE)
        return [
            _row(RunRow(source, hook, at, of), to, mask, sweep.alpha)
            for to, of in places
            for at in layers
        ]

    def _mask(self, unit: Unit) -> str:
        """Return the name of the mask of dimensions that the unit's patches write; empty: all."""
        column = self._sweep.pairs[unit.pair].columns[unit.column]
        if column.ranks is not None:
            return dims_name(as_ranges(self.neurons(unit)))
        return dims_name(column.dims) if column.dims else self._sweep.mask

    def neurons(self, unit: Unit) -> list[int]:
        """Return the dimensions that a cell selects by rank, the one in which the prompts differ
        most first; empty on other axes.
        """
        ranks = self._sweep.pairs[unit.pair].columns[unit.column].ranks
        if ranks is None:
            return []
        site = self._sweep.hooks[unit.hook], self._sweep.layers[unit.layer]
        return self.ranked[unit.pair][site][slice(*ranks)]

    def _capture(self, pair: int, place: int, tag: str) -> StoredCapture | None:
        """Return what is captured of a base or source unit at a node; None for nothing."""
        if tag == BASE:
            return self._base_capture(pair, place, self._for_entry.get(pair, self._enters))
        return None if place else self._source_capture(pair)

    def _source_capture(self, pair: int) -> StoredCapture | None:
        """Return what a pair's source run captures: rows of the prompt only, since later tokens do
        not change them.
        """
        if self._sweep.ablation is not None:
            return None
        stored = self._sweep.pairs[pair]
        path = self._sweep.path
        sites = {hook: self._sweep.layers for hook in self._sweep.hooks}
        places = [place for column in stored.columns for place in column.places]
        if path is not None and path.sender is not None:
            # the cells take rows of the sender's pass, not of this prompt
            sites = {path.sender.hook: [path.sender.layer]}
            places = stored.sender
        if not (positions := sorted({source for _, source in places})):
            return None
        return StoredCapture(sites=sites, positions=positions, tag=SOURCE)

    def _base_capture(self, pair: int, place: int, for_entry: bool) -> StoredCapture | None:
        sweep = self._sweep
        path = sweep.path
        columns = sweep.pairs[pair].columns
        needed: set[SiteKey] = set()
        positions: set[int] = set()
        for unit in self.units.noise(pair):
            layers, places = self.units.patched(unit)
            needed.update((sweep.hooks[0], layer) for layer in layers)
            positions.update(position for position, _ in places)
        of_features = sweep.attributed is not None and sweep.attributed.sae is not None
        ranked = of_features or any(column.ranks is not None for column in columns)
        mean = sweep.ablation == "mean"
        if place == 0 and (mean or ranked):
            needed.update(sweep.sites)
            positions.update(to for column in columns for to, _ in column.places)
        if path is not None:
            for sender in path.senders(sweep.sites):
                needed.update(hook_layers(path.frozen_sites(sender, self._top(path))))
        if for_entry:
            entered = [end.layer for end in path.receivers] if path is not None else []
            needed.update(("pre_attn", layer) for layer in (*sweep.layers, *entered) if layer > 0)
        if not needed:
            return None
        whole = (mean and place == 0) or for_entry or path is not None
        every: PositionSelector = "all_prompt" if whole else sorted(positions)
        return StoredCapture(sites=_sites(needed), positions=every, tag=BASE)


def _sites(needed: Iterable[SiteKey]) -> dict[Hook, list[int]]:
    """Return hook → layers, in the order of the forward pass."""
    return by_key(sorted(needed, key=lambda site: (place_of(site[0]), site[1])))


def _files_of(receipts: Iterable[Receipt], request: int, tag: str) -> list[CapturedFile]:
    """Return the files that the ranks wrote for one request and tag."""
    return [
        file
        for receipt in receipts
        if receipt.request == request
        for file in receipt.files
        if file.tag == tag
    ]


def _dims_of(end: StoredEnd) -> str:
    """Return the name of the mask of an end's dimensions; empty: all."""
    return dims_name(end.dims) if end.dims else ""


def _row(row: RunRow, to: int, mask: str = "", alpha: float = 1.0) -> StoredSteering:
    """Return a patch that writes a row of a run where the row is from, at position `to`."""
    return _patch(alpha, mask, row.hook, [row.layer], [to], row_name(row))


def _patch(
    alpha: float, mask: str, hook: Hook, layers: list[int], positions: list[int], vector: str
) -> StoredSteering:
    return StoredSteering(
        layers=layers,
        hook=hook,
        positions=positions,
        family="replace_masked" if mask else "replace",
        tensors=[vector, mask] if mask else [vector],
        numbers=[alpha],
    )

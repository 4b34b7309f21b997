// An attribution's grids: the exact values, with a grid of the estimates beside them on the same scale
// of effects.

import { MEANING, SweepGrid, shown } from "./grid.js";

const baseline = (value) => (value === null ? null : { value, logprob: null, foil_logprob: null });

export class AttributionGrid extends SweepGrid {
  take(view) {
    super.take(view);
    const { result, job } = view;
    this.wanted = job.cells_expected;
    const known = result.estimated.map((found) => found.base !== null);
    const features = result.estimated.flatMap(({ checked }) =>
      checked.filter(({ feature, exact }) => feature !== null && exact !== null),
    );
    if (features.length) this.known = features.length;
    const pairs = result.pairs.map((pair, p) => ({
      ...pair,
      grids: result.estimated[p].estimates,
      base: baseline(result.estimated[p].base),
      source: baseline(result.estimated[p].source),
    }));
    const estimated = { result: { ...result, pairs, skipped: [] } };
    if (this.estimates) this.estimates.take(estimated);
    else {
      this.estimates = new SweepGrid(estimated);
      for (const each of ["findLimits", "legend"])
        this.estimates[each] = (pair) => this[each](pair, this.estimates);
      this.estimates.marks = (pair, hook) => this.marks(pair, hook);
    }
    known.forEach((is, p) => {
      if (is) this.estimates.leave(p, () => true, "not estimated");
      if (job.finished !== null) this.leave(p, () => true, "not computed exactly");
      else if (is && result.method !== "adaptive") {
        const chosen = new Set(
          result.estimated[p].checked.map(
            (cell) => `${cell.hook}/${this.layers.indexOf(cell.layer) * this.columns + cell.column}`,
          ),
        );
        this.leave(p, (hook, index) => !chosen.has(`${hook}/${index}`), "not computed exactly");
      }
    });
  }

  set(...cell) {
    super.set(...cell);
    if (this.estimates) this.estimates.cached.delete("limits");
  }

  /** One `cell` event. A feature is no cell of the grid: it only counts. */
  cell(data) {
    if (data.feature === null) return super.cell(data);
    this.known += 1;
    return { hook: data.hook, row: this.layers.indexOf(data.layer), column: data.column };
  }

  /** The name of a column, or of a feature in it; −1: the error; null: the whole row. */
  nameOf(pair, column, feature) {
    const place = this.names(pair)[column];
    return feature === null ? place : `${feature < 0 ? "error" : `feature ${feature}`} at ${place}`;
  }

  get total() {
    return this.wanted;
  }

  /**
   * The same effects on both sides of either grid's own base: as far as the largest of both grids, as
   * in Python's figure.
   */
  findLimits(pair, grid = this) {
    const base = grid.base(pair);
    if (Number.isNaN(base)) return SweepGrid.prototype.findLimits.call(grid, pair);
    const sizes = [this, this.estimates].flatMap((each) =>
      this.hooks.flatMap((hook) =>
        Array.from({ length: this.size }, (_, n) =>
          Math.abs(each.at(pair, hook, Math.floor(n / this.columns), n % this.columns).effect),
        ),
      ),
    );
    const reach = sizes.reduce((most, size) => (size > most ? size : most), 0) || 1;
    return [base - reach, base + reach];
  }

  legend(pair, grid = this) {
    const reach = grid.limits(pair)[1] - grid.base(pair);
    return Number.isNaN(reach)
      ? SweepGrid.prototype.legend.call(grid, pair)
      : {
          ends: [shown(-reach), `+${shown(reach)}`],
          text: `effect: change of ${MEANING[this.metric]}; neutral: none`,
        };
  }

  /**
   * [{cell, name, estimate, exact}] of the cells computed exactly: effects, each a difference to the
   * unpatched prompt on its own worker.
   */
  effects(pair) {
    return this.checked(pair)
      .map((cell) => ({
        cell,
        name: this.nameOf(cell.pair, cell.column, cell.feature),
        estimate: cell.estimate - this.estimates.baseOf(cell.pair),
        exact: cell.exact - this.baseOf(cell.pair),
      }))
      .filter(
        ({ cell, estimate, exact }) =>
          cell.exact !== null && cell.estimate !== null && Number.isFinite(estimate - exact),
      );
  }

  /** The cells with an exact value or chosen for one, each with its `pair`, strongest first. */
  checked(pair) {
    const effect = (cell) => (cell.exact === null ? -1 : Math.abs(cell.exact - this.baseOf(cell.pair)));
    return this.chosen(pair)
      .flatMap((p) => this.result.estimated[p].checked.map((cell) => ({ ...cell, pair: p })))
      .sort((a, b) => effect(b) - effect(a));
  }

  /** [{row, column}] of the cells of a hook whose estimate disagrees with the exact value. */
  marks(pair, hook) {
    return this.checked(pair)
      .filter((cell) => cell.off && cell.hook === hook)
      .map((cell) => ({ row: this.layers.indexOf(cell.layer), column: cell.column }));
  }

  /** [{pair, name, score}] of edges and features, strongest first. */
  scores(pair) {
    const end = ({ kind, layer, head }) =>
      kind === "embed" || kind === "logits" ? kind : `${kind} ${layer}${head < 0 ? "" : `.${head}`}`;
    return this.chosen(pair)
      .flatMap((p) => {
        const { edges, features } = this.result.estimated[p];
        return [
          ...edges.map(({ sender, receiver, score }) => ({
            pair: p,
            name: `${end(sender)} → ${end(receiver)}`,
            score,
          })),
          ...features.map(({ column, feature, score }) => ({
            pair: p,
            name: this.nameOf(p, column, feature),
            score,
          })),
        ];
      })
      .sort((a, b) => Math.abs(b.score) - Math.abs(a.score));
  }
}

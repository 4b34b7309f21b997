// An attribution's grids: the exact values, with a grid of the estimates beside them on the same scale.

import { SweepGrid } from "./grid.js";

const baseline = (value) => (value === null ? null : { value, logprob: null, foil_logprob: null });

export class AttributionGrid extends SweepGrid {
  take(view) {
    super.take(view);
    const { result, job } = view;
    this.wanted = job.cells_expected;
    const known = result.estimated.map((found) => found.base !== null);
    const features = result.estimated.flatMap(({ checked }) => checked.filter(({ feature, exact }) => feature !== null && exact !== null));
    if (features.length) this.known = features.length;
    const pairs = result.pairs.map((pair, p) => ({ ...pair, grids: result.estimated[p].estimates, base: baseline(result.estimated[p].base), source: baseline(result.estimated[p].source) }));
    const estimated = { result: { ...result, pairs, skipped: [] } };
    if (this.estimates) this.estimates.take(estimated);
    else {
      this.estimates = new SweepGrid(estimated);
      this.estimates.findLimits = (pair) => this.findLimits(pair);
      this.estimates.marks = (pair, hook) => this.marks(pair, hook);
    }
    known.forEach((is, p) => {
      if (is) this.estimates.leave(p, () => true, "not estimated");
      if (job.finished !== null) this.leave(p, () => true, "not computed exactly");
      else if (is && result.method !== "adaptive") {
        const chosen = new Set(result.estimated[p].checked.map((cell) => `${cell.hook}/${this.layers.indexOf(cell.layer) * this.columns + cell.column}`));
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

  /** One scale for both grids. */
  findLimits(pair) {
    const estimates = SweepGrid.prototype.findLimits.call(this.estimates, pair);
    if (Number.isNaN(this.base(pair))) return estimates;
    const exact = super.findLimits(pair);
    return [Math.min(estimates[0], exact[0]), Math.max(estimates[1], exact[1])];
  }

  /** The cells with an exact value or chosen for one, each with its `pair`, strongest first. */
  checked(pair) {
    const effect = (cell) => (cell.exact === null ? -1 : Math.abs(cell.exact - this.baseOf(cell.pair)));
    return this.chosen(pair).flatMap((p) => this.result.estimated[p].checked.map((cell) => ({ ...cell, pair: p }))).sort((a, b) => effect(b) - effect(a));
  }

  /** [{row, column}] of the cells of a hook whose estimate disagrees with the exact value. */
  marks(pair, hook) {
    return this.checked(pair).filter((cell) => cell.off && cell.hook === hook).map((cell) => ({ row: this.layers.indexOf(cell.layer), column: cell.column }));
  }

  /** [{pair, name, score}] of edges and features, strongest first. */
  scores(pair) {
    const end = ({ kind, layer, head }) => (kind === "embed" || kind === "logits" ? kind : `${kind} ${layer}${head < 0 ? "" : `.${head}`}`);
    return this.chosen(pair)
      .flatMap((p) => {
        const { edges, features } = this.result.estimated[p];
        return [
          ...edges.map(({ sender, receiver, score }) => ({ pair: p, name: `${end(sender)} → ${end(receiver)}`, score })),
          ...features.map(({ column, feature, score }) => ({ pair: p, name: this.nameOf(p, column, feature), score })),
        ];
      })
      .sort((a, b) => Math.abs(b.score) - Math.abs(a.score));
  }
}

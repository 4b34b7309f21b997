// What a sweep has found, in one sentence.

import { shown } from "./grid.js";
import { hookName } from "./hooks.js";

const STRONG = 0.5; // of the greatest change: such cells are named
const FAINT = 0.05; // share recovered below which no cell matters
const NAMED = 2; // columns, beside the last one that matters

const VALUE = {
  logit_diff: "log P(answer) − log P(foil)",
  logprob: "log P(answer)",
  kl: "the next-token distribution",
};
const TO = { denoise: "of the answer", noise: "of the way to the other prompt's answer" };

/** Numbers as `0–9` and `12`, of layers in ascending order. */
function ranges(layers, all) {
  const parts = [];
  for (const layer of layers) {
    const last = parts[parts.length - 1];
    if (last && all.indexOf(layer) === all.indexOf(last[1]) + 1) last[1] = layer;
    else parts.push([layer, layer]);
  }
  const written = parts.map(([from, to]) => (from === to ? from : `${from}–${to}`));
  return `${layers.length > 1 ? "layers" : "layer"} ${written.join(", ")}`;
}

/** The sentence; empty: no cell has a value yet. `pair` null: the mean over all. */
export function finding(grid, pair) {
  let best = null;
  const cells = [];
  for (const hook of grid.hooks) {
    grid.layers.forEach((layer, row) => {
      for (let column = 0; column < grid.columns; column += 1) {
        const cell = grid.at(pair, hook, row, column);
        if (cell.state !== "value" || Number.isNaN(cell.effect)) continue;
        const found = { hook, layer, column, effect: cell.effect, size: Math.abs(cell.effect) };
        cells.push(found);
        if (!best || found.size > best.size) best = found;
      }
    });
  }
  if (!best) return "";
  const { metric, result } = grid;
  const noise = grid.noise(pair);
  const percent = (share) => `${Math.round(share * 100)} %`.replace("-", "−");
  const far =
    metric === "recovered" ? `${percent(best.effect)} ${TO[result.direction] || ""}` : shown(best.effect);
  if (best.size < (metric === "recovered" ? FAINT : 3 * (noise ? noise.value : 0))) {
    const does = metric === "recovered" ? `recovers ${far}` : `changes ${VALUE[metric]} by ${far}`;
    return `No single patch matters: the strongest ${does}.`;
  }
  const names = grid.names(pair);
  const places = new Map();
  for (const { hook, layer, column, effect } of cells)
    if (hook === best.hook && effect * Math.sign(best.effect) >= STRONG * best.size)
      places.set(column, [...(places.get(column) || []), layer]);
  // there, the answer is predicted
  const last = result.axis === "position" ? Math.max(...places.keys()) : null;
  const most = [...places].sort((a, b) => b[1].length - a[1].length);
  const strongest = most.filter(([column], n) => n < NAMED || column === last).sort((a, b) => a[0] - b[0]);
  const called = (name) =>
    result.axis === "position"
      ? name.replace(/^(.*?)( \d+)?$/, (_, token, place) => `“${token}”${place ? ` (token${place})` : ""}`)
      : name;
  const each = strongest.map(
    ([column, layers]) => `${called(names[column])} in ${ranges(layers, grid.layers)}`,
  );
  const where = new Intl.ListFormat("en-GB").format(each);
  const hook = hookName(best.hook).replace(/^[A-Z](?![A-Z])/, (letter) => letter.toLowerCase());
  const doing =
    { zeros: `setting the ${hook} to zero there`, mean: `setting the ${hook} to its mean there` }[
      result.ablation
    ] || `patching the ${hook} there`;
  const does =
    metric === "recovered"
      ? result.direction === "noise"
        ? `moves up to ${far}`
        : `recovers up to ${far}`
      : `changes ${VALUE[metric]} by up to ${far} nats`;
  const matter = strongest.length > 1 || strongest[0][1].length > 1 ? "matter" : "matters";
  return `${where} ${matter} most: ${doing} ${does}.`;
}

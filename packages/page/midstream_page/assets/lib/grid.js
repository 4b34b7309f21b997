// A sweep's grids as arrays, filled from the server's view of it and from `cell` events; of one pair,
// or the mean over all.

import { hookName } from "./hooks.js";

export const MEANING = {
  logprob: "log P(answer), nats",
  logit_diff: "log P(answer) − log P(foil), nats",
  recovered: "recovered (0–1)",
  kl: "KL from the clean prompt, nats",
};

const WAITING = 0;
const VALUE = 1;
const NONE = 2;
const LEFT = 3; // without a value as far as is known: one may come
const NAMES = 2; // of pairs whose columns are called otherwise, so many names are shown

/** A token as a label: without the spaces at its ends; what cannot be seen is spelled out. */
export function written(label) {
  const bare = label.trim();
  if (label && /^ +$/.test(label)) return "␣".repeat(label.length);
  return bare && !/[\p{C}\p{Zl}\p{Zp}]/u.test(bare) ? bare : JSON.stringify(label).slice(1, -1);
}

/** The step from one float32 to the next at `value`. */
function step32(value) {
  const bits = new DataView(new ArrayBuffer(4));
  bits.setFloat32(0, Math.abs(value));
  bits.setUint32(0, bits.getUint32(0) + 1);
  return bits.getFloat32(0) - Math.fround(Math.abs(value));
}

export class SweepGrid {
  constructor(view) {
    const { result } = view;
    this.hooks = result.hooks;
    this.layers = result.layers;
    this.metric = result.metric;
    this.titles = [
      { head: "head", head_position: "head and token", neuron: "neurons by rank", together: "tokens" }[
        result.axis
      ] || "token",
      "layer",
    ];
    this.columns = result.pairs[0].labels.length;
    this.size = this.layers.length * this.columns;
    const each = (make) =>
      result.pairs.map(() => Object.fromEntries(this.hooks.map((hook) => [hook, make()])));
    this.values = each(() => new Float64Array(this.size).fill(NaN));
    this.states = each(() => new Uint8Array(this.size));
    this.reasons = new Map(); // "pair/hook/index" → why there is no value
    this.known = 0;
    this.cached = new Map();
    this.take(view);
  }

  /** Adds what a later view knows. A cell that is known never changes. */
  take({ result }) {
    this.result = result;
    this.pairs = result.pairs;
    this.cached.clear();
    this.pairs.forEach((pair, p) => {
      for (const hook of this.hooks) {
        pair.grids[hook].forEach((row, layer) =>
          row.forEach((value, column) => {
            if (value !== null) this.set(p, hook, layer * this.columns + column, value, "");
          }),
        );
      }
    });
    for (const { pair, hook, layers, column, reason } of result.skipped) {
      for (const layer of layers)
        this.set(pair, hook, this.layers.indexOf(layer) * this.columns + column, null, reason);
    }
  }

  /** One `cell` event: {pair, hook, layer, column, value, reason}. Its place: {hook, row, column}. */
  cell({ pair, hook, layer, column, value, reason }) {
    const row = this.layers.indexOf(layer);
    this.set(pair, hook, row * this.columns + column, value, reason);
    return { hook, row, column };
  }

  set(pair, hook, index, value, reason) {
    const states = this.states[pair][hook];
    if (states[index] !== WAITING && states[index] !== LEFT) return;
    this.known += 1;
    this.cached.delete("limits");
    states[index] = value === null ? NONE : VALUE;
    if (value === null) this.reasons.set(`${pair}/${hook}/${index}`, reason || "reason unknown");
    else ((this.values[pair][hook][index] = value), this.reasons.delete(`${pair}/${hook}/${index}`));
  }

  /**
   * Cells of a pair that are to get no value get its reason, if `which(hook, index)`. They do not
   * count as known.
   */
  leave(pair, which, reason) {
    for (const hook of this.hooks) {
      this.states[pair][hook].forEach((state, index, states) => {
        if (state !== WAITING || !which(hook, index)) return;
        states[index] = LEFT;
        this.reasons.set(`${pair}/${hook}/${index}`, reason);
      });
    }
  }

  get total() {
    return this.size * this.hooks.length * this.pairs.length;
  }

  /**
   * What nothing is written into has, in the metric's units; NaN: not known yet. `pair` null: the mean
   * over all.
   */
  base(pair) {
    if (this.metric === "recovered") return 0;
    const known = this.chosen(pair).flatMap((p) => (this.pairs[p].base ? [this.pairs[p].base.value] : []));
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : NaN;
  }

  baseOf(pair) {
    if (this.metric === "recovered") return 0;
    return this.pairs[pair].base ? this.pairs[pair].base.value : NaN;
  }

  chosen(pair) {
    return pair === null ? this.pairs.map((_, p) => p) : [pair];
  }

  /**
   * {state: "value", value, effect, spread, count} | {state: "none", reason} | {state: "waiting"};
   * `row` counts layers.
   */
  at(pair, hook, row, column) {
    const index = row * this.columns + column;
    let count = 0;
    let sum = 0;
    let effects = 0;
    let waits = false;
    let reason = "";
    const chosen = this.chosen(pair);
    for (const p of chosen) {
      const state = this.states[p][hook][index];
      if (state === VALUE) {
        count += 1;
        sum += this.values[p][hook][index];
        effects += this.values[p][hook][index] - this.baseOf(p);
      } else if (state === WAITING) waits = true;
      else reason = reason || this.reasons.get(`${p}/${hook}/${index}`);
    }
    if (!count) return waits ? { state: "waiting" } : { state: "none", reason };
    const value = sum / count;
    const squares = chosen.reduce(
      (all, p) =>
        all + (this.states[p][hook][index] === VALUE ? (this.values[p][hook][index] - value) ** 2 : 0),
      0,
    );
    return {
      state: "value",
      value,
      effect: effects / count,
      count,
      spread: count > 1 ? Math.sqrt(squares / (count - 1)) : null,
    };
  }

  /**
   * [low, high] of a scale that serves all hooks: as far on both sides of the base as any cell lies;
   * −1 to 1 of shares.
   */
  limits(pair) {
    return this.once("limits", pair, () => this.findLimits(pair));
  }

  /** What the scale's ends stand for, and what its colours mean. */
  legend(pair) {
    const base = this.base(pair);
    return {
      ends: this.limits(pair).map(shown),
      text: `${MEANING[this.metric]}; neutral: unpatched${Number.isNaN(base) ? "" : ` (${shown(base)})`}`,
    };
  }

  /** What `find` gives, once for each pair until cells or views change it. */
  once(what, pair, find) {
    if (!this.cached.has(what)) this.cached.set(what, new Map());
    const known = this.cached.get(what);
    if (!known.has(pair)) known.set(pair, find());
    return known.get(pair);
  }

  findLimits(pair) {
    if (this.metric === "recovered") return [-1, 1];
    const base = this.base(pair);
    let low = Infinity;
    let high = -Infinity;
    for (const hook of this.hooks) {
      for (let row = 0; row < this.layers.length; row += 1) {
        for (let column = 0; column < this.columns; column += 1) {
          const cell = this.at(pair, hook, row, column);
          if (cell.state !== "value") continue;
          const value = Number.isNaN(base) ? cell.value : base + cell.effect;
          if (value < low) low = value;
          if (value > high) high = value;
        }
      }
    }
    if (low > high) return Number.isNaN(base) ? [-1, 1] : [base - 1, base + 1];
    if (Number.isNaN(base)) return low < high ? [low, high] : [low - 1, high + 1];
    const reach = Math.max(Math.abs(low - base), Math.abs(high - base)) || 1;
    return [base - reach, base + reach];
  }

  /**
   * The largest change that a patch made which changes nothing, or the least that can be shown; null:
   * not known.
   */
  noise(pair) {
    const floors = this.chosen(pair).flatMap((p) =>
      this.pairs[p].noise_floor === null ? [] : [this.pairs[p].noise_floor],
    );
    if (!floors.length) return null;
    const floor = Math.max(...floors);
    const least = Math.max(...this.chosen(pair).map((p) => this.resolution(this.pairs[p])));
    return floor > least
      ? { text: `± ${floor.toPrecision(2)}`, value: floor }
      : { text: `± less than ${least.toPrecision(1)}`, value: least };
  }

  resolution({ base, source }) {
    const known = [base, source].filter(Boolean);
    const parts = known.flatMap((each) => [each.logprob, each.foil_logprob]).filter((part) => part !== null);
    const step = step32(parts.length ? Math.max(...parts.map(Math.abs)) : 1);
    const span = this.metric === "recovered" && known.length > 1 ? Math.abs(source.value - base.value) : 1;
    return step / (span || 1);
  }

  /** Names of the columns for people: tokens with their position, where all shown pairs have the same. */
  names(pair) {
    return this.once("names", pair, () => this.findNames(pair));
  }

  findNames(pair) {
    const chosen = this.chosen(pair).map((p) => this.pairs[p]);
    return chosen[0].labels.map((_, column) => {
      const different = [...new Set(chosen.map((each) => written(each.labels[column])))];
      const name = different.slice(0, NAMES).join("/") + (different.length > NAMES ? "/…" : "");
      const places = new Set(chosen.map((each) => (each.positions[column] || []).join()));
      const [first] = chosen[0].positions[column] || [];
      const token =
        places.size === 1 &&
        chosen.every(
          (each) =>
            (each.positions[column] || []).length === 1 && each.labels[column] === each.base_tokens[first],
        );
      return token ? `${name} ${first}` : name;
    });
  }

  /** One record for each cell of each pair, as `PatchStudy.to_records` has them. */
  records() {
    const found = [];
    this.pairs.forEach((pair, p) => {
      for (const hook of this.hooks) {
        this.layers.forEach((layer, row) =>
          pair.labels.forEach((label, column) => {
            const cell = this.at(p, hook, row, column);
            found.push({
              pair: p,
              hook,
              layer,
              column,
              label,
              positions: pair.positions[column] || [],
              value: cell.state === "value" ? cell.value : null,
              effect: cell.state === "value" && !Number.isNaN(cell.effect) ? cell.effect : null,
              reason: cell.reason || "",
              ...(pair.heads.length ? { head: pair.heads[column] } : {}),
              ...(pair.neurons[hook] ? { neurons: pair.neurons[hook][row][column] } : {}),
            });
          }),
        );
      }
    });
    return found;
  }

  /** The cell in words. */
  words(pair, hook, row, column) {
    const cell = this.at(pair, hook, row, column);
    const where = `${hookName(hook)}, layer ${this.layers[row]}, ${this.names(pair)[column]}`;
    if (cell.state === "waiting") return `${where}: pending`;
    if (cell.state === "none") return `${where}: no value, ${cell.reason}`;
    const noise = this.noise(pair);
    const spread =
      cell.spread === null
        ? ""
        : `, standard deviation ${cell.spread.toPrecision(2)} over ${cell.count} pairs`;
    const neurons =
      pair !== null || this.pairs.length === 1
        ? (this.pairs[pair || 0].neurons[hook] || [])[row]?.[column]
        : null;
    const value = `${shown(cell.value)}${noise ? ` ${noise.text} (noise)` : ""}`;
    const dimensions = neurons && neurons.length ? `, dimensions ${neurons.join(", ")}` : "";
    return `${where}: ${value} ${MEANING[this.metric]}${spread}${dimensions}`;
  }
}

/**
 * Where a cell lies on the scale, −1 to 1; NaN: it has no value; null: it is not there yet. `row`
 * counts layers.
 */
export function shareOf(grid, pair, hook, row, column) {
  const cell = grid.at(pair, hook, row, column);
  if (cell.state !== "value") return cell.state === "none" ? NaN : null;
  const [low, high] = grid.limits(pair);
  const base = grid.base(pair);
  const value = Number.isNaN(base) ? cell.value : base + cell.effect;
  return ((value - low) / (high - low)) * 2 - 1;
}

/** A value with the digits that matter. */
export const shown = (value) =>
  (Math.abs(value) >= 1000 || (value !== 0 && Math.abs(value) < 0.001)
    ? value.toExponential(2)
    : value.toFixed(3)
  ).replace("-", "−");

const FORMULA = /^[=+\-@\t\r](?![\d.]*$)/; // what spreadsheets run, if it begins a text that is no number

const quoted = (value) => {
  const plain =
    value === null || value === undefined ? "" : Array.isArray(value) ? value.join(" ") : String(value);
  const text = typeof value === "string" && FORMULA.test(value) ? `'${plain}` : plain;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};

/** RFC 4180, with the records' fields as its header. */
export function csv(records) {
  const names = Object.keys(records[0] || {});
  return (
    [names, ...records.map((record) => names.map((name) => record[name]))]
      .map((row) => row.map(quoted).join(","))
      .join("\r\n") + "\r\n"
  );
}

// The body of a sweep: what the form's fields make of it and back, and the request of a closer look.

/** What a request has where it says nothing else. */
const DEFAULTS = {
  layers: "all",
  positions: "all_prompt",
  axis: "position",
  heads: null,
  neurons: null,
  path: null,
  window: { layers: 1, positions: 1 },
  metric: "recovered",
  direction: "denoise",
  ablation: null,
  alignment: "auto",
  alpha: 1,
  mask: null,
  noise: 8,
  metadata: {},
  priority: "normal",
  expires_in: null,
  callback_url: null,
  callback_events: null,
  lora: null,
  method: "",
  verify: null,
  keep: 1000,
};
/** Fields whose controls no JSON may bypass: the form could not show what it sends. */
const OWN = ["model", "pairs", "hooks"];
const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);

/** Without what is the default anyway. */
export function lean(request) {
  const kept = (of, defaults) =>
    Object.fromEntries(
      Object.entries(of).filter(
        ([name, value]) => value !== undefined && !same(value, name in defaults ? defaults[name] : null),
      ),
    );
  const { model, pairs, hooks, ...rest } = request;
  return { model, pairs: pairs.map((pair) => kept(pair, {})), hooks, ...kept(rest, DEFAULTS) };
}

export const EXAMPLE = {
  pairs: [
    {
      clean: "The Eiffel Tower is located in the city of",
      corrupt: "The Colosseum is located in the city of",
      answer: " Paris",
      foil: " Rome",
    },
  ],
  hooks: ["resid_pre", "attn_out", "mlp_out"],
  metadata: { name: "Where is the Eiffel Tower?" },
};

// --- The form ------------------------------------------------------------------------------------

export const TEXTS = ["clean", "corrupt", "answer", "foil"];
/** Fields with a control of their own, as the form keeps them: text. */
const PLAIN = [
  "layers",
  "positions",
  "axis",
  "metric",
  "direction",
  "ablation",
  "alignment",
  "noise",
  "method",
  "verify",
];
export const emptyPair = () => ({ clean: "", corrupt: "", answer: "", foil: "", more: "" });

const integers = /^\s*-?\d{1,9}(\s*,\s*-?\d{1,9})*\s*$/;

/**
 * `0,5,-1` as numbers, `5:` or `5:9` as a range; a name stays one, and so does what only the server
 * can complain about.
 */
export function positionsOf(text) {
  if (integers.test(text)) return text.split(",").map(Number);
  const range = /^\s*(-?\d{1,9})?:(-?\d{1,9})?\s*$/.exec(text);
  if (!range || (range[1] === undefined && range[2] === undefined)) return text.trim();
  return {
    ...(range[1] === undefined ? {} : { start: Number(range[1]) }),
    ...(range[2] === undefined ? {} : { stop: Number(range[2]) }),
  };
}

/** The text of a field that `positionsOf`, or the server, reads as this value; null: it has none. */
function textOf(value) {
  if (typeof value === "string" || typeof value === "number") return String(value);
  if (Array.isArray(value)) return value.every(Number.isInteger) && value.length ? value.join(",") : null;
  const { start = null, stop = null, text = null, image = null, occurrence = 0 } = value || {};
  return value && text === null && image === null && occurrence === 0 && (start !== null || stop !== null)
    ? `${start ?? ""}:${stop ?? ""}`
    : null;
}

export function blankForm(model = "", hooks = []) {
  return {
    model,
    hooks,
    layers: "all",
    positions: "all_prompt",
    axis: "position",
    metric: "recovered",
    direction: "denoise",
    ablation: "",
    alignment: "auto",
    windowLayers: "1",
    windowPositions: "1",
    noise: "8",
    more: "",
    name: "",
    method: "",
    verify: "",
    pairs: [emptyPair()],
  };
}

/** A form that makes this request; what no control can show is in `more` as JSON. */
export function formOf(request) {
  const { model, hooks = ["post_block"], pairs, window = DEFAULTS.window, ...rest } = lean(request);
  const form = {
    ...blankForm(model, hooks),
    windowLayers: String(window.layers ?? 1),
    windowPositions: String(window.positions ?? 1),
  };
  const more = {};
  if (rest.metadata && rest.metadata.name) {
    const { name, ...others } = rest.metadata;
    form.name = name;
    rest.metadata = Object.keys(others).length ? others : undefined;
  }
  for (const [name, value] of Object.entries(rest)) {
    const text = PLAIN.includes(name) ? textOf(value) : null;
    if (value === undefined) continue;
    if (text === null) more[name] = value;
    else form[name] = text;
  }
  const written = (left) => (Object.keys(left).length ? JSON.stringify(left) : "");
  form.more = written(more);
  form.pairs = pairs.map((pair) => {
    const shown = Object.fromEntries(
      TEXTS.filter((name) => typeof pair[name] === "string").map((name) => [name, pair[name]]),
    );
    return {
      ...emptyPair(),
      ...shown,
      more: written(Object.fromEntries(Object.entries(pair).filter(([name]) => !(name in shown)))),
    };
  });
  return form;
}

/** {request} of a form, or {errors: {field: text}} of JSON that cannot be read. */
export function requestOf(form) {
  const errors = {};
  const extra = (text, field, own = []) => {
    if (!text.trim()) return {};
    let value = null;
    try {
      value = JSON.parse(text);
    } catch {
      // said below
    }
    if (!value || typeof value !== "object" || Array.isArray(value))
      errors[field] = 'Not a JSON object; example: {"alpha": 0.5}';
    else if (own.some((name) => name in value))
      errors[field] = `Use the controls above for ${own.join(", ")}`;
    else return value;
    return {};
  };
  const number = (text) => (/^\s*-?\d+(\.\d+)?\s*$/.test(text) ? Number(text) : text);
  const window = { layers: number(form.windowLayers), positions: number(form.windowPositions) };
  const request = {
    model: form.model,
    pairs: form.pairs.map((pair, n) => ({
      ...Object.fromEntries(TEXTS.filter((name) => pair[name] !== "").map((name) => [name, pair[name]])),
      ...extra(pair.more, `pairs[${n}].more`),
    })),
    hooks: form.hooks,
    layers: form.layers.trim(),
    positions: positionsOf(form.positions),
    axis: form.axis,
    metric: form.metric,
    direction: form.direction,
    ablation: form.ablation || null,
    alignment: form.alignment,
    window,
    noise: number(form.noise),
    method: form.method,
    verify: form.method && form.verify ? {} : null,
    ...extra(form.more, "more", OWN),
  };
  if (form.name.trim()) request.metadata = { ...request.metadata, name: form.name.trim() };
  return Object.keys(errors).length ? { errors } : { request: lean(request) };
}

/** What is still to be filled in before it is worth asking the server; empty: nothing. */
export function lacking({ request }) {
  if (!request) return "";
  if (!request.model) return "No model is served yet; it appears here once a worker has loaded it.";
  if (!request.hooks.length) return "Choose at least one hook point.";
  const without = request.ablation ? ["clean"] : ["clean", "corrupt"];
  for (const [n, pair] of request.pairs.entries()) {
    const names = [...without, ...(request.metric === "kl" ? [] : ["answer"])].filter(
      (name) => pair[name] === undefined || pair[name].length === 0,
    );
    const which = request.pairs.length > 1 ? ` of pair ${n + 1}` : "";
    if (names.length) return `Fill in ${names.join(" and ")}${which} to preview the aligned tokens.`;
  }
  return "";
}

// --- A closer look -------------------------------------------------------------------------------

/**
 * The request of a sweep over part of this one's grid: each token of these columns and each of these
 * layers by itself, as `PatchStudy.zoom` asks for it. `part`: {hook, rows: [first, last], columns:
 * [first, last]}, rows counting layers. Throws Error where there is none.
 */
export function closer(request, result, part, byHead = false) {
  if (result.axis === "neuron") throw new Error("a sweep over neurons has no closer look");
  const [first, last] = part.columns;
  const numbers = Array.from({ length: last - first + 1 }, (_, n) => first + n);
  const pairs = request.pairs.map((pair, n) => {
    const found = result.pairs[n];
    const places = new Map();
    for (const column of numbers) {
      const sources = found.sources.some((each) => each.length)
        ? found.sources[column]
        : found.positions[column];
      found.positions[column].forEach((place, index) => {
        if (places.has(place) && places.get(place) !== sources[index])
          throw new Error(
            `position ${place} would get rows of two positions: select only one of the columns`,
          );
        places.set(place, sources[index]);
      });
    }
    if (!places.size)
      throw new Error(
        `nothing in this selection can be patched${result.pairs.length > 1 ? ` in pair ${n + 1}` : ""}`,
      );
    const links = [...places].sort((a, b) => a[0] - b[0]);
    const alignment = found.sources.some((each) => each.length)
      ? links.map(([place, other]) => (result.direction === "noise" ? [place, other] : [other, place]))
      : null;
    return { ...pair, spans: null, positions: links.map(([place]) => place), alignment };
  });
  const heads = result.pairs[0].heads;
  const axis = byHead
    ? { axis: "head", heads: null, neurons: null, hooks: ["z"] }
    : {
        ...(heads.length
          ? {
              axis: "head_position",
              heads: [...new Set(numbers.map((column) => heads[column]))].sort((a, b) => a - b),
            }
          : { axis: "position" }),
        hooks: [part.hook],
      };
  return lean({
    ...request,
    ...axis,
    pairs,
    layers: layersAround(result, part),
    positions: DEFAULTS.positions,
    window: DEFAULTS.window,
  });
}

/**
 * The layers of a part; of a single cell also those that were patched together with it or lie between
 * it and the next ones.
 */
function layersAround({ layers, window }, { rows: [first, last], columns }) {
  let [from, to] = [layers[first], layers[last]];
  if (first === last && columns[0] === columns[1]) {
    from = Math.max(Math.min(layers[Math.max(first - 1, 0)], from - window.layers), layers[0]);
    to = Math.min(
      Math.max(layers[Math.min(first + 1, layers.length - 1)], to + window.layers),
      layers[layers.length - 1],
    );
  }
  return from === to ? String(from) : `${from}-${to}`;
}

// Two jobs side by side: what was asked differently, their texts with differences, and their captures'
// norms or grids as a difference.

import { get } from "../lib/api.js";
import { Loading, Problem, html, useState, useTask } from "../lib/ui.js";
import { age, number } from "../lib/format.js";
import { SweepGrid, shown } from "../lib/grid.js";
import { hookName } from "../lib/hooks.js";
import { timing, titleOf } from "../lib/jobs.js";
import { kindOf } from "../lib/kinds.js";
import { State, Table } from "../lib/parts.js";
import { visible } from "../lib/chips.js";
import { useAnswer } from "../lib/ask.js";
import { Side, diff } from "../plots/text_diff.js";
import { SaveAs } from "../plots/save.js";
import { picture } from "../plots/sweep_picture.js";
import { Maps } from "./sweep_grid.js";

const MOST = 100; // prompts, and fields of the requests
const ROWS = 256; // of a capture
const NOBODY = new Set(); // listens: the grids do not change

/** Each value of a request by its path, as JSON. */
function flat(value, path = "") {
  // the same as not given
  if (value === null || (typeof value === "object" && !Object.keys(value).length)) return [];
  if (typeof value !== "object" || (Array.isArray(value) && value.every((item) => typeof item !== "object")))
    return [[path, JSON.stringify(value)]];
  return Object.entries(value).flatMap(([key, item]) =>
    flat(item, Array.isArray(value) ? `${path}[${key}]` : path ? `${path}.${key}` : key),
  );
}

const cut = (text) => (text && text.length > 300 ? `${text.slice(0, 300)}…` : text);
/** A value as JSON, in short; of data in base64 a digest (FNV-1a), by which equal data is known. */
const inShort = (json) =>
  /^"[A-Za-z0-9+/]{40,}=*"$/.test(json)
    ? `${number(Math.floor(((json.length - 2) * 3) / 4))} bytes, digest ${Array.from(json)
        .reduce((hash, sign) => Math.imul(hash ^ sign.charCodeAt(0), 16777619) >>> 0, 2166136261)
        .toString(16)}`
    : cut(json);

function Requests({ both }) {
  const [a, b] = both.map(({ body }) => new Map(body ? flat(body) : []));
  const fields = [...new Set([...a.keys(), ...b.keys()])].filter((path) => a.get(path) !== b.get(path));
  if (!a.size || !b.size) return html`<p class="soft">The server did not keep one of the requests.</p>`;
  if (!fields.length) return html`<p>Both asked for the same.</p>`;
  const cell = (text) => html`<span class="mono">${text ? inShort(text) : "not given"}</span>`;
  return html`
    <${Table}
      label="Differences of the requests"
      heads=${["Field", "First", "Second"]}
      rows=${fields
        .slice(0, MOST)
        .map((path) => [html`<span class="mono">${path}</span>`, cell(a.get(path)), cell(b.get(path))])}
    />
  `;
}

function Texts({ results, requests }) {
  const many = Math.min(MOST, Math.max(...results.map(({ outputs }) => outputs.length)));
  const text = (n, side) => (results[side].outputs[n] || {}).text ?? "";
  return Array.from({ length: many }, (_, n) => {
    const parts = diff(text(n, 0), text(n, 1));
    const prompt = requests.map(({ prompts }) => (prompts[n] || {}).text).find(Boolean);
    return html`
      <h3>${prompt ? cut(prompt) : `Prompt ${n}`}</h3>
      <div class="panes">
        ${["first", "second"].map(
          (side, place) => html`
            <div class="pane" role="region" tabindex="0" aria-label=${`Output ${n} of the ${side} job`}>
              ${
                results[place].outputs[n]
                  ? html`<${Side} parts=${parts} side=${side} />`
                  : html`<span class="soft">none</span>`
              }
            </div>
          `,
        )}
      </div>
      ${parts.every(({ only }) => !only) && html`<p class="soft">Both wrote the same.</p>`}
    `;
  });
}

/** The second less the first, where both have a value; of norms, as a share of the first. */
class Difference extends SweepGrid {
  base = () => 0;
  baseOf = () => 0;
  noise = () => null;

  findLimits(pair) {
    const sizes = this.hooks
      .flatMap((hook) =>
        Array.from({ length: this.size }, (_, n) =>
          Math.abs(this.at(pair, hook, Math.floor(n / this.columns), n % this.columns).value),
        ),
      )
      .filter(Number.isFinite);
    const reach = sizes.reduce((most, size) => Math.max(most, size), 0) || 1;
    return [-reach, reach];
  }

  text(value) {
    const sign = value > 0 ? "+" : value < 0 ? "−" : "";
    return this.metric === "norm"
      ? `${sign}${number(Math.abs(100 * value), 1)} %`
      : `${sign}${shown(Math.abs(value))}`;
  }

  legend(pair) {
    const what = this.metric === "norm" ? "norm" : "value";
    return {
      ends: this.limits(pair).map((end) => this.text(end)),
      text: `change of the ${what} from the first to the second; neutral: the same`,
    };
  }

  words(pair, hook, row, column) {
    const cell = this.at(pair, hook, row, column);
    const where = `${hookName(hook)}, layer ${this.layers[row]}, ${this.names(pair)[column]}`;
    return `${where}: ${cell.state === "value" ? this.text(cell.value) : cell.reason}`;
  }
}

/** The difference of two grids; why there is none, as text. */
function difference(a, b) {
  const hooks = a.hooks.filter((hook) => b.hooks.includes(hook));
  if (!hooks.length) return `they have no hook point in common (${a.hooks} and ${b.hooks})`;
  for (const field of ["layers", "metric", "axis"])
    if (String(a[field]) !== String(b[field])) return `their ${field} differ (${a[field]} and ${b[field]})`;
  if (
    a.pairs.length !== b.pairs.length ||
    a.pairs.some((pair, n) => pair.labels.length !== b.pairs[n].labels.length)
  )
    return "they have other numbers of tokens";
  const less = (first, second) =>
    first.map((row, layer) =>
      row.map((value, column) => {
        const other = second[layer][column];
        return value === null || other === null
          ? null
          : a.metric === "norm"
            ? value
              ? other / value - 1
              : null
            : other - value;
      }),
    );
  const pairs = a.pairs.map((pair, n) => ({
    ...b.pairs[n],
    grids: Object.fromEntries(hooks.map((hook) => [hook, less(pair.grids[hook], b.pairs[n].grids[hook])])),
  }));
  const grid = new Difference({ result: { ...b, hooks, pairs, skipped: [] } });
  grid.left = [...a.hooks, ...b.hooks].filter((hook) => !hooks.includes(hook));
  grid.pairs.forEach((_, pair) => grid.leave(pair, () => true, "one of both has no value"));
  return grid;
}

/** Norms of one prompt's rows in the form of a sweep's grids, for the same maps. */
const asGrid = ({ hook, at, layers, norms, positions, tokens, token_ids: ids }) => ({
  hooks: [hook],
  at,
  layers,
  metric: "norm",
  axis: "position",
  pairs: [
    {
      labels: (tokens || ids.map(String)).map(visible),
      positions: positions.map((place) => [place]),
      base_tokens: [],
      notes: [],
      heads: [],
      neurons: {},
      grids: { [hook]: norms },
    },
  ],
});

function Change({ ids, kind, prompts }) {
  const [found, set] = useState({});
  const [request, choose] = useState(0);
  const [cursor, setCursor] = useState(null);
  const grids = kindOf(kind).grid;
  useTask(
    (signal) => {
      const load = async (id) =>
        grids
          ? (await get(`/v1/${kind}s/${id}`, { signal })).result
          : asGrid(
              await get(`/v1/captures/${id}/norms?request=${request}&start=0&count=${ROWS}`, { signal }),
            );
      Promise.all(ids.map(load)).then(
        ([a, b]) => set({ grid: difference(a, b) }),
        (error) => signal.aborted || set({ error }),
      );
    },
    [request],
  );
  const { grid, error } = found;
  return html`
    <h2>${grids ? "Heatmaps" : "Norms of the captured rows"}</h2>
    <${Problem} error=${error} />
    ${
      !grids &&
      grid &&
      grid.result &&
      grid.result.at === "before" &&
      html`
        <p class="soft">
          Rows are taken before the edits at the same hook point and layer: what an edit changes shows only
          after it.
        </p>
      `
    }
    ${
      grid &&
      grid.left &&
      grid.left.length > 0 &&
      html`<p class="soft">Only one of both has ${grid.left.map(hookName).join(", ")}.</p>`
    }
    ${
      !grids &&
      prompts > 1 &&
      html`
        <p class="inline">
          <label>
            Prompt <input
              type="number"
              min="0"
              max=${prompts - 1}
              value=${request}
              onChange=${({ target }) => (
                setCursor(null),
                choose(Math.max(0, Math.min(prompts - 1, Math.trunc(target.valueAsNumber) || 0)))
              )}
            />
          </label>
        </p>
      `
    }
    ${
      typeof grid === "string"
        ? html`<p>There is no difference map: ${grid}.</p>`
        : grid &&
          html`
            <${Maps}
              key=${request}
              grid=${grid}
              pair=${grid.pairs.length === 1 ? 0 : null}
              listeners=${NOBODY}
              cursor=${cursor}
              setCursor=${setCursor}
            />
            <${SaveAs}
              name=${`${ids.join("-")}.difference`}
              title="Difference"
              png=${() =>
                picture(grid, grid.pairs.length === 1 ? 0 : null, `Second less first: ${ids.join(", ")}`)}
              rows=${grid.records()}
            />
          `
    }
  `;
}

function Both({ ids, jobs }) {
  const [error, setError] = useState(null);
  const paths = (part) => ids.map((id) => `/v1/jobs/${encodeURIComponent(id)}${part}`);
  const [views, requests, results] = ["", "/request", "/result"].map((part) =>
    paths(part).map((path) => useAnswer(path, setError)),
  );
  if (![...views, ...requests].every(Boolean))
    return html`<${Problem} error=${error} />${!error && html`<${Loading} />`}`;
  const [first, second] = views;
  const grid = kindOf(first.kind).grid;
  const captured =
    !grid &&
    results.every((result) => result && result.capture_results && result.capture_results.files.length);
  return html`
    <div class="panes">
      ${views.map(
        (view, n) => html`
          <div class="card">
            <h2>
              ${["First", "Second"][n]}: <a href=${`#/jobs/${view.id}`}>
                ${titleOf(jobs.byId.get(view.id) || view)}
              </a>
            </h2>
            <p>
              <${State} state=${view.state} /> ${view.kind} · ${view.model} · ${age(
                view.created,
              )} ago · ${timing(view)}
            </p>
          </div>
        `,
      )}
    </div>
    <h2>Asked differently</h2>
    <${Requests} both=${requests} />
    ${first.kind === second.kind && grid && html`<${Change} ids=${ids} kind=${first.kind} />`}
    ${
      results.every((result) => result && result.outputs.length) &&
      html`<h2>Texts</h2><${Texts} results=${results} requests=${requests} />`
    }
    ${
      captured &&
      html`
        <${Change}
          ids=${ids}
          kind="generate"
          prompts=${Math.min(...results.map(({ outputs }) => outputs.length))}
        />
      `
    }
  `;
}

export default function View({ params, jobs }) {
  return html`
    <h1>Compare</h1>
    ${
      params.length === 2
        ? html`<${Both} key=${params.join()} ids=${params} jobs=${jobs} />`
        : html`<p class="lead">Mark two jobs in <a href="#/jobs">Jobs</a> to see them side by side.</p>`
    }
  `;
}

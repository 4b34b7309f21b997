// A finished capture: tokens × layers, coloured by the rows' norms or by their cosines to a module.

import { get } from "../lib/api.js";
import {
  Button,
  Empty,
  Loading,
  Problem,
  html,
  useEffect,
  useMemo,
  useRef,
  useState,
  useTask,
  Coded,
} from "../lib/ui.js";
import { bytes, count, number } from "../lib/format.js";
import { hookTitle } from "../lib/hooks.js";
import { over, titleOf } from "../lib/jobs.js";
import { useAnswer, useJobs } from "../lib/ask.js";
import { moving, useJob } from "../lib/readings.js";
import { Id, Standing } from "../lib/parts.js";
import { SaveAs } from "../plots/save.js";
import { maps } from "../plots/sweep_picture.js";
import { Heatmap } from "../lib/heatmap.js";
import { Chips, Legend, short, visible } from "../lib/chips.js";

const ROWS = 256; // positions that are shown at a time
const FILES = 200;
const CHOSEN = { request: 0, hook: "", module: "", from: "", start: 0, tag: "" };

/** The query of `norms`. */
function queryOf(asked) {
  const query = new URLSearchParams({ request: asked.request, start: asked.start, count: ROWS });
  if (asked.hook) query.set("hook", asked.hook);
  if (asked.tag) query.set("tag", asked.tag);
  if (asked.module) query.set("module", asked.module);
  if (asked.module && asked.from !== "") query.set("module_layer", asked.from);
  return query;
}

/**
 * Interquartile ranges beyond the quartiles; what is farther off is an outlier (Tukey's outer fences),
 * as the first token's row is in most models.
 */
const FAR = 3;

/** The least and the greatest of `values`; unless `full`, of those that are no outliers. */
function rangeOf(values, full) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  const [low, high] = [0.25, 0.75].map((share) => sorted[Math.round(share * (sorted.length - 1))]);
  const near = full
    ? sorted
    : sorted.filter((value) => value >= low - FAR * (high - low) && value <= high + FAR * (high - low));
  return [near[0], near[near.length - 1]];
}

/**
 * Shares from −1 to 1 of all values, `[layer][row]`, what −1 or 0 and 1 stand for, and how many values
 * are `beyond` that. Cosines are their own shares.
 */
function scaled(found, by, each, full) {
  if (by === "cosine")
    return {
      shares: found.cosines,
      low: -1,
      ranges: found.layers.map(() => [-1, 1]),
      beyond: found.layers.map(() => 0),
    };
  const logs = found.norms.map((row) =>
    row.map((value) => (value === null || value <= 0 ? null : Math.log(value))),
  );
  const all = rangeOf(logs.flat(), full);
  const ranges = logs.map((row) => (each ? rangeOf(row, full) : all));
  const shares = logs.map((row, layer) => {
    const [a, b] = ranges[layer];
    return row.map((value) =>
      value === null ? null : value < a ? 0 : value > b ? 1 : b > a ? (value - a) / (b - a) : 0.5,
    );
  });
  const beyond = logs.map(
    (row, layer) =>
      row.filter((value) => value !== null && (value < ranges[layer][0] || value > ranges[layer][1])).length,
  );
  return {
    shares,
    low: 0,
    beyond,
    ranges: ranges.map((range) => range.map((end) => (end === undefined ? null : Math.exp(end)))),
  };
}

const WIDEST = 120; // pixels of a cell, where there are few layers

/** What a heatmap draws of the rows. */
const mapOf = (found, shares, values, words) => ({
  rows: words.map(visible),
  columns: found.layers,
  at: (row, column) => (shares[column] && shares[column][row]) ?? NaN,
  scale: () => "",
  widest: WIDEST,
  text: (row, column) => short(Number(values[column][row].toPrecision(3))),
});

function Grid({ found, shares, values, words, at, move }) {
  const canvas = useRef(null);
  const frame = useRef(null);
  const map = useRef(null);
  const now = useRef(at);
  now.current = at;
  const [box, setBox] = useState(null);
  useEffect(() => {
    const source = mapOf(found, shares, values, words);
    const width = () => Math.max(200, frame.current.clientWidth);
    map.current = new Heatmap(canvas.current, source, width());
    const watch = new ResizeObserver(() => {
      map.current.show(source, width());
      setBox(map.current.box(now.current.row, now.current.layer));
    });
    watch.observe(frame.current);
    return () => {
      watch.disconnect();
      map.current.close();
    };
  }, [found, shares, words]);
  useEffect(
    () => map.current && setBox(map.current.box(at.row, at.layer)),
    [at.row, at.layer, found, shares],
  );
  const point = (event) => {
    const place = event.currentTarget.getBoundingClientRect();
    const cell = map.current.hit(event.clientX - place.left, event.clientY - place.top);
    if (cell) move({ row: cell.row, layer: cell.column });
  };
  return html`
    <div class="norm-grid" ref=${frame}>
      <div class="norm-canvas">
        <canvas
          ref=${canvas}
          role="img"
          aria-label=${`${found.positions.length} tokens by ${found.layers.length} layers`}
          onMouseMove=${point}
          onClick=${point}
        ></canvas>
        ${
          box &&
          html`
            <div
              class="norm-cursor"
              style=${{
                left: `${box.left}px`,
                top: `${box.top}px`,
                width: `${box.width}px`,
                height: `${box.height}px`,
              }}
            ></div>
          `
        }
      </div>
    </div>
  `;
}

function Numbers({ found, values, words }) {
  return html`
    <div class="scroll-x" tabindex="0" role="group" aria-label="Values as a table">
      <table class="plain">
        <thead>
          <tr>
            <th scope="col">Position</th>
            <th scope="col">Token</th>
            ${found.layers.map((layer) => html`<th scope="col" key=${layer}>${layer}</th>`)}
          </tr>
        </thead>
        <tbody>
          ${found.positions.map(
            (position, row) => html`
              <tr key=${position}>
                <td>${position}</td>
                <th scope="row">${visible(words[row])}</th>
                ${found.layers.map(
                  (layer, column) =>
                    html`<td key=${layer}>${short(values[column] ? values[column][row] : null)}</td>`,
                )}
              </tr>
            `,
          )}
        </tbody>
      </table>
    </div>
  `;
}

function Files({ job }) {
  const [open, setOpen] = useState(false);
  const [error, setError] = useState(null);
  const manifest = useAnswer(open && `/v1/captures/${job}`, setError);
  return html`
    <details onToggle=${({ target }) => (setError(null), setOpen(target.open))}>
      <summary>Files</summary>
      <${Problem} error=${error} />
      ${
        manifest &&
        html`
          <p>
            ${number(manifest.files.length)} files, ${bytes(manifest.bytes)}
            ${manifest.detail && html`: <${Coded} text=${manifest.detail} />`}. <a
              href=${`/v1/captures/${job}`}
              download=${`${job}.json`}
            >
              Manifest
            </a>
          </p>
          <ul class="files">
            ${manifest.files.slice(0, FILES).map(
              ({ name, bytes: size }) => html`
                <li key=${name}>
                  <a href=${`/v1/captures/${job}/files/${encodeURIComponent(name)}`} download=${name}>
                    ${name}
                  </a> ${bytes(size)}
                </li>
              `,
            )}
          </ul>
          ${manifest.files.length > FILES && html`<p>The manifest lists all files.</p>`}
        `
      }
    </details>
  `;
}

/** Waits for the job's end, then shows its rows. */
export function Shown({ job, jobs }) {
  const { view, error } = useJob(job, false);
  useJobs(jobs);
  const live = jobs.byId.get(job); // knows at once that the job runs; what waits for its end does not
  const failed = view && view.state !== "succeeded" && over(view);
  return html`
    <h1>${live ? titleOf(live) : "Capture"}</h1>
    <p><a href="#/capture">All captures</a> · <a href=${`#/jobs/${job}`}>Job</a> <${Id} id=${job} /></p>
    <${Problem} error=${error} />
    ${view && !over(view) && html`<${Standing} job=${live && !over(live) ? live : view} jobs=${jobs} />`}
    ${
      failed &&
      html`
        <div class="problem" role="alert">
          The job is ${view.state}
          ${view.error && html`: <${Coded} text=${view.error.detail} />`}.
        </div>
      `
    }
    ${view && over(view) && html`<${Norms} job=${job} model=${view.model} quiet=${failed} />`}
  `;
}

function Norms({ job, model, quiet }) {
  const [asked, ask] = useState(CHOSEN);
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  const [each, setEach] = useState(true);
  const [full, setFull] = useState(false);
  const [table, setTable] = useState(false);
  const [at, move] = useState({ row: 0, layer: 0 });
  // not served any more: without modules
  const { modules = [] } = useAnswer(`/v1/artifacts/modules?model=${encodeURIComponent(model)}`) || {};
  useTask(
    (signal) => {
      setError(null);
      get(`/v1/captures/${job}/norms?${queryOf(asked)}`, { signal }).then(
        (answer) => {
          setFound(answer);
          move((known) => ({
            row: Math.min(known.row, Math.max(0, answer.positions.length - 1)),
            layer: Math.min(known.layer, answer.layers.length - 1),
          }));
        },
        (failure) => signal.aborted || setError(failure),
      );
    },
    [job, asked],
  );
  const by = found && found.cosines ? "cosine" : "norm";
  const scale = useMemo(() => found && scaled(found, by, each, full), [found, by, each, full]);
  const words = useMemo(() => found && (found.tokens || found.token_ids.map(String)), [found]);
  if (!found)
    return quiet && error && error.code === "not_found"
      ? null
      : html`<${Problem} error=${error} />${!error && html`<${Loading} />`}`;

  const values = by === "cosine" ? found.cosines : found.norms;
  const layer = found.layers[at.layer];
  const change =
    (name, more = {}) =>
    (event) =>
      ask({ ...asked, start: 0, ...more, [name]: event.target.value });
  const chosen = modules.find(({ name }) => name === asked.module);
  const layersOf = chosen
    ? [...new Set(chosen.entries.flatMap((entry) => entry.layers))].sort((a, b) => a - b)
    : [];
  const top = found.layers.length - 1;
  const key = moving(
    { row: top - at.layer, column: at.row },
    ({ row, column }) => move({ row: column, layer: top - row }),
    top + 1,
    found.positions.length,
  );
  const value = values[at.layer] ? values[at.layer][at.row] : null;
  const items = found.positions.map((position, row) => ({
    key: position,
    word: words[row],
    value: values[at.layer] ? values[at.layer][row] : null,
    share: scale.shares[at.layer] ? scale.shares[at.layer][row] : null,
    generated: position >= found.prompt_tokens,
  }));
  const title = `${by === "cosine" ? `Cosine to ${asked.module}` : "Norm"} of rows at ${hookTitle(found.hook)}`;
  const ends = by === "norm" && each ? ["lowest", "highest"] : scale.ranges[0].map(short);
  const records = () =>
    found.layers.flatMap((of, n) =>
      found.positions.map((position, row) => ({
        hook: found.hook,
        layer: of,
        position,
        token: words[row],
        [by]: values[n] ? values[n][row] : null,
      })),
    );
  const missing = by === "cosine" && !values[at.layer];
  const beyond = by === "norm" && scale.beyond[at.layer];
  const without = beyond ? ` without ${count(beyond, "outlier")}` : "";
  return html`
    <form class="inline" onSubmit=${(event) => event.preventDefault()}>
      ${
        found.requests.length > 1 &&
        html`
          <label>
            Prompt ${
              found.requests.length <= 50
                ? html`
                    <select value=${asked.request} onChange=${change("request")}>
                      ${found.requests.map((index) => html`<option value=${index}>${index}</option>`)}
                    </select>
                  `
                : html`
                    <input
                      type="number"
                      min="0"
                      max=${found.requests.at(-1)}
                      value=${asked.request}
                      onChange=${change("request")}
                    />
                  `
            }
          </label>
        `
      }
      <label>
        Hook point <select value=${found.hook} onChange=${change("hook")}>
          ${found.hooks.map((hook) => html`<option value=${hook}>${hookTitle(hook)}</option>`)}
        </select>
      </label>
      <label>
        Colour by <select
          value=${asked.module}
          onChange=${change("module", { from: "", start: asked.start })}
        >
          <option value="">norm</option>
          ${
            modules.length > 0 &&
            html`
              <optgroup label="cosine to module">
                ${modules.map(({ name }) => html`<option value=${name}>${name}</option>`)}
              </optgroup>
            `
          }
        </select>
      </label>
      ${
        chosen &&
        html`
          <label>
            Module vector <select value=${asked.from} onChange=${change("from", { start: asked.start })}>
              <option value="">each layer</option>
              ${layersOf.map((number) => html`<option value=${number}>layer ${number}</option>`)}
            </select>
          </label>
        `
      }
      ${
        by === "norm" &&
        html`
          <label>
            <input
              type="checkbox"
              checked=${each}
              onChange=${(event) => setEach(event.target.checked)}
            /> scale each layer separately
          </label>
          <label>
            <input
              type="checkbox"
              checked=${full}
              onChange=${(event) => setFull(event.target.checked)}
            /> full range
          </label>
        `
      }
      <label>
        <input
          type="checkbox"
          checked=${table}
          onChange=${(event) => setTable(event.target.checked)}
        /> as a table
      </label>
    </form>
    <${Problem} error=${error} />
    ${
      found.rows > ROWS &&
      html`
        <p class="inline">
          <${Button}
            kind="small"
            disabled=${!found.start}
            onClick=${() => ask({ ...asked, start: Math.max(0, found.start - ROWS) })}
          >
            Previous
          <//>
          <span role="status">
            rows ${found.start + 1} to ${found.start + found.positions.length} of ${number(found.rows)}
          </span>
          <${Button}
            kind="small"
            disabled=${found.start + ROWS >= found.rows}
            onClick=${() => ask({ ...asked, start: found.start + ROWS })}
          >
            Next
          <//>
        </p>
      `
    }
    ${
      table
        ? html`<${Numbers} found=${found} values=${values} words=${words} />`
        : !found.positions.length
          ? html`<${Empty}>No rows.<//>`
          : html`
              <div
                class="norms card"
                tabindex="0"
                role="group"
                aria-label=${`${by} by token and layer`}
                aria-describedby="norms-keys"
                onKeyDown=${key}
              >
                <p>
                  <label>
                    Layer <input
                      type="range"
                      min="0"
                      max=${found.layers.length - 1}
                      value=${at.layer}
                      aria-valuetext=${`layer ${layer}`}
                      onInput=${(event) => move({ ...at, layer: Number(event.target.value) })}
                      onKeyDown=${(event) => event.stopPropagation()}
                    /> <output>${layer}</output>
                  </label>
                </p>
                ${
                  missing
                    ? html`<${Empty}>The module has no vector at layer ${layer}.<//>`
                    : html`
                        <${Legend}
                          what=${by === "cosine" ? "cosine" : `norm, on a logarithmic scale${without}`}
                          low=${scale.low}
                          from=${scale.ranges[at.layer][0]}
                          to=${scale.ranges[at.layer][1]}
                        />
                      `
                }
                <${Chips}
                  items=${items}
                  label=${`Tokens at layer ${layer}`}
                  active=${found.positions[at.row]}
                  onPick=${(position) => move({ ...at, row: found.positions.indexOf(position) })}
                />
                <p role="status" class="norm-said">
                  token ${found.positions[at.row]} “${visible(words[at.row])}”, layer ${layer}: ${by} ${
                    missing ? "none" : short(value)
                  }
                </p>
                <${Grid}
                  found=${found}
                  shares=${scale.shares}
                  values=${values}
                  words=${words}
                  at=${at}
                  move=${move}
                />
                <p id="norms-keys" class="soft">
                  Arrow keys move over tokens (left, right) and layers (up, down).
                </p>
                <${SaveAs}
                  name=${`${job}.${by}`}
                  title=${title}
                  rows=${records}
                  png=${() =>
                    maps(
                      [
                        {
                          name: `prompt ${found.request}`,
                          source: mapOf(found, scale.shares, values, words),
                        },
                      ],
                      title,
                      ends,
                      `${by === "norm" ? `${each ? "of each layer, " : ""}logarithmic; ` : ""}hatched: no value`,
                      { width: 200 + 50 * found.layers.length, from: scale.low },
                    )}
                />
              </div>
            `
    }
    <p>
      ${found.dtype} rows of ${number(
        found.width,
      )} elements, captured ${found.at} the interventions at ${found.hook}. Tokens in italics were generated.
    </p>
    <h2>Download</h2>
    <ul class="files">
      <li>
        <a
          href=${`/v1/captures/${job}/safetensors?request=${found.request}&tag=${encodeURIComponent(found.tag)}`}
          download=${`${job}.${found.request}.safetensors`}
        >
          All rows of this prompt
        </a> (safetensors)
      </li>
      <li>
        <a href=${`/v1/captures/${job}/norms?${queryOf(asked)}`} download=${`${job}.norms.json`}>
          The values shown
        </a> (JSON)
      </li>
    </ul>
    <${Files} job=${job} />
  `;
}

// Attention: the pattern of each head of a layer, and what one token attends to.

import { Loading, Problem, html, useEffect, useMemo, useRef, useState, useTask } from "../lib/ui.js";
import { percent } from "../lib/format.js";
import { Chips, Legend, visible } from "../lib/chips.js";
import { shade } from "../lib/heatmap.js";
import { useDark } from "../lib/theme.js";
import { behaviour, pattern } from "../lib/attention.js";
import { rowsOf } from "../lib/tensors.js";
import { useAnswer } from "../lib/ask.js";
import { SaveAs } from "../plots/save.js";
import { maps } from "../plots/sweep_picture.js";
import { Bars, Reading, ReadingForm, moving, quoted } from "../lib/readings.js";

const MOST = 256; // tokens whose patterns the page computes
const KEYS = 8; // that are listed of a query
const NAMED = 40; // tokens that are written beside a pattern, at most

const form = {
  name: "attention",
  action: "Show the patterns",
  example: "lamp river paper green stone music tiger bread lamp river paper green stone music tiger bread",
  missing: ({ hooks, absent }) =>
    !(hooks.includes("q") && hooks.includes("k")) &&
    html`
      <p>
        Patterns are computed from queries and keys, which this model's workers do not capture
        ${(absent.q || absent.k) && `: ${absent.q || absent.k}`}. Start them with <code>
          midstream up --set hooks=all,inside
        </code>.
      </p>
    `,
  fields: ({ num_layers: count }) => [
    {
      name: "layers",
      label: "Layers",
      api: "capture",
      value: "all",
      hint: `all, 3, 0-5 or 0-5,-1; the model has ${count}`,
    },
  ],
  body: ({ layers }) => ({
    capture: {
      hooks: { q: layers.trim(), k: layers.trim() },
      positions: "all_prompt",
      at: "after",
      tag: "attention",
    },
  }),
};

/**
 * A pattern as a picture of a pixel for each query and key, which the browser enlarges. Without a
 * label it is decoration.
 */
function Picture({ found, tokens, label = "" }) {
  const canvas = useRef(null);
  const dark = useDark();
  useEffect(() => {
    const context = canvas.current.getContext("2d");
    const image = context.createImageData(tokens, tokens);
    for (let query = 0; query < tokens; query += 1)
      for (let key = 0; key <= query; key += 1) {
        const at = query * tokens + key;
        image.data.set([...shade(Math.sqrt(found[at]), dark).match(/\d+/g).map(Number), 255], at * 4);
      }
    context.putImageData(image, 0, 0);
  }, [found, tokens, dark]);
  return html`
    <canvas
      ref=${canvas}
      class="pattern"
      width=${tokens}
      height=${tokens}
      role=${label ? "img" : null}
      aria-label=${label || null}
      aria-hidden=${label ? null : "true"}
    ></canvas>
  `;
}

function Patterns({ layer, rows, kind, words, ids }) {
  const [at, move] = useState({ row: ids.length - 1, column: 0 });
  const tokens = ids.length;
  const heads = useMemo(
    () =>
      Array.from({ length: kind.heads }, (_, n) => {
        const found = pattern(rows.q, rows.k, kind, n);
        return { found, most: behaviour(found, ids) };
      }),
    [rows],
  );
  const [chosen, setHead] = useState(null);
  const clear = heads.map(({ most }) => (most.name === "first" ? 0 : most.share));
  const head = chosen ?? clear.indexOf(Math.max(...clear));
  const { found } = heads[head];
  const shares = Array.from(found.subarray(at.row * tokens, (at.row + 1) * tokens));
  const top = shares
    .map((share, key) => [share, key])
    .filter(([share]) => share > 0)
    .sort((a, b) => b[0] - a[0])
    .slice(0, KEYS);
  const { what, share } = heads[head].most;
  const point = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const place = (offset, size) => Math.max(0, Math.min(tokens - 1, Math.floor((offset / size) * tokens)));
    move({
      row: place(event.clientY - box.top, box.height),
      column: place(event.clientX - box.left, box.width),
    });
  };
  const [names, title] = [
    words.map((word, n) => `${visible(word)} ${n}`),
    `Attention of head ${head} of layer ${layer}`,
  ];
  const item = (here) => (word, n) =>
    html`<li key=${n} class=${n === here ? "here" : ""}>${visible(word)}</li>`;
  const named = (kind, here) =>
    tokens <= NAMED &&
    html`
      <ol class=${`pattern-names ${kind}`} aria-hidden="true">
        ${words.map(item(here))}
      </ol>
    `;
  const records = () =>
    Array.from(found, (value, n) => ({
      layer,
      head,
      query: Math.floor(n / tokens),
      query_token: words[Math.floor(n / tokens)],
      key: n % tokens,
      key_token: words[n % tokens],
      share: value,
    })).filter(({ query, key }) => key <= query);
  const source = {
    rows: names,
    columns: words.map((_, n) => n),
    titles: ["query", "key"],
    at: (query, key) => (key > query ? 0 : Math.sqrt(found[query * tokens + key])),
  };
  return html`
    <div class="heads" role="group" aria-label="Heads">
      ${heads.map(
        ({ found: each, most }, n) => html`
          <button
            type="button"
            key=${n}
            class="head-tile"
            aria-pressed=${n === head ? "true" : "false"}
            onClick=${() => setHead(n)}
          >
            <${Picture} found=${each} tokens=${tokens} />
            Head ${n}
            <small>${most.name} ${percent(most.share)}</small>
          </button>
        `,
      )}
    </div>
    <p class="finding">Head ${head} gives ${percent(share)} of its attention to ${what}.</p>
    <div class="reading">
      <div
        tabindex="0"
        role="group"
        aria-label=${`Pattern of head ${head}`}
        aria-describedby="attention-keys"
        class="pattern-big"
        onKeyDown=${moving(at, move, tokens, tokens)}
      >
        <div class="pattern-frame">
          ${named("", at.row)}
          <div class="pattern-box" onMouseMove=${point} onClick=${point}>
            <${Picture} found=${found} tokens=${tokens} label=${`${tokens} queries by ${tokens} keys`} />
            <i
              class="pattern-row"
              style=${{ top: `${(at.row / tokens) * 100}%`, height: `${100 / tokens}%` }}
            ></i>
          </div>
        </div>
        ${
          tokens <= NAMED &&
          html`<div class="pattern-frame"><i class="pattern-names"></i>${named("keys", at.column)}</div>`
        }
        <p class="note" role="status">
          ${quoted(words[at.row])} (${at.row}) gives ${percent(shares[at.column])} to ${quoted(
            words[at.column],
          )} (${at.column}).
        </p>
      </div>
      <aside class="card">
        <h2>${quoted(words[at.row])} attends to</h2>
        <${Chips}
          label="Keys"
          paint=${shade}
          active=${at.row}
          onPick=${(row) => move({ row, column: Math.min(row, at.column) })}
          items=${words.map((word, key) => ({
            key,
            word,
            value: shares[key],
            share: key <= at.row ? Math.sqrt(shares[key]) : null,
          }))}
        />
        <${Bars}
          label="Strongest keys"
          items=${top.map(([value, key]) => ({
            key,
            text: `${visible(words[key])} (${key})`,
            value: percent(value),
            share: value,
          }))}
        />
      </aside>
    </div>
    <${Legend}
      low=${0}
      paint=${shade}
      from=${0}
      to=${1}
      what="share of the query's attention; the colour is its square root"
    />
    <p id="attention-keys" class="soft">
      Rows are queries, columns are keys. Choose a query in the pattern, with the arrow keys, or by a click on
      a token.
    </p>
    <${SaveAs}
      name=${`attention.${layer}.${head}`}
      title=${title}
      rows=${records}
      png=${() =>
        maps(
          [{ name: "", source }],
          title,
          ["0", "1"],
          "share of the query's attention; the colour is its square root",
          { width: 640, paint: shade, from: 0 },
        )}
    />
  `;
}

/** The patterns of one prompt of a job that captured `q` and `k` at all positions of the prompt. */
export function AttentionResult({ job, model, request = 0 }) {
  const [error, setError] = useState(null);
  const [chosen, choose] = useState(null);
  const [rows, setRows] = useState(null);
  const card = useAnswer(`/v1/models/${encodeURIComponent(model)}`, setError);
  const found = useAnswer(`/v1/captures/${job}/norms?hook=q&request=${request}&count=${MOST}`, setError);
  const layers = found && found.layers;
  const layer = layers && (chosen ?? layers[Math.floor(layers.length / 2)]);
  useTask(
    (signal) => {
      if (!found) return;
      setRows(null);
      rowsOf(job, { request, layer, signal }).then(
        (tensors) => setRows({ layer, q: tensors[`q.${layer}`], k: tensors[`k.${layer}`] }),
        (failure) => signal.aborted || setError(failure),
      );
    },
    [found, layer],
  );
  if (error) return html`<${Problem} error=${error} />`;
  if (!card || !found) return html`<${Loading} />`;
  const kind = card.attention.find((each) => each.layers.includes(layer));
  const whole = found.rows <= MOST && found.positions.every((position, n) => position === n);
  const beyond =
    `The page shows patterns of up to ${MOST} tokens, captured without gaps from the first; ` +
    `this prompt has ${found.rows} rows. Use client.attention in Python.`;
  return html`
    <p class="inline">
      <label>
        Layer <select value=${layer} onChange=${({ target }) => choose(Number(target.value))}>
          ${layers.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
        </select>
      </label>
    </p>
    ${
      !kind || kind.refused
        ? html`<${Problem} error=${`Layer ${layer} has no pattern${kind ? `: ${kind.refused}` : ""}.`} />`
        : !whole
          ? html`<${Problem} error=${beyond} />`
          : rows && rows.layer === layer && rows.q && rows.k
            ? html`
                <${Patterns}
                  key=${layer}
                  layer=${layer}
                  rows=${rows}
                  kind=${kind}
                  words=${found.tokens || found.token_ids.map(String)}
                  ids=${found.token_ids}
                />
              `
            : html`<${Loading} />`
    }
  `;
}

export default function View({ params, query, jobs }) {
  return html`
    <h1>Attention</h1>
    <p class="lead">Shows which earlier tokens each token looks at, for every head of a layer.</p>
    <${ReadingForm} ...${form} query=${query} />
    <${Reading} key=${params[0]} id=${params[0]} name="attention" jobs=${jobs}>
      ${(result, view, n) =>
        html`<${AttentionResult} key=${n} job=${view.id} model=${view.model} request=${n} />`}
    <//>
  `;
}

// Lens: what each layer predicts after each token, as a grid of top tokens shaded by probability.

import { html, useLayoutEffect, useMemo, useRef, useState, Loading } from "../lib/ui.js";
import { percent } from "../lib/format.js";
import { Legend, inkOn, visible } from "../lib/chips.js";
import { shade } from "../lib/heatmap.js";
import { useDark } from "../lib/theme.js";
import { SaveAs } from "../plots/save.js";
import { maps } from "../plots/sweep_picture.js";
import { Bars, Reading, ReadingForm, moving, quoted, useWords } from "../lib/readings.js";

const WIDE = 40; // positions that are shown at a time
const [CELL, SIDE] = [72, 150]; // pixels of a saved picture: of a cell, and of the tokens beside

const form = {
  name: "lens",
  action: "Read the layers",
  example: "The Eiffel Tower is in the city of",
  registered: ["/v1/artifacts/lenses", "/v1/artifacts/jacobians"],
  missing: ({ readings }) => readings.lens && html`<p>This model has no lens: ${readings.lens}.</p>`,
  fields: ({ num_layers: count }, { lenses, jacobians }) => [
    {
      name: "layers",
      label: "Layers",
      api: "lens.layers",
      value: "all",
      hint: `all, 3, 0-5 or 0-5,-1; the model has ${count}`,
    },
    {
      name: "tokens",
      label: "Tokens to follow",
      api: "lens.tokens",
      value: "",
      hint: "separated by |, such as “ Paris| Rome”: a space begins a word",
    },
    { name: "top_k", label: "Top tokens", api: "lens.top_k", value: "5", type: "number", min: 1, max: 100 },
    ...(lenses.length + jacobians.length
      ? [
          {
            name: "through",
            label: "Lens",
            api: "lens",
            value: "",
            options: {
              "": "logit lens",
              ...Object.fromEntries([
                ...lenses.map(({ name }) => [name, `tuned: ${name}`]),
                ...jacobians.map(({ name }) => [`^${name}`, `Jacobian: ${name}`]),
              ]),
            },
          },
        ]
      : []),
  ],
  body: ({ layers, tokens, top_k, through }) => ({
    lens: {
      layers: layers.trim(),
      positions: "all_prompt",
      top_k: Number(top_k),
      ...(tokens ? { tokens: tokens.split("|").filter(Boolean) } : {}),
      ...(through ? (through.startsWith("^") ? { jacobian: through.slice(1) } : { tuned: through }) : {}),
    },
  }),
};

/** One prompt's lens, as in a job's result. */
export function LensResult({ reading, model }) {
  const {
    layers,
    positions,
    top_tokens: top,
    top_logprobs: logs,
    named_tokens: named,
    named_ranks: ranks,
    named_logprobs: chances,
  } = reading;
  const [start, setStart] = useState(Math.max(0, positions.length - WIDE));
  const [at, move] = useState({ row: 0, column: positions.length - 1 });
  const [by, setBy] = useState("");
  const dark = useDark();
  const ids = useMemo(() => [...reading.token_ids, ...named, ...top.flat(2)], [reading]);
  const word = useWords(model, ids);
  const box = useRef(null);
  const keyed = useRef(false); // the cell was chosen by a key: it may be out of sight
  useLayoutEffect(() => {
    if (box.current) box.current.scrollLeft = box.current.scrollWidth; // the prediction is at the end
  }, [word]);
  useLayoutEffect(() => {
    if (keyed.current)
      box.current.querySelector("td.here").scrollIntoView({ block: "nearest", inline: "nearest" });
    keyed.current = false;
  }, [at]);
  if (!positions.length) return html`<p>No position was read.</p>`;
  if (!word) return html`<${Loading} />`;
  const byKey = (to) => {
    keyed.current = true;
    setStart(Math.max(Math.min(start, to.column), to.column - WIDE + 1));
    move(to);
  };
  const rows = layers.map((_, n) => layers.length - 1 - n); // the last layer at the top
  const columns = positions.slice(start, start + WIDE).map((_, n) => start + n);
  const token = by === "" ? -1 : Number(by);
  const cell = (layer, position) =>
    token < 0
      ? { text: visible(word(top[layer][position][0])), share: Math.exp(logs[layer][position][0]) }
      : {
          text: `${ranks[layer][position][token]}`,
          share: 1 / (1 + Math.log2(1 + ranks[layer][position][token])),
        };
  const layer = rows[at.row];
  const [last] = top[layers.length - 1][at.column];
  const since = rows.findIndex((n) => top[n][at.column][0] !== last); // of `rows`: the first that says something else
  const from = layers[rows[(since < 0 ? rows.length : since) - 1]];
  const pick = ({ target }) => {
    const [row, column] = ((target.closest("td") || { dataset: {} }).dataset.cell || "")
      .split(",")
      .map(Number);
    if (column !== undefined) move({ row, column });
  };
  const names = reading.token_ids.map((id, n) => `${visible(word(id))} ${positions[n]}`);
  const source = {
    rows: names,
    columns: layers,
    widest: CELL,
    at: (position, n) => cell(n, position).share,
    text: (position, n) => cell(n, position).text,
  };
  const records = () =>
    layers.flatMap((each, n) =>
      positions.flatMap((position, p) =>
        top[n][p].map((id, k) => ({
          layer: each,
          position,
          token: word(reading.token_ids[p]),
          rank: k,
          predicted: word(id),
          predicted_id: id,
          logprob: logs[n][p][k],
          ...Object.fromEntries(
            named.flatMap((other, m) => [
              [`rank of ${word(other)}`, ranks[n][p][m]],
              [`logprob of ${word(other)}`, chances[n][p][m]],
            ]),
          ),
        })),
      ),
    );
  const what = token < 0 ? "Most likely next token" : `Rank of “${visible(word(named[token]))}”`;
  const title = `${what} by layer, read at ${reading.hook}`;
  return html`
    <p class="finding">
      After ${quoted(word(reading.token_ids[at.column]))} the ${
        layers.length > 1 ? "last of these layers" : "layer"
      } predicts ${quoted(word(last))} (${percent(Math.exp(logs[layers.length - 1][at.column][0]))})${
        layers.length > 1 &&
        html`
          , ${since < 0 ? "as all of them do" : html`the top token from <strong>layer ${from}</strong> on`}
        `
      }.
    </p>
    <div class="inline">
      ${
        named.length > 0 &&
        html`
          <label>
            Colour by <select value=${by} onChange=${({ target }) => setBy(target.value)}>
              <option value="">probability of the top token</option>
              ${named.map((id, n) => html`<option value=${n}>rank of “${visible(word(id))}”</option>`)}
            </select>
          </label>
        `
      }
      ${
        token < 0
          ? html`<${Legend} low=${0} paint=${shade} from=${0} to=${1} what="probability" />`
          : html`<span class="soft">The darker, the nearer to rank 0, the top token.</span>`
      }
      ${
        positions.length > WIDE &&
        html`
          <label>
            From position <input
              type="number"
              min="0"
              max=${positions.length - 1}
              value=${start}
              onChange=${({ target }) =>
                setStart(Math.max(0, Math.min(positions.length - 1, target.valueAsNumber || 0)))}
            />
          </label>
        `
      }
    </div>
    <div class="reading">
      <div
        class="lens"
        ref=${box}
        tabindex="0"
        role="group"
        aria-label="Top token by layer and position"
        aria-describedby="lens-keys"
        onKeyDown=${moving(at, byKey, rows.length, positions.length)}
      >
        <table>
          <thead>
            <tr>
              <th scope="col">Layer</th>
              ${columns.map(
                (position) => html`
                  <th
                    key=${position}
                    scope="col"
                    class=${position === at.column ? "here" : ""}
                    title=${`position ${positions[position]}`}
                  >
                    ${visible(word(reading.token_ids[position]))}
                  </th>
                `,
              )}
            </tr>
          </thead>
          <tbody onMouseOver=${pick} onClick=${pick}>
            ${rows.map(
              (n, row) => html`
                <tr key=${n}>
                  <th scope="row" class=${row === at.row ? "here" : ""}>${layers[n]}</th>
                  ${columns.map((column) => {
                    const { text, share } = cell(n, column);
                    const back = shade(share, dark);
                    return html`
                      <td
                        key=${column}
                        data-cell=${`${row},${column}`}
                        class=${row === at.row && column === at.column ? "here" : ""}
                        style=${{ backgroundColor: back, color: inkOn(back) }}
                      >
                        ${text}
                      </td>
                    `;
                  })}
                </tr>
              `,
            )}
          </tbody>
        </table>
      </div>
      <aside class="card" aria-live="polite">
        <h2>Layer ${layers[layer]}, after ${quoted(word(reading.token_ids[at.column]))}</h2>
        <${Bars}
          label="Most likely next tokens"
          items=${top[layer][at.column].map((id, n) => ({
            key: id,
            text: visible(word(id)),
            value: percent(Math.exp(logs[layer][at.column][n])),
            share: Math.exp(logs[layer][at.column][n]),
          }))}
        />
        ${
          named.length > 0 &&
          html`
            <h3>Followed</h3>
            <${Bars}
              label="Followed tokens"
              items=${named.map((id, n) => ({
                key: id,
                text: visible(word(id)),
                value: `rank ${ranks[layer][at.column][n]}, ${percent(Math.exp(chances[layer][at.column][n]))}`,
                share: Math.exp(chances[layer][at.column][n]),
              }))}
            />
          `
        }
      </aside>
    </div>
    <p id="lens-keys" class="soft">
      Rows are layers, columns are the tokens of the prompt. Point at a cell or use the arrow keys. Read
      at ${reading.hook}.
    </p>
    <${SaveAs}
      name="lens"
      title=${title}
      rows=${records}
      png=${() =>
        maps(
          [{ name: "", source }],
          title,
          token < 0 ? ["0", "1"] : ["far", "rank 0"],
          token < 0 ? "probability" : "the darker, the nearer to the top",
          { width: layers.length * CELL + SIDE, paint: shade, from: 0 },
        )}
    />
  `;
}

export default function View({ params, query, jobs }) {
  return html`
    <h1>Lens</h1>
    <p class="lead">
      Reads every layer as if the model ended there: which token would come next, and where in the model the
      answer appears.
    </p>
    <${ReadingForm} ...${form} query=${query} />
    <${Reading} key=${params[0]} id=${params[0]} name="lens" jobs=${jobs}>
      ${(result, view, n) =>
        result.lens && result.lens[n]
          ? html`<${LensResult} key=${n} reading=${result.lens[n]} model=${view.model} />`
          : html`<p>This job has no lens.</p>`}
    <//>
  `;
}

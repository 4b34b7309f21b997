// An attribution: estimates beside exact values, with the cells that disagree marked; edges and
// features as a list.

import { Button, Copy, Problem, html, useState, Coded } from "../lib/ui.js";
import { count } from "../lib/format.js";
import { AttributionGrid } from "../lib/attribution.js";
import { MEANING, shown } from "../lib/grid.js";
import { hookTitle } from "../lib/hooks.js";
import { codeOf } from "../lib/code.js";
import { over } from "../lib/jobs.js";
import { Id } from "../lib/parts.js";
import { short } from "../lib/chips.js";
import { Plot } from "../plots/plot.js";
import { SaveAs } from "../plots/save.js";
import { picture } from "../plots/sweep_picture.js";
import { Maps, Missing, Pairs, State, notesOf, titleOf, useSweep } from "./sweep_grid.js";

const MOST = 100; // rows of a table
const FIRST = 20; // of them without a click
const NAMED = 6; // cells that are off and have their name in the figure
const make = (view) => new AttributionGrid(view);

export default function View({ params, session, jobs }) {
  return params[0]
    ? html`<${Attribution} key=${params[0]} id=${params[0]} session=${session} jobs=${jobs} />`
    : html`<h1>Attribution</h1><p><a href="#/sweep">Start a new one</a></p>`;
}

function Attribution({ id, session, jobs }) {
  const { view, error, setError, grid, listeners, lost } = useSweep(id, "attribution", make);
  const [pair, setPair] = useState(null);
  const [cursor, setCursor] = useState(null);
  if (!view || !grid)
    return html`
      <h1>Attribution</h1>
      <${Problem} error=${error} title=${error && "This attribution cannot be shown"} />
      ${!error && html`<p class="loading">Loading the attribution …</p>`}
    `;
  const { job, request } = view;
  const chosen = grid.pairs.length === 1 ? 0 : pair;
  const scores = grid.scores(chosen);
  const maps = (of) => html`
    <${Maps} grid=${of} pair=${chosen} listeners=${listeners} cursor=${cursor} setCursor=${setCursor} />
  `;
  return html`
    <div class="sweep">
      <h1>${(job.metadata && job.metadata.name) || "Attribution"}</h1>
      <p class="sweep-title">${titleOf(grid, chosen)} · method ${view.result.method} <${Id} id=${id} /></p>
      <${State} job=${job} grid=${grid} over=${over(job)} lost=${lost} jobs=${jobs} onError=${setError} />
      <p class="finding" role="status">${agreement(grid, chosen)}</p>
      <${Problem} error=${error} />
      ${job.error && html`<${Problem} error=${job.error.detail} title=${job.error.title} />`}
      <div class="tools"><${Pairs} grid=${grid} pair=${pair} setPair=${setPair} /></div>
      ${
        scores.length
          ? html`<${Scores} scores=${scores} />`
          : html`
              <div class="beside">
                ${[
                  ["Estimates", "estimate", grid.estimates],
                  ...(grid.total > 0 ? [["Exact values", "exact", grid]] : []),
                ].map(
                  ([name, field, of]) => html`
                    <section key=${name} aria-label=${name}>
                      <h2>${name}</h2>
                      ${maps(of)}
                      <${SaveAs}
                        name=${`${id}.${name.split(" ")[0].toLowerCase()}`}
                        title=${name}
                        png=${() => picture(of, chosen, `${name}: ${titleOf(grid, chosen)}`)}
                        rows=${of.records().map(({ value, effect, ...rest }) => ({
                          ...rest,
                          [field]: value,
                          [`${field}_effect`]: effect,
                        }))}
                      />
                    </section>
                  `,
                )}
              </div>
            `
      }
      <div class="reading scatter">
        <${Scatter} id=${id} grid=${grid} pair=${chosen} />
        <${Checked} grid=${grid} pair=${chosen} />
      </div>
      ${[...notesOf(grid), ...grid.result.estimated.map((found) => found.reason).filter(Boolean)].map(
        (note) => html`<p class="note">Note: <${Coded} text=${note} /></p>`,
      )}
      ${!scores.length && html`<${Missing} grid=${grid.estimates} />`}
      <h2>The same attribution as code</h2>
      <${Copy}
        label="The same attribution"
        tabs=${codeOf("/v1/attributions", request, session.auth !== "open")}
      />
    </div>
  `;
}

/** How well estimates and exact values agree; empty: no cell is computed yet. */
function agreement(grid, pair) {
  const cells = grid.checked(pair).filter((cell) => cell.exact !== null);
  if (!cells.length) return grid.total ? "" : "All values are estimates: no cell is computed exactly.";
  const { result } = grid;
  const of = pair === null ? null : result.estimated[pair];
  const off = `${cells.filter((cell) => cell.off).length} of ${count(cells.length, "exact cell")} off`;
  const parts = [`${off} by more than the noise floor and ${result.verify.tolerance}`];
  if (of && of.random && of.random.spearman !== null)
    parts.push(`rank correlation ${shown(of.random.spearman)} over the random cells`);
  if (of && of.recall)
    parts.push(
      `${of.recall.found} of the ${of.recall.top} strongest computed cells are among the largest estimates`,
    );
  return `${parts.join("; ")}.`;
}

/** Estimated effects against exact ones, with the diagonal on which both are the same. */
function Scatter({ id, grid, pair }) {
  const cells = grid.effects(pair);
  if (!cells.length) return null;
  const of = pair === null ? {} : grid.result.estimated[pair];
  const found = [
    of.random &&
      of.random.spearman !== null &&
      `rank correlation ${shown(of.random.spearman)} (random cells)`,
    of.recall && `recall ${of.recall.found} of ${of.recall.top}`,
  ]
    .filter(Boolean)
    .join(", ");
  const values = cells.flatMap(({ estimate, exact }) => [estimate, exact]);
  const [least, most] = [Math.min(0, ...values), Math.max(0, ...values)];
  const room = (most - least || 1) * 0.08;
  const axis = { low: least - room, high: most + room };
  const called = cells
    .filter(({ cell }) => cell.off)
    .sort((a, b) => Math.abs(b.estimate - b.exact) - Math.abs(a.estimate - a.exact))
    .slice(0, NAMED); // the furthest from the diagonal
  const about =
    `effects on ${MEANING[grid.metric]} · ${titleOf(grid, pair)} · ` +
    `off: by more than the noise floor and ${grid.result.verify.tolerance}`;
  const dots = (off) =>
    cells
      .filter(({ cell }) => cell.off === off)
      .map((each) => ({
        x: each.exact,
        y: each.estimate,
        text: called.includes(each) ? `${each.name}, ${each.cell.hook} ${each.cell.layer}` : "",
        tip:
          `${each.name}, layer ${each.cell.layer}, ${each.cell.hook}: ` +
          `estimated ${short(each.estimate)}, exact ${short(each.exact)}${off ? ", off" : ""}`,
      }));
  return html`
    <${Plot}
      square
      title=${`Estimate against exact${found ? `: ${found}` : ""}`}
      name=${`${id}.scatter`}
      about=${about}
      x=${{ ...axis, label: "exact effect" }}
      y=${{ ...axis, label: "estimated effect" }}
      rows=${cells.map(({ cell, name, estimate, exact }) => ({
        pair: cell.pair,
        hook: cell.hook,
        layer: cell.layer,
        column: cell.column,
        feature: cell.feature,
        name,
        estimate_effect: estimate,
        exact_effect: exact,
        off: cell.off,
        chosen_as: cell.why,
      }))}
      series=${[
        { kind: "dots", name: "agree", points: dots(false) },
        { kind: "dots", name: "off", tone: "bad", points: dots(true) },
        {
          kind: "line",
          name: "the same",
          tone: "soft",
          quiet: true,
          points: [axis.low, axis.high].map((value) => ({ x: value, y: value })),
        },
      ]}
    />
  `;
}

function Scores({ scores }) {
  return html`
    <div class="grid-table card">
      <table>
        <caption>The ${Math.min(MOST, scores.length)} strongest of ${scores.length}</caption>
        <thead><tr><th scope="col">what</th><th scope="col">estimate</th></tr></thead>
        <tbody>
          ${scores
            .slice(0, MOST)
            .map(({ name, score }) => html`<tr><th scope="row">${name}</th><td>${shown(score)}</td></tr>`)}
        </tbody>
      </table>
    </div>
  `;
}

/** The cells with exact values, strongest first, and those that disagree marked. */
function Checked({ grid, pair }) {
  const [all, setAll] = useState(false);
  const cells = grid.checked(pair);
  if (!cells.length) return null;
  const number = (value) => (value === null ? "–" : shown(value));
  const listed = Math.min(cells.length, all ? MOST : FIRST);
  return html`
    <div class="grid-table card whole" role="region" tabindex="0" aria-label="Cells computed exactly">
      <table data-part="checked">
        <caption>
          ${count(cells.length, "cell")} computed exactly
          ${cells.length > listed ? `, the ${listed} strongest` : ""}; values of the metric
        </caption>
        <thead>
          <tr>
            ${["cell", "hook point", "layer", "estimate", "exact", "difference", "chosen as", "off"].map(
              (name) => html`<th scope="col">${name}</th>`,
            )}
          </tr>
        </thead>
        <tbody>
          ${cells.slice(0, listed).map(
            (cell) => html`
              <tr>
                <th scope="row">${grid.nameOf(cell.pair, cell.column, cell.feature)}</th>
                <td title=${hookTitle(cell.hook)}>${cell.hook}</td>
                <td>${cell.layer}</td>
                <td>${number(cell.estimate)}</td>
                <td title=${cell.reason}>${number(cell.exact)}</td>
                <td>${number(cell.difference)}</td>
                <td>${cell.why.join(", ")}</td>
                <td>${cell.off ? html`<span class="pill bad">off</span>` : ""}</td>
              </tr>
            `,
          )}
        </tbody>
      </table>
      ${
        cells.length > FIRST &&
        html`
          <p>
            <${Button} kind="small" onClick=${() => setAll(!all)}>
              ${all ? `The ${FIRST} strongest` : `All ${Math.min(MOST, cells.length)}`}
            <//>
          </p>
        `
      }
    </div>
  `;
}

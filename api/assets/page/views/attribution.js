// An attribution: estimates beside exact values, with the cells that disagree marked; edges and features as a list.

import { Copy, Problem, html, useState } from "../lib/ui.js";
import { count } from "../lib/format.js";
import { AttributionGrid } from "../lib/attribution.js";
import { shown } from "../lib/grid.js";
import { hookTitle } from "../lib/hooks.js";
import { codeOf } from "../lib/code.js";
import { lean } from "../lib/sweep_request.js";
import { Id } from "../lib/parts.js";
import { Maps, Missing, Pairs, State, isOver, notesOf, titleOf, useSweep } from "./sweep_grid.js";

const MOST = 100; // rows of a table
const make = (view) => new AttributionGrid(view);

export default function View({ params, session, jobs }) {
  return params[0] ? html`<${Attribution} key=${params[0]} id=${params[0]} session=${session} jobs=${jobs} />` : html`<h1>Attribution</h1><p><a href="#/sweep">Start a new one</a></p>`;
}

function Attribution({ id, session, jobs }) {
  const { view, error, setError, grid, listeners, lost } = useSweep(id, "attribution", make);
  const [pair, setPair] = useState(null);
  const [cursor, setCursor] = useState(null);
  if (!view || !grid) return html`<h1>Attribution</h1><${Problem} error=${error} title=${error && "This attribution cannot be shown"} />${!error && html`<p class="loading">Loading the attribution …</p>`}`;
  const { job, request } = view;
  const chosen = grid.pairs.length === 1 ? 0 : pair;
  const scores = grid.scores(chosen);
  const maps = (of) => html`<${Maps} grid=${of} pair=${chosen} listeners=${listeners} cursor=${cursor} setCursor=${setCursor} />`;
  return html`<div class="sweep">
    <h1>${(job.metadata && job.metadata.name) || "Attribution"}</h1>
    <p class="sweep-title">${titleOf(grid, chosen)} · method ${view.result.method} <${Id} id=${id} /></p>
    <${State} job=${job} grid=${grid} over=${isOver(job)} lost=${lost} jobs=${jobs} onError=${setError} />
    <p class="finding" role="status">${agreement(grid, chosen)}</p>
    <${Problem} error=${error} />
    ${job.error && html`<${Problem} error=${job.error.detail} title=${job.error.title} />`}
    <div class="tools"><${Pairs} grid=${grid} pair=${pair} setPair=${setPair} /></div>
    ${scores.length ? html`<${Scores} scores=${scores} />` : html`<div class="beside">
      <section aria-label="Estimates"><h2>Estimates</h2>${maps(grid.estimates)}</section>
      ${grid.total > 0 && html`<section aria-label="Exact values"><h2>Exact values</h2>${maps(grid)}</section>`}</div>`}
    <${Checked} grid=${grid} pair=${chosen} />
    ${[...notesOf(grid), ...grid.result.estimated.map((found) => found.reason).filter(Boolean)].map((note) => html`<p class="note">Note: ${note}</p>`)}
    ${!scores.length && html`<${Missing} grid=${grid.estimates} />`}
    <h2>The same attribution as code</h2><${Copy} label="The same attribution" tabs=${codeOf("/v1/attributions", lean(request), session.auth !== "open")} />
  </div>`;
}

/** How well estimates and exact values agree; empty: no cell was computed. */
function agreement(grid, pair) {
  const cells = grid.checked(pair).filter((cell) => cell.exact !== null);
  if (!cells.length) return "";
  const { result } = grid;
  const of = pair === null ? null : result.estimated[pair];
  const parts = [`${cells.filter((cell) => cell.off).length} of ${count(cells.length, "exact cell")} off by more than the noise floor and ${result.verify.tolerance}`];
  if (of && of.random && of.random.spearman !== null) parts.push(`rank correlation ${shown(of.random.spearman)} over the random cells`);
  if (of && of.recall) parts.push(`${of.recall.found} of the ${of.recall.top} strongest computed cells are among the largest estimates`);
  return `${parts.join("; ")}.`;
}

function Scores({ scores }) {
  return html`<div class="grid-table"><table><caption>The ${Math.min(MOST, scores.length)} strongest of ${scores.length}</caption>
    <thead><tr><th scope="col">what</th><th scope="col">score</th></tr></thead>
    <tbody>${scores.slice(0, MOST).map(({ name, score }) => html`<tr><th scope="row">${name}</th><td>${shown(score)}</td></tr>`)}</tbody></table></div>`;
}

/** The cells with exact values, strongest first, and those that disagree marked. */
function Checked({ grid, pair }) {
  const cells = grid.checked(pair);
  if (!cells.length) return null;
  const number = (value) => (value === null ? "–" : shown(value));
  return html`<div class="grid-table" role="region" tabindex="0" aria-label="Cells computed exactly"><table data-part="checked">
    <caption>${count(cells.length, "cell")} computed exactly${cells.length > MOST ? `, the ${MOST} strongest` : ""}</caption>
    <thead><tr>${["cell", "hook point", "layer", "estimate", "exact", "difference", "chosen as", ""].map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
    <tbody>${cells.slice(0, MOST).map((cell) => html`<tr class=${cell.off ? "bad" : ""}><th scope="row">${grid.nameOf(cell.pair, cell.column, cell.feature)}</th><td>${hookTitle(cell.hook)}</td><td>${cell.layer}</td><td>${number(cell.estimate)}</td><td title=${cell.reason}>${number(cell.exact)}</td><td>${number(cell.difference)}</td><td>${cell.why.join(", ")}</td><td>${cell.off ? "off" : ""}</td></tr>`)}</tbody>
  </table></div>`;
}

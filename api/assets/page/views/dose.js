// A dose: effect and damage of each layer and scale, and how far each layer is safe.

import { html } from "../lib/ui.js";
import { number, percent } from "../lib/format.js";
import { colour } from "../lib/heatmap.js";
import { Stats } from "../lib/parts.js";

const PARTS = { effect: (cell) => number(cell.effect, 2), "loss above unsteered": (cell) => number(cell.loss, 2), repetition: (cell) => percent(cell.repetition), "relative size": (cell) => number(cell.median, 2) };
const layerOf = ({ layer }) => (layer === null ? "all" : layer);
const what = ({ effect }) => (effect.words.length ? "share of texts with the words" : effect.target ? "log-probability of the target, nats per token" : `mean score of ${effect.probe}`);

/** The outcome of a job of kind `dose`, as in its result. */
export default function Dose({ dose: { dose, unsteered, cells, safe } }) {
  const scales = [...new Set(cells.map(({ scale }) => scale))];
  const rows = [...new Set(cells.map(layerOf))].map((layer) => cells.filter((cell) => layerOf(cell) === layer));
  const reach = Math.max(...cells.map(({ effect }) => Math.abs(effect - unsteered.effect))) || 1;
  const every = [unsteered, ...cells];
  const stopped = every.filter((cell) => cell.stopped).length;
  return html`<p class="finding">${safe.length ? safe.map((cell) => `Layer ${layerOf(cell)} is safe up to scale ${cell.scale} (effect ${number(cell.effect, 2)}).`).join(" ") : "No scale is safe."}${stopped ? ` A policy ended continuations of ${stopped} of ${every.length} cells, which cannot be compared.` : ""}</p>
    <${Stats} items=${[
      { name: "Unsteered", value: number(unsteered.effect, 2), note: what(dose) },
      { name: "Safe", value: `+${dose.max_loss} nats`, note: `and +${percent(dose.max_repetition)} repetition, at most` },
    ]} />
    ${Object.entries(PARTS).map(([name, text]) => html`<div class="grid-table"><table><caption>${name}, by layer and scale; a cell that is not safe is struck out</caption>
      <thead><tr><th scope="col">Layer</th>${scales.map((scale) => html`<th scope="col">${scale}</th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`<tr><th scope="row">${layerOf(row[0])}</th>${row.map((cell) => html`<td title=${cell.text} style=${name === "effect" ? { boxShadow: `inset 0 -4px ${colour((cell.effect - unsteered.effect) / reach)}` } : {}}>${cell.safe ? text(cell) : html`<s>${text(cell)}</s>`}</td>`)}</tr>`)}</tbody></table></div>`)}`;
}

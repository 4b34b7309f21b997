// A dose: effect and damage of each layer over the scale, how far each layer is safe, and what the
// model writes at each scale.

import { Button, html, useState } from "../lib/ui.js";
import { count, number, percent } from "../lib/format.js";
import { Stats } from "../lib/parts.js";
import { short, visible } from "../lib/chips.js";
import { Reading } from "../lib/readings.js";
import { Plot } from "../plots/plot.js";
import { Side, diff } from "../plots/text_diff.js";

const PARTS = {
  effect: (cell) => number(cell.effect, 2),
  "loss above unsteered": (cell) => number(cell.loss, 2),
  repetition: (cell) => percent(cell.repetition),
  "relative size": (cell) => number(cell.median, 2),
};
const layerOf = ({ layer }) => (layer === null ? "all" : layer);
const named = ({ words, target, probe }) => {
  if (words.length) return `share of texts with ${words.join(" or ")}`;
  return target ? `log-probability of “${visible(target)}”` : `mean score of ${probe}`;
};
const unit = ({ target }) => (target ? "nats per token" : "");
const what = ({ effect }) => [named(effect), unit(effect)].filter(Boolean).join(", ");
const highest = (cells) => [...cells].sort((a, b) => b.effect - a.effect)[0];
const beginning = (text) => (text.length > 120 ? `${text.slice(0, 120)}…` : text).trim();

/**
 * The figures of one measure: the chosen layer strong with its safe range, the others faint.
 * `value(cell)`; of the unsteered model, `zero`.
 */
function Curve({ title, note, about, name, value, zero, text, rules, rows, chosen, layers, safe, pick }) {
  const tipOf = (cell) => {
    const measured = `${text(value(cell))}${cell.safe ? "" : ", not safe"}`;
    return `layer ${layerOf(cell)}, scale ${cell.scale}: ${measured}. “${beginning(visible(cell.text))}”`;
  };
  const points = (cells) =>
    [...cells, null]
      .map((cell) =>
        cell
          ? { x: cell.scale, y: value(cell), cell, tone: cell.safe ? "" : "bad", tip: tipOf(cell) }
          : { x: 0, y: zero, tip: `unsteered: ${text(zero)}` },
      )
      .sort((a, b) => a.x - b.x);
  const mine = points(layers.get(chosen.layer));
  const reached = [0, ...safe.filter((cell) => layerOf(cell) === chosen.layer).map(({ scale }) => scale)];
  return html`
    <${Plot}
      title=${title}
      note=${note}
      about=${`layer ${chosen.layer}, ${about}`}
      name=${name}
      rows=${rows}
      x=${{ label: "scale" }}
      y=${{ text }}
      at=${Math.max(
        0,
        mine.findIndex(({ x }) => x === chosen.scale),
      )}
      onAt=${(n) => pick(mine[n].x)}
      bands=${[
        { axis: "x", from: Math.min(...reached), to: Math.max(...reached), tone: "safe", text: "safe" },
      ]}
      rules=${[...rules, { axis: "x", at: chosen.scale, quiet: true }]}
      series=${[
        { kind: "line", name: `layer ${chosen.layer}`, points: mine },
        ...[...layers]
          .filter(([layer]) => layer !== chosen.layer)
          .map(([layer, cells], n) => ({
            kind: "line",
            name: n ? "" : "other layers",
            tone: "soft",
            quiet: true,
            points: points(cells),
          })),
      ]}
    />
  `;
}

/**
 * The first prompt's continuation at each scale of a layer, with the words that the unsteered one has
 * not marked.
 */
const Strip = ({ cells, unsteered, chosen, pick }) => html`
  <div class="card">
    <h3>The first prompt, at each scale</h3>
    <ol class="texts">
      ${[...cells, unsteered]
        .sort((a, b) => a.scale - b.scale)
        .map(
          (cell) => html`
            <li
              key=${cell.scale}
              class=${cell.safe ? "" : "unsafe"}
              aria-current=${cell.scale === chosen ? "true" : null}
            >
              <button
                type="button"
                class="button small quiet"
                aria-label=${`Scale ${cell.scale}`}
                onClick=${() => pick(cell.scale)}
              >
                ${cell.scale || "unsteered"}
              </button> <span>
                ${
                  cell === unsteered
                    ? cell.text
                    : html`<${Side} parts=${diff(unsteered.text, cell.text)} side="second" />`
                }
              </span>
              ${!cell.safe && html` <span class="pill bad">not safe</span>`}
            </li>
          `,
        )}
    </ol>
  </div>
`;

/** Which safe cell raises the effect most, and which lowers it most: a dose is not told what is wanted. */
export function finding({ dose: { effect }, unsteered, safe }) {
  const value = (cell) => `${number(cell.effect, 2)} ${unit(effect)}`.trim();
  const most = (does, cells) =>
    cells.length
      ? `${does} most at layer ${layerOf(cells[0])}, scale ${cells[0].scale}, to ${value(cells[0])}`
      : `${does} nowhere`;
  const risen = safe.filter((cell) => cell.effect > unsteered.effect).sort((a, b) => b.effect - a.effect);
  const fallen = safe.filter((cell) => cell.effect < unsteered.effect).sort((a, b) => a.effect - b.effect);
  const moved = `At the largest safe scales, it ${most("rises", risen)}, and ${most("falls", fallen)}.`;
  return `The ${named(effect)} is ${value(unsteered)} unsteered. ${safe.length ? moved : "No scale is safe."}`;
}

/** The outcome of a job of kind `dose`, as in its result. */
export default function Dose({ id, dose: outcome }) {
  const { dose, unsteered, cells, safe } = outcome;
  const best = highest(safe) || cells[0];
  const [chosen, choose] = useState({ layer: layerOf(best), scale: best.scale });
  const scales = [...new Set(cells.map(({ scale }) => scale))].sort((a, b) => a - b);
  const layers = new Map(
    [...new Set(cells.map(layerOf))].map((layer) => [layer, cells.filter((cell) => layerOf(cell) === layer)]),
  );
  const every = [unsteered, ...cells];
  const stopped = every.filter((cell) => cell.stopped).length;
  const rows = every.map(({ layer, scale, effect, loss, repetition, median, largest, safe: is, text }) => ({
    layer,
    scale,
    effect,
    loss,
    repetition,
    median,
    largest,
    safe: is,
    text,
  }));
  const of = (layer) => safe.filter((cell) => layerOf(cell) === layer);
  const pick = (scale) => choose((known) => ({ ...known, scale }));
  const bounds = `at most +${dose.max_loss} nats and +${percent(dose.max_repetition)} repetition`;
  const about = `${count(dose.prompts, "prompt")} in each cell; shaded: safe, ${bounds}; red: not safe`;
  const shared = { about, rows, chosen, layers, safe, pick };
  const limit = (at, text) => [{ axis: "y", at, text }];
  return html`
    <p class="finding">
      ${finding(outcome)}
      ${
        safe.length
          ? ` Safe up to scale: ${[...layers.keys()]
              .map((layer) => [layer, of(layer)])
              .filter(([, found]) => found.length)
              .map(([layer, found]) => `${found.map(({ scale }) => scale).join(" and ")} at layer ${layer}`)
              .join(", ")}.`
          : ""
      }
      ${
        stopped
          ? ` A policy ended continuations of ${stopped} of ${every.length} cells, which cannot be compared.`
          : ""
      }
    </p>
    <${Stats}
      items=${[
        { name: "Unsteered", value: number(unsteered.effect, 2), note: what(dose) },
        {
          name: "Safe",
          value: `+${dose.max_loss} nats`,
          note: `and +${percent(dose.max_repetition)} repetition, at most`,
        },
      ]}
    />
    <div class="inline" role="group" aria-label="Layer">
      <span class="soft">Layer</span>
      ${[...layers.keys()].map(
        (layer) => html`
          <${Button}
            key=${layer}
            kind="small"
            aria-pressed=${layer === chosen.layer ? "true" : "false"}
            onClick=${() => choose({ layer, scale: (highest(of(layer)) || chosen).scale })}
          >
            ${layer}
          <//>
        `,
      )}
    </div>
    <div class="reading even">
      <${Curve}
        title="Effect"
        note=${what(dose)}
        name=${`${id}.effect`}
        value=${(cell) => cell.effect}
        zero=${unsteered.effect}
        text=${short}
        rules=${limit(unsteered.effect, "unsteered")}
        ...${shared}
      />
      <${Curve}
        title="Damage"
        note="loss on held-out texts above unsteered, nats per token"
        name=${`${id}.loss`}
        value=${(cell) => cell.loss}
        zero=${0}
        text=${short}
        rules=${limit(dose.max_loss, `at most ${dose.max_loss}`)}
        ...${shared}
      />
      <${Curve}
        title="Repetition"
        note="share of repeated 4-grams"
        name=${`${id}.repetition`}
        value=${(cell) => cell.repetition}
        zero=${unsteered.repetition}
        text=${percent}
        rules=${limit(unsteered.repetition + dose.max_repetition, `at most +${percent(dose.max_repetition)}`)}
        ...${shared}
      />
      <${Strip}
        cells=${layers.get(chosen.layer)}
        unsteered=${unsteered}
        chosen=${chosen.scale}
        pick=${pick}
      />
    </div>
    <details>
      <summary>All numbers</summary>
      ${Object.entries(PARTS).map(
        ([name, text]) => html`
          <div class="grid-table">
            <table>
              <caption>${name}, by layer and scale; a cell that is not safe is struck out</caption>
              <thead>
                <tr>
                  <th scope="col">Layer</th>
                  ${scales.map((scale) => html`<th scope="col">${scale}</th>`)}
                </tr>
              </thead>
              <tbody>
                ${[...layers].map(
                  ([layer, row]) => html`
                    <tr>
                      <th scope="row">${layer}</th>
                      ${scales
                        .map((scale) => row.find((cell) => cell.scale === scale))
                        .map(
                          (cell) => html`
                            <td title=${cell.text}>
                              ${cell.safe ? text(cell) : html`<s>${text(cell)}</s>`}
                            </td>
                          `,
                        )}
                    </tr>
                  `,
                )}
              </tbody>
            </table>
          </div>
        `,
      )}
    </details>
  `;
}

/** A dose on a page of its own. */
export const View = ({ params, jobs }) => html`
  <h1>Dose</h1>
  ${
    params[0]
      ? html`
          <${Reading} key=${params[0]} id=${params[0]} jobs=${jobs}>
            ${(result) =>
              result.dose
                ? html`<${Dose} id=${params[0]} dose=${result.dose} />`
                : html`<p>This job is no dose.</p>`}
          <//>
        `
      : html`<p>A dose is opened from its job: <a href="#/jobs">Jobs</a>.</p>`
  }
`;

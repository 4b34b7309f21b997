// What views are built from: section, stat tiles, empty state, an id in short, a line chart.

import { count, duration } from "./format.js";
import { before, progressOf, usual } from "./jobs.js";
import { Button, Progress, html, useNow, useState } from "./ui.js";

/** The mark: a stream of three lines, tapped in the middle. */
export const Logo = () => html`
  <svg
    class="logo"
    viewBox="0 0 32 32"
    aria-hidden="true"
    fill="none"
    stroke="currentColor"
    stroke-width="3"
    stroke-linecap="round"
  >
    <path d="M3 9c4.3-4 8.7-4 13 0s8.7 4 13 0" opacity=".55" />
    <path d="M3 16.5c4.3-4 8.7-4 13 0s8.7 4 13 0" />
    <path d="M3 24c4.3-4 8.7-4 13 0s8.7 4 13 0" opacity=".55" />
    <circle class="drop" cx="16" cy="16.5" r="4.2" stroke="none" />
  </svg>
`;

/** A heading with what belongs to it at the right, such as a button, and its content. */
export const Section = ({ title, aside, children }) => html`
  <section aria-label=${title}>
    <div class="section-head"><h2>${title}</h2>${aside}</div>
    ${children}
  </section>
`;

/** Tiles of figures: `items` is [{name, value, note, bad}]. */
export const Stats = ({ items }) => html`
  <dl class="stats">
    ${items.map(
      ({ name, value, note, bad }) => html`
        <div class=${`stat${bad ? " bad" : ""}`}>
          <dt>${name}</dt>
          <dd>${value}${note && html`<small>${note}</small>`}</dd>
        </div>
      `,
    )}
  </dl>
`;

/** What folds: open where there is room (or `open`); its heading and, in short, what it says stay. */
export const Fold = ({ title, short, open = matchMedia("(min-width: 761px)").matches, children }) => html`
  <details class="fold" open=${open}>
    <summary><h2>${title}</h2> <span class="soft">${short}</span></summary>
    ${children}
  </details>
`;

/**
 * A table; on a phone its rows are lists, each value after its head, without those that are `spare`.
 * `keys`: of the rows, where they come and go.
 */
export const Table = ({ label, heads, rows, keys = [], spare = [] }) => html`
  <div class="wide card" tabindex="0" role="region" aria-label=${label}>
    <table>
      <thead>
        <tr>
          ${heads.map(
            (head) => html`<th scope="col">${head || html`<span class="visually-hidden">Action</span>`}</th>`,
          )}
        </tr>
      </thead>
      <tbody>
        ${rows.map(
          (cells, row) => html`
            <tr key=${keys[row]}>
              ${cells.map(
                (cell, n) => html`
                  <td
                    class=${spare.includes(heads[n]) ? "spare" : null}
                    data-head=${((n || typeof cell === "number") && heads[n]) || null}
                  >
                    ${cell}
                  </td>
                `,
              )}
            </tr>
          `,
        )}
      </tbody>
    </table>
  </div>
`;

/** Where nothing is yet: what it would be, and as `children` how it comes. */
export const EmptyState = ({ title, text, children }) =>
  html`<div class="empty-state"><strong>${title}</strong>${text && html`<p>${text}</p>`}${children}</div>`;

/**
 * What a job that has not ended does: its place in the queue; how long it has run, beside how long
 * such jobs take.
 */
export function Standing({ job, jobs }) {
  const now = useNow(1);
  const [runs, took] = [
    job.state === "running" && job.started ? Math.max(0, now - job.started) : null,
    usual(job, jobs),
  ];
  const known =
    progressOf(job) ||
    (runs !== null &&
      took !== null &&
      runs < took && [runs, took, `${duration(runs)} of about ${duration(took)}`]);
  const first = before(job, jobs);
  return html`
    <div class="standing card">
      <p role="status">The job is ${job.state} …</p>
      ${
        known
          ? html`<${Progress} value=${known[0]} total=${known[1]} label=${known[2]} />`
          : html`
              <span>
                ${
                  runs !== null
                    ? `for ${duration(runs)}${took === null ? "" : `; such jobs took about ${duration(took)}`}`
                    : job.state === "queued" && first > 0 && `${count(first, "job")} before it`
                }
              </span>
            `
      } <a href=${`#/jobs/${job.id}`}>Job</a>
    </div>
  `;
}

const PILLS = { succeeded: "good", failed: "bad", aborted: "bad", running: "busy", cancelling: "busy" };
export const State = ({ state }) =>
  html`<span class=${`pill state ${state} ${PILLS[state] || ""}`}>${state}</span>`;

export const shortId = (id) => (id.length > 16 ? `${id.slice(0, 8)}…${id.slice(-4)}` : id);

/** An id in short, with a button that copies all of it. */
export function Id({ id }) {
  const [copied, set] = useState("");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(id);
      set("Copied");
    } catch {
      set(id); // no clipboard without https: shown, to be selected
    }
    setTimeout(() => set(""), 4000);
  };
  return html`
    <span class="id">
      <code title=${id}>${shortId(id)}</code> <${Button}
        kind="small quiet"
        aria-label=${`Copy ${id}`}
        onClick=${copy}
      >
        Copy
      <//>
      <span class="copied" role="status">${copied}</span>
    </span>
  `;
}

const [WIDTH, HEIGHT, LEFT, BOTTOM] = [320, 128, 44, 22];

/** The least of 1, 2, 5, 10, 20, … (and 0.1, 0.2, …) that is not below. */
function ceiling(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * unit >= value * 0.9999) * unit;
}

/**
 * A line over time: `points` is [[seconds since the epoch, value or null], …], oldest first;
 * `text(value)` writes a value. `span`: where the axis begins and ends, by default those of the
 * points. Over something else, such as steps: `ends` has the words at both ends.
 */
export function Chart({ title, note = "", points, text = String, span, ends }) {
  const known = points.filter(([, value]) => value !== null && value !== undefined);
  const last = known.length ? known[known.length - 1] : null;
  const most = Math.max(...known.map(([, value]) => value), 0);
  const top = ceiling(most);
  const [from, to] = span || (points.length ? [points[0][0], points[points.length - 1][0]] : [0, 0]);
  const x = (at) => LEFT + ((at - from) / (to - from || 1)) * (WIDTH - LEFT - 4);
  const y = (value) => 8 + (1 - value / top) * (HEIGHT - BOTTOM - 8);
  const line = known.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  const during = ends ? `from ${ends.join(" to ")}` : `in ${duration(to - from)}`;
  return html`
    <figure class="chart card">
      <figcaption>
        <span>${title}${note && html` <small>${note}</small>`}</span>
        <output>${last ? text(last[1]) : "–"}</output>
      </figcaption>
      <svg
        viewBox=${`0 0 ${WIDTH} ${HEIGHT}`}
        role="img"
        aria-label=${
          last
            ? `${title}: ${text(last[1])} last, at most ${text(most)} ${during}`
            : `${title}: nothing measured yet`
        }
      >
        ${[0, top / 2, top].map(
          (value) => html`
            <line class="axis" x1=${LEFT} x2=${WIDTH} y1=${y(value)} y2=${y(value)} />
            <text x=${LEFT - 6} y=${y(value) + 4} text-anchor="end">${text(value)}</text>
          `,
        )}
        ${
          known.length > 1 &&
          html`
            <polygon class="area" points=${`${x(known[0][0])},${y(0)} ${line} ${x(last[0])},${y(0)}`} />
            <polyline class="line" points=${line} />
          `
        }
        ${last && html`<circle class="now" cx=${x(last[0])} cy=${y(last[1])} r="3" />`}
        <text x=${LEFT} y=${HEIGHT - 4}>
          ${ends ? ends[0] : to > from ? `${duration(to - from)} ago` : ""}
        </text>
        <text x=${WIDTH} y=${HEIGHT - 4} text-anchor="end">${ends ? ends[1] : "now"}</text>
      </svg>
    </figure>
  `;
}

// A sweep's heatmaps, side by side, filled while it runs; a closer look, exports, a table, and the
// same as code.

import { get, post, sse } from "../lib/api.js";
import {
  Button,
  Copy,
  Problem,
  Progress,
  html,
  useCallback,
  useEffect,
  useLayoutEffect,
  useMemo,
  useNow,
  useRef,
  useState,
  Coded,
} from "../lib/ui.js";
import { count, duration, number } from "../lib/format.js";
import { MEANING, SweepGrid, csv, shareOf, shown } from "../lib/grid.js";
import { hookCode, hookName, hookTitle } from "../lib/hooks.js";
import { Heatmap, drawScale } from "../lib/heatmap.js";
import { useDark } from "../lib/theme.js";
import { codeOf } from "../lib/code.js";
import { over as isOver } from "../lib/jobs.js";
import { Closer } from "./sweep_closer.js";
import { finding } from "../lib/finding.js";
import { Id, State as Pill } from "../lib/parts.js";
import { picture } from "../plots/sweep_picture.js";
import { save } from "../plots/save.js";

/** Milliseconds between two looks of text and table at the grid; the heatmaps are drawn at every frame. */
const TEXT_MS = 250;
// times for the unpatched values while cells arrive: they come first, unless they failed
const MOST_ASKED = 5;
const PANEL = 330; // least width of a panel, in CSS pixels
const FRAME = 22; // of it are its padding and border

const sweepGrid = (view) => new SweepGrid(view);

/**
 * The sweep (or attribution, by `kind`), its grid, and how it goes on; `events` are the heatmaps'
 * listeners.
 */
export function useSweep(id, kind = "sweep", make = sweepGrid) {
  const [view, setView] = useState(null);
  const [error, setError] = useState(null);
  const [, look] = useState(0);
  const grid = useRef(null);
  const listeners = useRef(new Set());
  const lost = useRef(false);
  const tell = useCallback((place) => listeners.current.forEach((listener) => listener(place)), []);

  useEffect(() => {
    const stop = new AbortController();
    let timer = null;
    let asking = null;
    let asked = 0;
    const soon = () => {
      timer = timer || setTimeout(() => ((timer = null), look((n) => n + 1)), TEXT_MS);
    };
    const load = async () => {
      const found = await get(`/v1/${kind}s/${encodeURIComponent(id)}`, { signal: stop.signal });
      if (grid.current) grid.current.take(found);
      else grid.current = make(found);
      setView(found);
      setError(null);
      tell(null);
      return found;
    };
    const again = () =>
      (asking =
        asking ||
        load()
          .catch(() => {})
          .finally(() => (asking = null)));
    const follow = async () => {
      const { job, last_event: after } = await load();
      if (isOver(job)) return;
      const stream = new AbortController(); // ends with the sweep, or with the view
      stop.signal.addEventListener("abort", () => stream.abort());
      await sse(`/v1/jobs/${encodeURIComponent(id)}/events`, {
        signal: stream.signal,
        reconnect: true,
        after,
        onState: (connected) => ((lost.current = !connected), soon()),
        onEvent: ({ event, data }) => {
          if (event === "cell") {
            tell(grid.current.cell(data));
            soon();
            const pair = grid.current.pairs[data.pair];
            if (!pair.base && !asking && (asked += 1) <= MOST_ASKED) again(); // the scale's middle
          } else if (event === "estimate") again();
          else if (event === "done") stream.abort();
          else if (event === "state")
            setView((known) => ({
              ...known,
              job: { ...known.job, state: data.state, attempt: data.attempt },
            }));
        },
      });
      if (!stop.signal.aborted) await load();
    };
    follow().catch((failure) => failure.name !== "AbortError" && !stop.signal.aborted && setError(failure));
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [id]);
  return { view, error, setError, grid: grid.current, listeners: listeners.current, lost: lost.current };
}

export default function Grid({ id, session, jobs }) {
  const { view, error, setError, grid, listeners, lost } = useSweep(id);
  const [pair, setPair] = useState(null);
  const [asTable, setAsTable] = useState(false);
  const [cursor, setCursor] = useState(null); // {hook, row, column}
  const [part, setPart] = useState(null); // {hook, rows: [first, last], columns: [first, last]}
  const [looking, setLooking] = useState(false);
  const chosen = grid && grid.pairs.length === 1 ? 0 : pair;

  const look = useCallback((found) => {
    setPart(found);
    setLooking(Boolean(found));
  }, []);
  const close = useCallback(() => {
    const map = document.querySelector(`.cells[data-hook="${part && part.hook}"]`);
    look(null);
    if (map) map.focus();
  }, [part]);
  useEffect(() => {
    // what led here is gone
    if (document.activeElement === document.body) document.getElementById("main").focus();
  }, [Boolean(view)]);
  if (!view || !grid)
    return html`
      <h1>Sweep</h1>
      <${Problem} error=${error} title=${error && "This sweep cannot be shown"} />
      ${
        error
          ? html`<p><a href="#/sweep">Start a new sweep</a></p>`
          : html`<p class="loading">Loading the sweep …</p>`
      }
    `;

  const { job, request } = view;
  const over = isOver(job);
  const live = jobs && jobs.byId.get(id); // knows of a lost lease first
  const found = finding(grid, chosen);
  return html`
    <div class="sweep">
      <h1>${(job.metadata && job.metadata.name) || "Sweep"}</h1>
      <p class="sweep-title">${titleOf(grid, chosen)} <${Id} id=${id} /></p>
      <${State}
        job=${{ ...job, ...(live && live.version >= job.version ? live : {}) }}
        grid=${grid}
        over=${over}
        lost=${lost}
        jobs=${jobs}
        onError=${setError}
      />
      <p class="finding" role="status">${found && !over && "So far: "}${found}</p>
      <${Problem} error=${error} />
      ${job.error && html`<${Problem} error=${job.error.detail} title=${job.error.title} />`}
      <div class="tools">
        <${Pairs} grid=${grid} pair=${pair} setPair=${setPair} />
        <${Button} aria-pressed=${asTable ? "true" : "false"} onClick=${() => setAsTable(!asTable)}>
          As table
        <//>
        <span class="soft">Save as</span>
        <${Button}
          onClick=${() => save(`${id}.png`, picture(grid, chosen, titleOf(grid, chosen)))}
          onError=${setError}
        >
          PNG
        <//>
        <${Button}
          onClick=${() => save(`${id}.csv`, new Blob([csv(grid.records())], { type: "text/csv" }))}
          onError=${setError}
        >
          CSV
        <//>
        <${Button} onClick=${() => save(`${id}.json`, exported(id, session))} onError=${setError}>JSON<//>
        <span class="space"></span>
        ${request && html`<a class="button" href=${`#/sweep?like=${encodeURIComponent(id)}`}>Duplicate</a>`}
        <a class="button" href="#/sweep">New sweep</a>
      </div>
      ${
        asTable
          ? html`<${Table} grid=${grid} pair=${chosen} over=${over} />`
          : html`
              <${Maps}
                grid=${grid}
                pair=${chosen}
                listeners=${listeners}
                cursor=${cursor}
                setCursor=${setCursor}
                part=${part}
                look=${look}
                select=${setPart}
              />
            `
      }
      ${
        looking &&
        part &&
        html`
          <${Closer}
            key=${JSON.stringify(part)}
            grid=${grid}
            request=${request}
            part=${part}
            pair=${chosen}
            close=${close}
          />
        `
      }
      ${notesOf(grid).map((note) => html`<p class="note">Note: <${Coded} text=${note} /></p>`)}
      <${Missing} grid=${grid} />
      ${
        request &&
        html`
          <h2>The same sweep as code</h2>
          <${Copy} label="The same sweep" tabs=${codeOf("/v1/sweeps", request, session.auth !== "open")} />
        `
      }
    </div>
  `;
}

export function Pairs({ grid, pair, setPair }) {
  return (
    grid.pairs.length > 1 &&
    html`
      <label>
        Pairs <select
          data-field="pair"
          value=${pair === null ? "" : String(pair)}
          onChange=${(event) => setPair(event.target.value === "" ? null : Number(event.target.value))}
        >
          <option value="">mean over all ${grid.pairs.length}</option>
          ${grid.pairs.map(
            (each, n) =>
              html`<option value=${String(n)}>${n + 1}: ${short(each.base_tokens.join(""))}</option>`,
          )}
        </select>
      </label>
    `
  );
}

const short = (text) => (text.length > 60 ? `${text.slice(0, 30)} … ${text.slice(-25)}` : text);

export function titleOf(grid, pair) {
  const { result } = grid;
  const ablated = { zeros: ", rows set to zero", mean: ", rows set to their mean" }[result.ablation] || "";
  if (pair === null) return `Mean over ${grid.pairs.length} pairs of prompts${ablated}`;
  const found = grid.pairs[pair];
  const [base, source] = [found.base_tokens, found.source_tokens].map((tokens) => short(tokens.join("")));
  const what = result.ablation ? `“${base}”${ablated}` : `“${source}” patched into “${base}”`;
  const answers = found.answer
    ? ` · answer “${found.answer.trim()}”${found.foil ? `, foil “${found.foil.trim()}”` : ""}`
    : "";
  return `${what}${answers}`;
}

export const notesOf = (grid) => [...new Set(grid.pairs.flatMap((pair) => pair.notes))].slice(0, 20);

/** A study that `PatchStudy.load` reads. */
async function exported(id, session) {
  // as it is now: the one at hand may be older than its cells
  const view = await get(`/v1/sweeps/${encodeURIComponent(id)}`);
  const study = {
    format: "midstream patch study",
    version: 1,
    midstream: session.version || "",
    job: id,
    request: view.request,
    result: view.result,
  };
  return new Blob([JSON.stringify(study)], { type: "application/json" });
}

const STALL_S = 20; // without a new cell: said

/**
 * Seconds that the rest takes: by this sweep's own speed, before its first cells by that of the last
 * one of this model; null: not known.
 */
function remaining(job, grid, began, now, jobs) {
  if (began.current && grid.known > began.current.known)
    return ((now - began.current.at) / (grid.known - began.current.known)) * (grid.total - grid.known);
  const last =
    jobs &&
    jobs.list.find(
      (each) =>
        each.state === "succeeded" && each.kind === job.kind && each.model === job.model && each.cells > 0,
    );
  return last ? ((last.finished - last.started) / last.cells) * (grid.total - grid.known) : null;
}

export function State({ job, grid, over, lost, jobs, onError }) {
  const now = useNow(1);
  const began = useRef(null);
  const news = useRef({ known: grid.known, at: now });
  if (!began.current && grid.known < grid.total && !over) began.current = { known: grid.known, at: now };
  if (news.current.known !== grid.known || job.state !== "running")
    news.current = { known: grid.known, at: now };
  const left = over ? null : remaining(job, grid, began, now, jobs);
  const still = now - news.current.at;
  const told = [
    left === null ? "" : `about ${duration(left)} left`,
    job.state === "queued" ? `waiting for a worker for ${duration(now - (job.queued || job.created))}` : "",
    job.state === "running" && !grid.known && left === null ? "measuring the unpatched prompts" : "",
    still > STALL_S
      ? `no new cell for ${duration(still)}${job.worker ? ` from worker ${job.worker}` : ""}`
      : "",
    over && job.started && job.finished ? `took ${duration(job.finished - job.started)}` : "",
    job.retry_reason
      ? `attempt ${job.state === "queued" ? job.attempt + 1 : job.attempt}: ${job.retry_reason}`
      : "", // attempts count hand-overs between queues too
  ]
    .filter(Boolean)
    .join(" · ");
  const label = `${number(grid.known)} of ${number(grid.total)} cells`;
  const bar = grid.total ? html`<${Progress} value=${grid.known} total=${grid.total} label=${label} />` : "";
  return html`
    <div class="sweep-state" data-state=${job.state}>
      <${Pill} state=${job.state} /> ${bar} <span class="soft">${told}</span>
      <span class="visually-hidden" role="status">The ${job.kind} is ${job.state}.</span>
      ${lost && !over && html`<span class="bad" role="status">Connection lost; reconnecting …</span>`}
      ${
        !over &&
        html`
          <${Button}
            disabled=${job.state === "cancelling"}
            onClick=${() => post(`/v1/jobs/${encodeURIComponent(job.id)}/cancel`, {})}
            onError=${onError}
          >
            Cancel
          <//>
        `
      }
    </div>
  `;
}

/** Whether there is a closer look → what the keys do about it. */
const CLOSER = { true: ", Shift+arrows select several, Enter opens a closer look", false: "" };

/**
 * All hooks side by side, with one cursor and one selection; without `look` and `select`: without a
 * selection.
 */
export function Maps({ grid, pair, listeners, cursor, setCursor, part, look, select }) {
  const area = useRef(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const watch = new ResizeObserver(([{ contentRect }]) => setWidth(Math.floor(contentRect.width)));
    watch.observe(area.current);
    return () => watch.disconnect();
  }, []);
  const across = Math.max(1, Math.min(grid.hooks.length, Math.floor(width / PANEL)));
  const panel = Math.floor((width - 12 * (across - 1)) / across) - FRAME;
  const told = cursor
    ? grid.words(pair, cursor.hook, cursor.row, cursor.column)
    : `Arrow keys move between cells${CLOSER[Boolean(look)]}.`;
  return html`
    <div class="maps" ref=${area}>
      ${
        width > 0 &&
        grid.hooks.map(
          (hook) => html`
            <${Map_}
              key=${hook}
              hook=${hook}
              grid=${grid}
              pair=${pair}
              width=${panel}
              listeners=${listeners}
              cursor=${cursor}
              setCursor=${setCursor}
              part=${part}
              look=${look}
              select=${select}
            />
          `,
        )
      }
    </div>
    <${Scale} grid=${grid} pair=${pair} listeners=${listeners} />
    <p class="readout" role="status">${told}</p>
  `;
}

function Map_({ hook, grid, pair, width, listeners, cursor, setCursor, part, look, select }) {
  const canvas = useRef(null);
  const map = useRef(null);
  const from = useRef(null); // where a drag or a Shift selection began
  const [tip, setTip] = useState(null);
  const [, placeAgain] = useState(0);
  const source = useMemo(
    () => ({
      rows: grid.names(pair),
      columns: grid.layers,
      titles: grid.titles,
      scale: () => grid.limits(pair).join(),
      at: (row, column) => shareOf(grid, pair, hook, column, row),
    }),
    [grid, pair, hook],
  );
  useLayoutEffect(() => {
    if (map.current) map.current.show(source, width);
    else map.current = new Heatmap(canvas.current, source, width);
    placeAgain((n) => n + 1); // cursor and selection lie on the cells
    canvas.current.heatmap = map.current; // for tests and for curious readers
  }, [source, width]);
  useEffect(() => {
    const news = (place) =>
      place === null
        ? map.current.markAll()
        : place.hook === hook && map.current.mark(place.column, place.row);
    listeners.add(news);
    return () => {
      listeners.delete(news);
      map.current.close();
    };
  }, []);

  const here = cursor && cursor.hook === hook ? cursor : null;
  const own = part && part.hook === hook ? part : null;
  const cellAt = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const found = map.current.hit(event.clientX - box.left, event.clientY - box.top);
    return found && { hook, row: found.column, column: found.row };
  };
  const between = (one, other) => ({
    hook,
    rows: [Math.min(one.row, other.row), Math.max(one.row, other.row)],
    columns: [Math.min(one.column, other.column), Math.max(one.column, other.column)],
  });
  const move = (event) => {
    const cell = cellAt(event);
    setTip(cell ? { ...cell, x: event.offsetX, y: event.offsetY } : null);
    if (look && cell && from.current && event.buttons & 1) select(between(from.current, cell));
  };
  const down = (event) => {
    const cell = event.button === 0 ? cellAt(event) : null;
    from.current = cell;
    if (cell) setCursor(cell);
  };
  const up = (event) => {
    const cell = cellAt(event);
    if (look && cell && from.current) look(between(from.current, cell));
    from.current = null;
  };
  const key = (event) => {
    const at = here || { hook, row: 0, column: 0 };
    const [rows, columns] = [grid.layers.length, grid.columns];
    const steps = {
      ArrowLeft: [-1, 0],
      ArrowRight: [1, 0],
      ArrowUp: [0, -1],
      ArrowDown: [0, 1],
      Home: [-rows, 0],
      End: [rows, 0],
      PageUp: [0, -10],
      PageDown: [0, 10],
    };
    const step = steps[event.key];
    if (step) {
      const next = here
        ? {
            hook,
            row: Math.min(rows - 1, Math.max(0, at.row + step[0])),
            column: Math.min(columns - 1, Math.max(0, at.column + step[1])),
          }
        : at;
      if (look && event.shiftKey) {
        from.current = from.current || at;
        select(between(from.current, next));
      } else {
        from.current = null;
        if (look) look(null);
      }
      setCursor(next);
    } else if (!look) return;
    else if (event.key === "Enter" || event.key === " ") look(own || between(at, at));
    else if (event.key === "Escape") {
      from.current = null;
      look(null);
    } else return;
    event.preventDefault();
  };
  const placed = ({ left, top, width: w, height: h }) => ({
    left: `${left}px`,
    top: `${top}px`,
    width: `${w}px`,
    height: `${h}px`,
  });
  const label =
    `${hookTitle(hook)}: ${grid.columns} tokens by ${grid.layers.length} layers. ` +
    `Arrow keys move between cells${CLOSER[Boolean(look)]}.`;
  return html`
    <figure class="map">
      <figcaption>${hookName(hook)} <code>${hookCode(hook)}</code></figcaption>
      <div
        class="cells"
        data-hook=${hook}
        role="application"
        aria-roledescription="heatmap"
        aria-label=${label}
        tabindex="0"
        onKeyDown=${key}
        onFocus=${() => here || setCursor({ hook, row: 0, column: 0 })}
      >
        <canvas
          ref=${canvas}
          onPointerMove=${move}
          onPointerDown=${down}
          onPointerUp=${up}
          onPointerLeave=${() => setTip(null)}
        ></canvas>
        ${
          here &&
          map.current &&
          html`<div class="cursor" style=${placed(map.current.box(here.column, here.row))}></div>`
        }
        ${
          grid.marks &&
          map.current &&
          grid
            .marks(pair, hook)
            .map(
              ({ row, column }) =>
                html`<div class="mark" style=${placed(map.current.box(column, row))}></div>`,
            )
        }
        ${
          own &&
          map.current &&
          html`
            <div
              class="part"
              style=${placed(
                map.current.box(
                  own.columns[0],
                  own.rows[0],
                  own.columns[1] - own.columns[0] + 1,
                  own.rows[1] - own.rows[0] + 1,
                ),
              )}
            ></div>
          `
        }
        ${
          tip &&
          html`
            <div
              class="tip"
              aria-hidden="true"
              style=${{ left: `${Math.max(0, Math.min(tip.x + 12, width - 200))}px`, top: `${tip.y + 14}px` }}
            >
              ${grid.words(pair, hook, tip.row, tip.column)}
            </div>
          `
        }
      </div>
    </figure>
  `;
}

function Scale({ grid, pair, listeners }) {
  const canvas = useRef(null);
  const [, setLimits] = useState(grid.limits(pair));
  const dark = useDark();
  useEffect(
    () => drawScale(canvas.current.getContext("2d"), 0, 0, canvas.current.width, canvas.current.height),
    [dark],
  );
  useEffect(() => {
    setLimits(grid.limits(pair));
    const news = () =>
      setLimits((known) => (known.join() === grid.limits(pair).join() ? known : grid.limits(pair)));
    listeners.add(news);
    return () => listeners.delete(news);
  }, [grid, pair]);
  const noise = grid.noise(pair);
  const {
    ends: [low, high],
    text,
  } = grid.legend(pair);
  return html`
    <div class="scale">
      <span>${low}</span>
      <canvas
        ref=${canvas}
        width="220"
        height="12"
        role="img"
        aria-label=${`Colours from ${low} (blue) through neutral to ${high} (red)`}
      ></canvas>
      <span>${high}</span>
      <span>${text}; hatched: no value${noise ? `; noise ${noise.text}` : ""}</span>
    </div>
  `;
}

/** The same numbers for those who read tables. */
function Table({ grid, pair, over }) {
  const [hook, setHook] = useState(grid.hooks[0]);
  const second = Math.floor(useNow(1));
  const names = grid.names(pair);
  const text = (row, column) => {
    const cell = grid.at(pair, hook, row, column);
    return cell.state === "value"
      ? shown(cell.value)
      : cell.state === "none"
        ? html`<span title=${cell.reason}>none</span>`
        : "…";
  };
  const body = useMemo(
    () =>
      names.map(
        (name, column) => html`
          <tr>
            <th scope="row">${name}</th>
            ${grid.layers.map((_, row) => html`<td>${text(row, column)}</td>`)}
          </tr>
        `,
      ),
    [grid, pair, hook, over ? grid.known : second],
  );
  return html`
    ${
      grid.hooks.length > 1 &&
      html`
        <p>
          <label>
            Hook point <select
              data-field="table-hook"
              value=${hook}
              onChange=${(event) => setHook(event.target.value)}
            >
              ${grid.hooks.map((name) => html`<option value=${name}>${hookTitle(name)}</option>`)}
            </select>
          </label>
        </p>
      `
    }
    <div class="grid-table" role="region" tabindex="0" aria-label=${`Values at ${hookTitle(hook)}`}>
      <table data-hook=${hook}>
        <caption>${MEANING[grid.metric]} at ${hookTitle(hook)}, tokens by layers; “…”: pending</caption>
        <thead>
          <tr>
            <th scope="col">token</th>
            ${grid.layers.map((layer) => html`<th scope="col">${layer}</th>`)}
          </tr>
        </thead>
        <tbody>${body}</tbody>
      </table>
    </div>
  `;
}

const REASONS = 8;

export function Missing({ grid }) {
  const counts = new Map();
  for (const reason of grid.reasons.values()) counts.set(reason, (counts.get(reason) || 0) + 1);
  if (!counts.size) return null;
  const sorted = [...counts].sort((a, b) => b[1] - a[1]);
  return html`
    <details class="missing">
      <summary>${count(grid.reasons.size, "cell")} without a value</summary>
      <ul>
        ${sorted
          .slice(0, REASONS)
          .map(([reason, count]) => html`<li>${number(count)}: <${Coded} text=${reason} /></li>`)}
        ${sorted.length > REASONS && html`<li>… and ${sorted.length - REASONS} other reasons</li>`}
      </ul>
    </details>
  `;
}

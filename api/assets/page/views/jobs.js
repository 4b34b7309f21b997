// Jobs: the live table, and what is known of one job.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState, Button, Empty, Problem, Progress, useNow } from "../lib/ui.js";
import { post } from "../lib/api.js";
import { age, duration } from "../lib/format.js";
import { ENDED } from "../lib/jobs.js";
import { Rows } from "../lib/table.js";
import { JobDetails } from "./job.js";

const STATES = ["queued", "running", "cancelling", "succeeded", "failed", "cancelled", "aborted", "expired"];
const KINDS = ["generate", "completion", "chat", "sweep", "harvest"];

const owner = (job) => job.tenant || "default";
const tagOf = (job) => (job.tags && job.tags.length ? job.tags.join(", ") : (job.metadata && job.metadata.tag) || job.run || "");

/** [done, total, words] of a job; null where nothing is counted. */
export function progressOf(job) {
  if (job.cells_expected) return [job.cells || 0, job.cells_expected, `sweep ${job.cells || 0}/${job.cells_expected}`];
  if (job.receipts_expected && job.generated) return [job.receipts || 0, job.receipts_expected, `receipts ${job.receipts || 0}/${job.receipts_expected}`];
  return null;
}

/** Seconds that a sweep will still take, by its speed so far; null where that is not known. */
export function timeLeft(job, now) {
  if (job.state !== "running" || !job.cells_expected || !job.cells || !job.started) return null;
  return ((now - job.started) / job.cells) * (job.cells_expected - job.cells);
}

export default function View({ params, session, jobs }) {
  const [, redraw] = useState(0);
  const [filter, setFilter] = useState({ state: "", kind: "", text: "" });
  const [error, setError] = useState(null);
  const now = useNow(1);
  useEffect(() => jobs.subscribe(() => redraw((n) => n + 1)), [jobs]);
  const items = useMemo(() => {
    const text = filter.text.trim().toLowerCase();
    return jobs.list.filter(
      (job) =>
        (!filter.state || job.state === filter.state) &&
        (!filter.kind || job.kind === filter.kind) &&
        (!text || `${job.id} ${tagOf(job)} ${owner(job)} ${job.model} ${Object.values(job.metadata || {}).join(" ")}`.toLowerCase().includes(text)),
    );
  }, [jobs.revision, filter]);

  const opened = params[0] || null;
  const left = useRef(null); // the job whose details were shown: its row gets the focus when they are gone, and rows are there on a phone too
  useLayoutEffect(() => {
    if (opened) return void (left.current = opened);
    const row = left.current && document.querySelector(`tr[data-id="${CSS.escape(left.current)}"]`);
    if (row) row.focus();
    if (row || document.activeElement !== document.body) left.current = null; // otherwise the feed has yet to bring the row
  }, [opened, items]);
  const open = (job) => (location.hash = `#/jobs/${job.id}`);
  const close = () => (location.hash = "#/jobs");
  const may = session.scopes.includes("submit") || session.scopes.includes("admin");
  const cancel = async (job) => {
    setError(null);
    await post(`/v1/jobs/${job.id}/cancel`);
  };
  const columns = [
    { name: "age", title: "Age", cell: (job) => age(job.created, now) },
    { name: "owner", title: "Owner", cell: owner },
    { name: "kind", title: "Kind", cell: (job) => job.kind },
    { name: "tag", title: "Tag", cell: tagOf },
    { name: "state", title: "State", cell: (job) => html`<span class=${`state ${job.state}`}>${job.state}</span>` },
    {
      name: "progress",
      title: "Progress",
      cell: (job) => {
        const found = progressOf(job);
        return found ? html`<${Progress} value=${found[0]} total=${found[1]} label=${found[2]} />` : job.prompts ? `${job.prompts} prompt${job.prompts > 1 ? "s" : ""}` : "";
      },
    },
    {
      name: "left",
      title: "Time left",
      cell: (job) => {
        if (ENDED.has(job.state) || job.state === "cancelled") return job.finished && job.started ? `took ${duration(job.finished - job.started)}` : "";
        const left = timeLeft(job, now);
        return left === null ? "" : duration(left);
      },
    },
    {
      name: "cancel",
      title: html`<span class="visually-hidden">Cancel</span>`,
      cell: (job) =>
        may && (job.state === "queued" || job.state === "running") && html`<${Button} kind="small" aria-label=${`Cancel ${job.id}`} onClick=${() => cancel(job)} onError=${setError}>Cancel<//>`,
    },
  ];
  const change = (name) => (event) => setFilter({ ...filter, [name]: event.target.value });
  return html`<h1>Jobs</h1>
    <form class="filters" onSubmit=${(event) => event.preventDefault()}>
      <label>State <select value=${filter.state} onChange=${change("state")}><option value="">all</option>${STATES.map((name) => html`<option value=${name}>${name}</option>`)}</select></label>
      <label>Kind <select value=${filter.kind} onChange=${change("kind")}><option value="">all</option>${KINDS.map((name) => html`<option value=${name}>${name}</option>`)}</select></label>
      <label>Find <input type="search" placeholder="id, tag, owner" maxlength="200" value=${filter.text} onInput=${change("text")} /></label>
      <span role="status">${items.length} of ${jobs.list.length} jobs</span>
    </form>
    <${Problem} error=${error} />
    <div class=${opened ? "split" : ""}>
      ${items.length ? html`<${Rows} label="Jobs" columns=${columns} items=${items} active=${opened} onOpen=${open} />` : html`<${Empty}>${jobs.loaded ? "No jobs." : "Loading …"}<//>`}
      ${opened && html`<${JobDetails} key=${opened} id=${opened} job=${jobs.byId.get(opened)} session=${session} onClose=${close} />`}
    </div>`;
}

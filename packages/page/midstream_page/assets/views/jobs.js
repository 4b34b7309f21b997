// Jobs: the live table of jobs by prompt and output, and what is known of one job.

import {
  html,
  useLayoutEffect,
  useMemo,
  useRef,
  useState,
  Button,
  Problem,
  Progress,
  useNow,
} from "../lib/ui.js";
import { post } from "../lib/api.js";
import { age, clock, duration } from "../lib/format.js";
import { askedOf, markOf, outcomeOf, over, owner, progressOf, tagOf, timing, titleOf } from "../lib/jobs.js";
import { KINDS } from "../lib/kinds.js";
import { EmptyState, State } from "../lib/parts.js";
import { useJobs } from "../lib/ask.js";
import { Rows } from "../lib/table.js";
import { JobDetails } from "./job.js";

const STATES = ["queued", "running", "cancelling", "succeeded", "failed", "cancelled", "aborted", "expired"];

const BARS = 60;
const LEAST_S = 600; // that the axis spans
const NO_JOBS =
  "Whatever you send from this page, from Python or from an OpenAI client is listed here while it runs " +
  "and afterwards.";

/** The text in which the filter looks. */
const searched = (job) =>
  [
    job.id,
    job.prompt || "",
    job.output || "",
    tagOf(job),
    owner(job),
    ...Object.entries(job.triggered || {}).flatMap(([policy, acted]) => [
      policy,
      "triggered",
      acted ? "acted" : "only recorded",
    ]),
    job.flagged ? "flagged" : "",
    job.model,
    ...Object.values(job.metadata || {}),
  ].join(" ");

/**
 * When the jobs of the table were sent: a bar for each part of the time from the oldest until now,
 * with its ends.
 */
function Strip({ jobs, now }) {
  const from = Math.min(jobs[jobs.length - 1].created, now - LEAST_S);
  const bars = Array.from({ length: BARS }, () => ({ succeeded: 0, failed: 0, others: 0 }));
  for (const job of jobs)
    bars[Math.min(BARS - 1, Math.max(0, Math.floor(((job.created - from) / (now - from)) * BARS)))][
      job.state === "succeeded" ? "succeeded" : over(job) ? "failed" : "others"
    ] += 1;
  const most = Math.max(...bars.map((bar) => bar.succeeded + bar.failed + bar.others));
  const step = duration((now - from) / BARS);
  const label = `${jobs.length} jobs from ${clock(from, now)} until now, at most ${most} in ${step}`;
  return html`
    <div class="strip">
      <span>${clock(from, now)}</span>
      <svg viewBox=${`0 0 ${BARS} 1`} preserveAspectRatio="none" role="img" aria-label=${label}>
        ${bars.flatMap((bar, x) => {
          let top = 1;
          return Object.entries(bar)
            .filter(([, jobs]) => jobs)
            .map(
              ([name, jobs]) => html`
                <rect
                  class=${name}
                  x=${x + 0.1}
                  y=${(top -= jobs / most)}
                  width="0.8"
                  height=${jobs / most}
                />
              `,
            );
        })}
      </svg>
      <span>now</span>
    </div>
  `;
}

export default function View({ params, session, jobs }) {
  const [filter, setFilter] = useState({ state: "", kind: "", text: "" });
  const [error, setError] = useState(null);
  const [marked, setMarked] = useState([]); // at most two, to be compared
  const now = useNow(1);
  useJobs(jobs);
  const items = useMemo(() => {
    const text = filter.text.trim().toLowerCase();
    return jobs.list.filter(
      (job) =>
        (!filter.state || job.state === filter.state) &&
        (!filter.kind || job.kind === filter.kind) &&
        (!text || searched(job).toLowerCase().includes(text)),
    );
  }, [jobs.revision, filter]);

  const opened = params[0] || null;
  // the job whose details were shown: its row gets the focus when they are gone, and rows are there on
  // a phone too
  const left = useRef(null);
  useLayoutEffect(() => {
    if (opened) return void (left.current = opened);
    const row = left.current && document.querySelector(`tr[data-id="${CSS.escape(left.current)}"]`);
    if (row) row.focus();
    // otherwise the feed has yet to bring the row
    if (row || document.activeElement !== document.body) left.current = null;
  }, [opened, items]);
  const open = (job) => (location.hash = `#/jobs/${job.id}`);
  const close = () => (location.hash = "#/jobs");
  const may = session.scopes.includes("submit") || session.scopes.includes("admin");
  const cancel = async (job) => {
    setError(null);
    await post(`/v1/jobs/${job.id}/cancel`);
  };
  const mark = (id) =>
    setMarked((known) =>
      known.includes(id) ? known.filter((other) => other !== id) : [...known, id].slice(-2),
    );
  const columns = [
    {
      name: "mark",
      title: html`<span class="visually-hidden">Compare</span>`,
      cell: (job) => html`
        <input
          type="checkbox"
          aria-label=${`Compare ${titleOf(job)}`}
          checked=${marked.includes(job.id)}
          onChange=${() => mark(job.id)}
        />
      `,
    },
    {
      name: "run",
      title: "Prompt",
      cell: (job) => html`
        <strong>${titleOf(job)}</strong>
        <small>${[askedOf(job), markOf(job, jobs)].filter(Boolean).join(" · ")}</small>
      `,
    },
    {
      name: "output",
      title: "Output",
      cell: (job) =>
        html`<span class=${job.error ? "bad" : ""} title=${outcomeOf(job)}>${outcomeOf(job)}</span>`,
    },
    {
      name: "state",
      title: "State",
      cell: (job) => {
        const found = progressOf(job);
        const told = timing(job, now);
        return html`
          <${State} state=${job.state} /> ${
            may &&
            (job.state === "queued" || job.state === "running") &&
            html`
              <${Button}
                kind="small quiet"
                aria-label=${`Cancel ${titleOf(job)}`}
                onClick=${() => cancel(job)}
                onError=${setError}
              >
                Cancel
              <//> `
          }
          ${found && html`<${Progress} value=${found[0]} total=${found[1]} label=${found[2]} />`}
          <small title=${told}>
            ${told}
            <span class="narrow">${told && " · "}${age(job.created, now)} ago</span>
          </small>
        `;
      },
    },
    {
      name: "age",
      title: "Age",
      cell: (job) => html`${age(job.created, now)}<small>${clock(job.created, now)}</small>`,
    },
  ];
  const change = (name) => (event) => setFilter({ ...filter, [name]: event.target.value });
  const nothing = jobs.list.length
    ? html`<${EmptyState} title="No job matches." text="Change the filters above." />`
    : html`
        <${EmptyState} title="No jobs yet." text=${NO_JOBS}>
          <a class="button main" href="#/start">Try an example</a>
        <//>
      `;
  return html`
    <h1>Jobs</h1>
    <form class="filters" onSubmit=${(event) => event.preventDefault()}>
      <label>
        Find <input
          type="search"
          placeholder="prompt, output, tag, policy, id"
          maxlength="200"
          value=${filter.text}
          onInput=${change("text")}
        />
      </label>
      <label>
        State <select value=${filter.state} onChange=${change("state")}>
          <option value="">all</option>
          ${STATES.map((name) => html`<option value=${name}>${name}</option>`)}
        </select>
      </label>
      <label>
        Kind <select value=${filter.kind} onChange=${change("kind")}>
          <option value="">all</option>
          ${Object.keys(KINDS).map((name) => html`<option value=${name}>${name}</option>`)}
        </select>
      </label>
      <span class="soft" role="status">
        ${items.length} of ${jobs.list.length} jobs
        ${marked.length === 1 ? "; mark another one to compare both" : ""}
      </span>
      ${
        marked.length === 2 &&
        html`<a class="button small" href=${`#/compare/${marked.join("/")}`}>Compare both</a>`
      }
    </form>
    <${Problem} error=${error} />
    ${items.length > 0 && !opened && html`<${Strip} jobs=${items} now=${now} />`}
    <div class=${opened ? "split" : ""}>
      ${
        items.length
          ? html`<${Rows} label="Jobs" columns=${columns} items=${items} active=${opened} onOpen=${open} />`
          : jobs.loaded
            ? nothing
            : html`<p class="soft">Loading …</p>`
      }
      ${
        opened &&
        html`
          <${JobDetails}
            key=${opened}
            id=${opened}
            job=${jobs.byId.get(opened)}
            session=${session}
            onClose=${close}
          />
        `
      }
    </div>
  `;
}

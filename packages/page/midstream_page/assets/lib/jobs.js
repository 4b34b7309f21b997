// The jobs that the feed has brought, newest first; views subscribe.

import { duration } from "./format.js";
import { kindOf } from "./kinds.js";

export const ENDED = new Set(["succeeded", "failed", "aborted", "expired"]);
const MOST = 20000; // in a page that stays open for weeks

export class JobStore {
  constructor() {
    this.byId = new Map();
    this.order = [];
    this.listeners = new Set();
    this.varied = new Map(); // what `differ` answered for this order
    this.stale = false;
    this.loaded = false;
    this.revision = 0;
  }

  /** One `jobs` event. */
  take({ jobs, first, more }) {
    if (first) this.byId = new Map();
    for (const job of jobs) {
      const known = this.byId.get(job.id);
      if (!known || job.version >= known.version) this.byId.set(job.id, job);
    }
    this.stale = true;
    this.loaded = !more;
    this.revision += 1;
    for (const listener of this.listeners) listener();
  }

  get list() {
    if (this.stale) {
      this.order = [...this.byId.values()].sort((a, b) => b.created - a.created || (a.id < b.id ? 1 : -1));
      for (const job of this.order.splice(MOST)) this.byId.delete(job.id);
      this.stale = false;
      this.varied.clear();
    }
    return this.order;
  }

  /** Whether jobs here have different values of `of`. */
  differ(of) {
    const { list } = this;
    if (!this.varied.has(of))
      this.varied.set(
        of,
        list.some((job) => of(job) !== of(list[0])),
      );
    return this.varied.get(of);
  }

  subscribe(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }
}

export const owner = (job) => job.tenant || "default";
const modelOf = (job) => job.model;
export const over = (job) => ENDED.has(job.state) || job.state === "cancelled";
const UNNAMED = "default"; // tag and owner of whoever gives none: it tells nothing
export const tagOf = (job) =>
  !kindOf(job.kind).grid && job.tags && job.tags.length
    ? job.tags.filter((tag) => tag !== UNNAMED).join(", ")
    : (job.metadata && job.metadata.tag) || job.run || "";

// owner of jobs that nobody sent → what they are for
const OURS = { "gradient-worker": "Check of the gradient worker" };
/** Parts of a harvest name it in their metadata; users send surveys. */
export const isSurvey = (job) => job.kind === "harvest" && !(job.metadata && job.metadata.harvest);

/**
 * What tells it from others of the same prompt in `jobs`: how it was read and edited, its tag, whose
 * it is, its model.
 */
export const markOf = (job, jobs) => {
  const edits = [...Object.keys(job.modules || {}), ...(job.lora ? [job.lora.name] : [])].join(" + ");
  return [
    ...new Set([
      (job.metadata && job.metadata.page) || (isSurvey(job) ? "survey" : job.kind),
      edits ? `with ${edits}` : job.steered && "steered",
      tagOf(job),
      jobs.differ(owner) && owner(job) !== UNNAMED && owner(job),
      jobs.differ(modelOf) && job.model,
      job.prompts > 1 && `${job.prompts} prompts`,
    ]),
  ]
    .filter(Boolean)
    .join(" · ");
};

/** What people call it: its `name` in the metadata, else what was asked. */
export const titleOf = (job) =>
  (job.metadata && job.metadata.name) ||
  (job.prompt || "").trim() ||
  OURS[owner(job)] ||
  tagOf(job) ||
  (job.kind === "harvest" ? `${isSurvey(job) ? "Survey" : "Part"} of a harvest` : `${job.kind} of token ids`);

/** What was asked, where it is called otherwise. */
export const askedOf = (job) => (job.metadata && job.metadata.name && job.prompt ? job.prompt : "");

/** What came of it, or why nothing did. */
export const outcomeOf = (job) =>
  job.error
    ? job.error.detail
    : job.output ||
      (over(job) && job.cells_expected ? `${job.cells || 0} of ${job.cells_expected} cells` : "");

/** Views of readings, which name themselves in the metadata of the jobs that they submit. */
const READINGS = new Set(["lens", "attention", "features", "probes"]);

/** The view that shows it best. */
export const placeOf = (job) =>
  job.metadata && READINGS.has(job.metadata.page)
    ? `#/${job.metadata.page}/${job.id}`
    : kindOf(job.kind).grid
      ? `#/${job.kind}/${job.id}`
      : job.tags && job.tags.length
        ? `#/capture/${job.id}`
        : `#/jobs/${job.id}`;

/** [done, total, words] of a job under way; null where nothing is counted. */
export function progressOf(job) {
  if (over(job)) return null;
  if (job.cells_expected)
    return [job.cells || 0, job.cells_expected, `${job.cells || 0} of ${job.cells_expected} cells`];
  if (job.receipts_expected && job.generated) return [job.receipts || 0, job.receipts_expected, "checking"];
  return null;
}

/** Seconds that a sweep will still take, by its speed so far; null where that is not known. */
export function timeLeft(job, now) {
  if (job.state !== "running" || !job.cells_expected || !job.cells || !job.started) return null;
  return ((now - job.started) / job.cells) * (job.cells_expected - job.cells);
}

const SUCH = 5; // jobs whose time one's own is expected to take

/** The median seconds that the latest jobs like it ran; null: none has. */
export function usual(job, jobs) {
  const pageOf = (each) => each.metadata && each.metadata.page;
  const such = jobs.list.filter(
    (each) =>
      each.state === "succeeded" &&
      each.started &&
      each.kind === job.kind &&
      each.model === job.model &&
      pageOf(each) === pageOf(job),
  );
  const took = such
    .slice(0, SUCH)
    .map((each) => each.finished - each.started)
    .sort((a, b) => a - b);
  return took.length ? took[took.length >> 1] : null;
}

/** How many of the jobs that are known here were sent before it to its model, and wait too. */
export const before = (job, jobs) =>
  jobs.list.filter(
    (each) => each.state === "queued" && each.model === job.model && each.created < job.created,
  ).length;

/** How long, how much longer, which attempt and why: for a job at hand. */
export function timing(job, now) {
  if (over(job)) return job.finished && job.started ? `took ${duration(job.finished - job.started)}` : "";
  const left = timeLeft(job, now);
  const attempt = job.retry_reason
    ? `attempt ${job.state === "queued" ? job.attempt + 1 : job.attempt}: ${job.retry_reason}`
    : ""; // attempts count hand-overs between queues too
  return [left === null ? "" : `about ${duration(left)} left`, attempt].filter(Boolean).join(" · ");
}

// What the service's figures were in the last hour, of which the API brings what was before the page
// was opened.

import { kindOf } from "./kinds.js";

const HOUR_S = 3600;
const STEP_S = 10; // between two points, but for the last one
const BUCKET_S = 60;

export class History {
  constructor() {
    this.points = []; // {at, tokens_s, queued}
  }

  /** The `history` event. */
  begin({ points }) {
    this.points = points.map(([at, tokens_s, queued]) => ({ at, tokens_s, queued }));
  }

  /** One `service` event. */
  take({ at, tokens_s = null, queued = null }) {
    const [before, last] = this.points.slice(-2);
    if (last && last.at - before.at < STEP_S) this.points.pop();
    this.points = [...this.points.filter((point) => point.at > at - HOUR_S), { at, tokens_s, queued }];
  }

  /** [[at, value], …] of one figure. */
  of(name) {
    return this.points.map((point) => [point.at, point[name]]);
  }
}

function median(values) {
  const sorted = values.sort((a, b) => a - b);
  return (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2;
}

/**
 * The median seconds from submission to end of the jobs that ended in each of the last `minutes`:
 * [[at, seconds or null], …].
 */
export function latencies(jobs, now, minutes) {
  const buckets = Array.from({ length: minutes }, () => []);
  for (const job of jobs) {
    const ago = Math.floor((now - (job.finished || 0)) / BUCKET_S);
    if (job.state === "succeeded" && !kindOf(job.kind).slow && ago >= 0 && ago < minutes)
      buckets[minutes - 1 - ago].push(job.finished - job.created);
  }
  return buckets.map((found, n) => [now - (minutes - 1 - n) * BUCKET_S, found.length ? median(found) : null]);
}

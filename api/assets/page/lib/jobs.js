// The jobs that the feed has brought, newest first; views subscribe.

export const ENDED = new Set(["succeeded", "failed", "aborted", "expired"]);
const MOST = 20000; // in a page that stays open for weeks

export class JobStore {
  constructor() {
    this.byId = new Map();
    this.order = [];
    this.listeners = new Set();
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
    }
    return this.order;
  }

  subscribe(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }
}

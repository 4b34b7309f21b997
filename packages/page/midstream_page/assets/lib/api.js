// Calls of the API: JSON in and out, errors as ApiError, server-sent events over fetch (so that POST
// streams work too).

export class ApiError extends Error {
  constructor(status, problem, retryAfter) {
    const field = problem.field ? `${problem.field}: ` : "";
    const allowed = problem.allowed ? ` (${problem.allowed})` : "";
    const hint = problem.hint ? `; ${problem.hint}` : "";
    super(`${field}${problem.detail || problem.title || `HTTP ${status}`}${hint}${allowed}`);
    this.status = status;
    this.code = (problem.type || "").split(":").pop() || "unknown";
    this.detail = `${problem.detail || ""}${hint}`;
    this.field = problem.field || null;
    this.allowed = problem.allowed || null;
    this.retryAfter = retryAfter;
  }
}

let csrf = "";
let onSessionEnd = () => {};

/** The token that calls carry from now on, and what to do when the session ends. */
export function useSession(token, ended) {
  csrf = token;
  onSessionEnd = ended;
}

const LATE_MS = 5000;
let late = 0; // calls without an answer for so long
let onLate = () => {};

/** Has `told` called with the number of calls that are late, whenever it changes. */
export const watchLate = (told) => void (onLate = told);

function failed(status, problem, retryAfter = null) {
  const error = new ApiError(status, problem, retryAfter);
  if (status === 401) onSessionEnd(error);
  return error;
}

async function call(method, path, body, signal, more = {}) {
  const headers = { accept: "application/json", "x-midstream-csrf": csrf, ...more };
  if (body !== undefined) headers["content-type"] = "application/json";
  const slow = method !== "GET" || path.includes("wait="); // may take its time
  let [answer, isLate] = [null, 0];
  const timer = setTimeout(() => slow || onLate((late += isLate = 1)), LATE_MS);
  try {
    answer = await fetch(path, {
      method,
      headers,
      signal,
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "same-origin",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(
      0,
      { type: "urn:midstream:unreachable", detail: "the API cannot be reached; is it running?" },
      2,
    );
  } finally {
    clearTimeout(timer);
    if (isLate) onLate((late -= 1));
  }
  if (!answer.ok) throw await problemOf(answer);
  return answer;
}

async function problemOf(answer) {
  const wait = Number(answer.headers.get("retry-after")) || null;
  let problem = {};
  try {
    problem = await answer.json();
  } catch {
    problem = { detail: `the API answered ${answer.status}` };
  }
  return failed(answer.status, problem, wait);
}

const parsed = async (answer) => (answer.status === 204 ? null : answer.json());

export const get = async (path, { signal } = {}) => parsed(await call("GET", path, undefined, signal));
export const post = async (path, body = {}, { signal, headers } = {}) =>
  parsed(await call("POST", path, body, signal, headers));
export const put = async (path, body = {}, { signal } = {}) => parsed(await call("PUT", path, body, signal));
export const patch = async (path, body = {}, { signal } = {}) =>
  parsed(await call("PATCH", path, body, signal));
export const del = async (path, { signal } = {}) => parsed(await call("DELETE", path, undefined, signal));
/** The answer itself, for bytes: `(await raw(path)).arrayBuffer()`. */
export const raw = (path, { method = "GET", body, signal } = {}) => call(method, path, body, signal);

/** Splits a stream of bytes, cut anywhere, into events {event, data, id}; `data` is text. */
export class EventParser {
  constructor() {
    this.decoder = new TextDecoder();
    this.text = "";
    this.retry = 0; // seconds that the server wants a client to wait before it connects again
    this.reset();
  }

  reset() {
    this.event = "";
    this.id = null;
    this.lines = [];
  }

  push(bytes) {
    this.text += this.decoder.decode(bytes, { stream: true });
    const found = [];
    for (;;) {
      const end = this.text.search(/\r\n|\n|\r(?!$)/); // a \r at the end may be half of \r\n
      if (end < 0) return found;
      const line = this.text.slice(0, end);
      this.text = this.text.slice(end + (this.text.startsWith("\r\n", end) ? 2 : 1));
      if (line === "") {
        if (this.lines.length)
          found.push({ event: this.event || "message", data: this.lines.join("\n"), id: this.id });
        this.reset();
      } else if (!line.startsWith(":")) {
        const colon = line.indexOf(":");
        const name = colon < 0 ? line : line.slice(0, colon);
        const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
        if (name === "data") this.lines.push(value);
        else if (name === "event") this.event = value;
        else if (name === "id") this.id = value;
        else if (name === "retry") this.retry = Number(value) / 1000 || 0;
      }
    }
  }
}

let away = new AbortController(); // aborts when the page is hidden or left
document.addEventListener("visibilitychange", () =>
  document.hidden ? away.abort() : (away = new AbortController()),
);

/**
 * Once the page is seen, a signal for what keeps a connection, of which a browser has six to a host:
 * it aborts with `signal`, and when the page is hidden.
 */
export async function whileSeen(signal) {
  const awaited = (target, event) =>
    new Promise((resolve) => target.addEventListener(event, resolve, { once: true }));
  if (document.hidden) await Promise.race([awaited(document, "visibilitychange"), awaited(signal, "abort")]);
  return AbortSignal.any([signal, away.signal]);
}

const MAX_BACKOFF_S = 10;

/** Ends after `seconds`, or when `signal` aborts. */
export const pause = (seconds, signal) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, seconds * 1000);
    if (signal) signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });

/**
 * Reads server-sent events: `onEvent({event, data, id})`, `data` parsed as JSON where it is JSON.
 * Resolves at the stream's end, at `[DONE]`, and when `signal` aborts; throws ApiError for a refusal
 * and for an `error` event. `reconnect`: connect again with growing pauses when the connection is
 * lost or ends (for feeds without end), from the last id; `onState(connected, error, answer)` says
 * which; `answer` has the headers of the one that opened the stream. `after`: the id of the last
 * event that is known.
 */
export async function sse(
  path,
  { method = "GET", body, onEvent, signal, reconnect = false, after = null, onState = () => {} },
) {
  let last = after;
  let wait = 0.5;
  for (;;) {
    const held = reconnect ? await whileSeen(signal) : signal;
    try {
      const answer = await call(method, path, body, held, {
        accept: "text/event-stream",
        ...(last ? { "last-event-id": last } : {}),
      });
      if (answer.status === 204) return;
      onState(true, null, answer);
      const reader = answer.body.getReader();
      const parser = new EventParser();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        const events = parser.push(value);
        wait = parser.retry || 0.5;
        for (const found of events) {
          if (found.id) last = found.id;
          if (found.data === "[DONE]") return;
          let data = found.data;
          try {
            data = JSON.parse(data);
          } catch {
            // text
          }
          if (found.event === "error" || (data && data.error)) {
            const problem =
              found.event === "error"
                ? data
                : data.error.detail
                  ? data.error
                  : { detail: data.error.message, field: data.error.param };
            throw failed(problem.status || 500, problem);
          }
          onEvent({ ...found, data });
        }
      }
      if (!reconnect) return;
    } catch (error) {
      if (signal && signal.aborted) return;
      if (held && held.aborted) continue; // the page was hidden
      const passing = !(error instanceof ApiError) || [0, 429, 503].includes(error.status);
      if (!reconnect || !passing) {
        if (error instanceof ApiError) throw error;
        throw new ApiError(0, { type: "urn:midstream:unreachable", detail: "the connection was lost" }, 2);
      }
      wait = Math.max(wait, error.retryAfter || 0);
    }
    onState(false, null);
    await pause(wait * (1 + Math.random() / 2), signal); // never sooner than the server wants
    if (signal && signal.aborted) return;
    wait = Math.min(wait * 2, MAX_BACKOFF_S);
  }
}

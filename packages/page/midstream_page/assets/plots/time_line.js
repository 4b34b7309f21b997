// A job's time line: its wait, each prompt's prefill and decode, and the receipts by which its files
// are durable.

import { sse } from "../lib/api.js";
import { html, useState, useTask } from "../lib/ui.js";
import { count, duration } from "../lib/format.js";
import { kindOf } from "../lib/kinds.js";

const MOST = 16; // prompts

/**
 * The events of an ended job's last attempt, each with its time in seconds; null until they are there.
 * A grid's are too many.
 */
function useEvents(job) {
  const [found, set] = useState(kindOf(job.kind).grid ? [] : null);
  useTask((signal) => {
    if (found) return;
    const events = [];
    sse(`/v1/jobs/${encodeURIComponent(job.id)}/events`, {
      signal,
      onEvent: ({ event, data, id }) => events.push({ ...data, event, at: parseInt(id, 10) / 1000 }),
    })
      .catch(() => {}) // trimmed since: without them
      .then(() => signal.aborted || set(events.filter(({ attempt }) => attempt === job.attempt)));
  }, []);
  return found;
}

/**
 * `job`: one that has ended. Clocks of several machines may differ by some milliseconds, so nothing
 * begins before what it follows.
 */
export function TimeLine({ job }) {
  const events = useEvents(job);
  if (!events) return null;
  const from = job.created;
  const to = Math.max(job.finished, from + 1e-3);
  const of = (kind) => events.filter(({ event }) => event === kind);
  const bar = (tone, begin, end) => ({
    tone,
    begin: Math.min(to, Math.max(from, begin)),
    end: Math.min(to, Math.max(from, begin, end)),
  });
  const long = ({ begin, end }) => duration(end - begin);
  const handed =
    // to the vLLM workers, by a worker that estimates
    kindOf(job.kind).grid && kindOf(job.kind).queue && !job.retry_reason && job.queued ? job.queued : from;
  const [estimates, wait] = [bar("2", from, handed), bar("soft", handed, job.started)];
  const prompts = of("output")
    .sort((a, b) => a.index - b.index)
    .map(({ index, at, first_token: first }) => {
      const [prefill, decode] = [bar("1", job.started, first ?? at), bar("2", first ?? at, at)];
      return {
        name: `Prompt ${index}`,
        bars: [prefill, decode],
        said: first
          ? `first token after ${long(prefill)}, the others in ${long(decode)}`
          : `no token, in ${long(prefill)}`,
      };
    });
  const generated =
    job.generated || (prompts.length ? Math.max(...of("output").map(({ at }) => at)) : job.finished);
  const receipts = of("receipt");
  const after = bar("3", generated, job.finished);
  const filed = !["", "not_requested"].includes(job.capture_status || "");
  const since = `${long(after)} after the last token`;
  const rows = [
    ...(handed > from
      ? [
          {
            name: "Estimates",
            bars: [estimates],
            said: `done after ${long(estimates)}, with the wait for the gradient worker`,
          },
        ]
      : []),
    { name: "Queue", bars: [wait], said: `waited ${long(wait)}` },
    ...(prompts.length
      ? prompts.slice(0, MOST)
      : [
          {
            name: "Run",
            bars: [bar("1", job.started, generated)],
            said: `ran for ${long(bar("1", job.started, generated))}`,
          },
        ]),
    {
      name: "Receipts",
      bars: [after, ...receipts.map(({ at }) => bar("3", at, at))],
      said: receipts.length
        ? `${count(receipts.length, "receipt")}; ${filed ? "files durable" : "complete"} ${since}`
        : `stored ${since}`,
    },
  ];
  return html`
    <ol class="time-line" aria-label=${`Time line of ${duration(to - from)}`}>
      ${rows.map(
        ({ name, bars, said }) => html`
          <li key=${name}>
            <span>${name}</span>
            <span class="track" aria-hidden="true">
              ${bars.map(
                ({ tone, begin, end }) => html`
                  <i
                    class=${`tone-${tone}`}
                    style=${{
                      left: `${(100 * (begin - from)) / (to - from)}%`,
                      width: `${(100 * (end - begin)) / (to - from)}%`,
                    }}
                  ></i>
                `,
              )}
            </span>
            <small>${said}</small>
          </li>
        `,
      )}
    </ol>
    ${prompts.length > MOST && html`<p class="soft">… and ${count(prompts.length - MOST, "more prompt")}</p>`}
  `;
}

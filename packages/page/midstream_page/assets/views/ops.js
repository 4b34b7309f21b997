// Ops: what every rank of every worker reports, outboxes, queues, the slowest jobs.

import { Coded, html, Empty, Problem, useNow } from "../lib/ui.js";
import { latencies } from "../lib/history.js";
import { owner, titleOf } from "../lib/jobs.js";
import { Chart, Fold, State, Stats, Table } from "../lib/parts.js";
import { useJobs, usePolled } from "../lib/ask.js";
import { age, bytes, count, duration, identity, number, percent } from "../lib/format.js";

const EVERY_S = 5;
const SLOWEST = 10;
const RECENT_S = 3600;

function Ranks({ dynamic }) {
  const agree = new Map(
    dynamic.determinism.stages.map((stage) => [`${stage.worker} ${stage.pp}`, stage.consistent]),
  );
  return html`
    ${!dynamic.workers.length && html`<${Empty}>No worker is running.<//>`}
    ${dynamic.workers.map(
      (worker) => html`
        <h3>${worker.worker} · ${worker.model}</h3>
        <p>
          ${worker.state}
          ${worker.detail && html`: <${Coded} text=${worker.detail} />`} · ${count(
            worker.waiting,
            "request",
          )} waiting for rows · ${number(worker.desyncs)} disagreements, ${number(
            worker.resyncs,
          )} resynchronised
        </p>
        <${Table}
          label=${`Ranks of ${worker.worker}`}
          heads=${[
            "Rank",
            "Stage",
            "Agrees",
            "Checksum",
            "Actions",
            "Rows",
            "Requests",
            "Outbox",
            "Write backlog",
            "KV cache",
          ]}
          rows=${worker.ranks.map((rank) => [
            rank.rank,
            rank.pp,
            agree.get(`${worker.worker} ${rank.pp}`) ? "yes" : html`<strong class="bad">no</strong>`,
            html`<span class="mono">${rank.checksum}</span>`,
            number(rank.actions),
            `${number(rank.rows_used)} of ${number(rank.rows)}`,
            `${number(rank.running)} running, ${number(rank.queued)} waiting`,
            html`<span class=${rank.outbox > 1000 ? "bad" : ""}>${number(rank.outbox)}</span>`,
            bytes(rank.backlog),
            percent(rank.kv_cache),
          ])}
          spare=${["Actions", "Write backlog", "Checksum"]}
        />
      `,
    )}
  `;
}

/** What part of a worker's tokens, of prompts and generated, each tenant has just got. */
function shares(speeds) {
  const whole = Object.values(speeds || {}).reduce((sum, speed) => sum + speed, 0);
  return Object.entries(speeds || {})
    .map(([tenant, speed]) => `${tenant}: ${percent(speed / whole)}`)
    .join(", ");
}

function Service({ status }) {
  // as in the bar: gradient workers serve no model
  const serving = status.workers.filter((worker) => !worker.queue);
  const healthy = serving.filter((worker) => worker.healthy).length;
  const others = status.workers.length - serving.length;
  const { webhooks_pending: pending, webhooks_overdue_s: late } = status.callbacks;
  const overdue = pending ? `, up to ${duration(late)} overdue` : "";
  const limit = status.redis.limit_bytes ? `of ${bytes(status.redis.limit_bytes)}, ` : "";
  return html`
    <div role="region" aria-label="Service components">
      <${Stats}
        items=${[
          {
            name: "Jobs",
            value: `${number(status.live)} active`,
            note: `${number(status.queued)} queued, ${count(status.held, "response")} held`,
          },
          {
            name: "Workers",
            value: `${healthy} of ${serving.length}`,
            note: `healthy${others ? `, and ${count(others, "gradient worker")}` : ""}`,
            bad: !healthy || status.workers.some((worker) => !worker.healthy),
          },
          {
            name: "Relay",
            value: status.relay.alive ? number(status.relay.received) : "silent",
            note: status.relay.alive
              ? `${status.relay.received === 1 ? "receipt" : "receipts"} received`
              : "has not reported",
            bad: !status.relay.alive,
          },
          {
            name: "Webhooks",
            value: status.callbacks.alive ? number(status.callbacks.webhooks_pending) : "silent",
            note: !status.callbacks.alive ? "has not reported" : `pending${overdue}`,
            bad: !status.callbacks.alive,
          },
          {
            name: "Redis",
            value: bytes(status.redis.used_bytes),
            note: `${limit}answered in ${number(status.redis.milliseconds, 1)} ms`,
          },
        ]}
      />
    </div>
    <${Fold} title="Workers" short=${count(status.workers.length, "worker")}>
      <${Table}
        label="Workers"
        spare=${["Identity", "Outbox", "By tenant"]}
        heads=${[
          "Worker",
          "Model",
          "Identity",
          "Health",
          "Jobs",
          "Tokens/s",
          "By tenant",
          "Outbox",
          "Uptime",
        ]}
        rows=${status.workers.map((worker) => [
          worker.worker,
          worker.model,
          html`<span class="mono">${identity(worker.identity)}</span>`,
          worker.healthy
            ? html`<span class="pill good">healthy</span>`
            : html`<strong class="bad"><${Coded} text=${worker.detail || "not healthy"} /></strong>`,
          worker.stats ? number(worker.stats.jobs) : "–",
          worker.stats ? number(worker.stats.generated_tokens_s) : "–",
          worker.stats ? shares(worker.stats.tenant_tokens_s) : "–",
          worker.stats ? number(worker.stats.outbox) : "–",
          age(worker.started),
        ])}
      />
    <//>
    ${
      status.queues.length > 0 &&
      html`
        <h2>Queues</h2>
        <${Table}
          label="Queues"
          heads=${["Model", "Priority", "Sent", "Waiting"]}
          rows=${status.queues.map((queue) => [
            queue.model,
            queue.priority,
            number(queue.sent),
            Object.entries(queue.waiting)
              .map(([tenant, jobs]) => `${tenant}: ${number(jobs)}`)
              .join(", "),
          ])}
        />
      `
    }
  `;
}

function Slow({ jobs }) {
  const now = useNow(1);
  useJobs(jobs);
  const end = (job) => job.finished || now;
  const slow = jobs.list
    .filter((job) => job.started && end(job) > now - RECENT_S)
    .sort((a, b) => end(b) - b.started - (end(a) - a.started))
    .slice(0, SLOWEST);
  if (!slow.length) return html`<${Empty}>No job has run in the last hour.<//>`;
  return html`
    <${Table}
      label="Slowest jobs"
      heads=${["Job", "State", "Ran", "Waited", "Kind", "Owner", "Attempt"]}
      rows=${slow.map((job) => [
        html`<a class="two-lines" href=${`#/jobs/${job.id}`} title=${job.id}>${titleOf(job)}</a>`,
        html`<${State} state=${job.state} />`,
        duration(end(job) - job.started),
        duration(job.started - job.created),
        job.kind,
        owner(job),
        job.attempt > 1 ? job.attempt : "",
      ])}
      spare=${["Kind", "Owner"]}
    />
  `;
}

const MINUTES = 60;

/**
 * Tokens/s, the queue, and how long jobs took, in the last hour, over one axis: what the feed has
 * brought.
 */
function Charts({ jobs, history, observes }) {
  const own = useNow(2);
  const last = history.points[history.points.length - 1];
  const now = last ? last.at : own; // of the service: a browser's clock may be wrong
  const span = [now - MINUTES * 60, now];
  const lately = (name) => history.of(name).filter(([at]) => at >= span[0]);
  const digits = (value) => number(value, value < 10 ? 1 : 0);
  const whole = (value) => (Number.isInteger(value) ? number(value) : "");
  return html`
    <div class="cards charts">
      ${
        observes &&
        html`
          <${Chart} title="Tokens per second" points=${lately("tokens_s")} text=${digits} span=${span} />
          <${Chart} title="Jobs in the queue" points=${lately("queued")} text=${whole} span=${span} />
        `
      }
      <${Chart}
        title="Median job time"
        note="no sweeps"
        points=${latencies(jobs.list, now, MINUTES)}
        text=${(value) => (value ? duration(value) : "0")}
        span=${span}
      />
    </div>
  `;
}

export default function View({ session, jobs, history }) {
  const has = (scope) => session.scopes.includes(scope) || session.scopes.includes("admin");
  const [dynamic, , silent] = usePolled(has("read") && "/v1/steering/dynamic", EVERY_S);
  const [status, , unknown] = usePolled(has("observe") && "/v1/status", EVERY_S);
  const [models] = usePolled(has("read") && "/v1/models", EVERY_S);
  const agreed = dynamic && dynamic.determinism;
  const computed = (models?.data ?? []).map((model) => [
    model.id,
    model.dtype,
    html`<${Coded} text=${model.dtype_reason} />`,
  ]);
  const caveats = (models?.data ?? []).flatMap((model) =>
    model.caveats.map((caveat) => [model.id, html`<${Coded} text=${caveat} />`]),
  );
  const links = ["flower", "grafana", "metrics", "ready"].filter((name) => session.links[name]);
  return html`
    <div class="section-head">
      <h1>Ops</h1>
      <span>
        ${links.map(
          (name) => html`<a href=${session.links[name]}>${name[0].toUpperCase() + name.slice(1)}</a> `,
        )}
      </span>
    </div>
    <${Charts} jobs=${jobs} history=${history} observes=${has("observe")} />
    <h2>Service</h2>
    ${
      has("observe")
        ? html`<${Problem} error=${unknown} />${status && html`<${Service} status=${status} />`}`
        : html`
            <p>
              Service-wide figures need a key with the scope <code>
                observe
              </code>; this key has ${session.scopes.join(", ")}.
            </p>
          `
    }
    ${
      caveats.length > 0 &&
      html`
        <h2>Caveats</h2>
        <${Table}
          label="Caveats"
          heads=${["Model", "How its rows may differ from transformers'"]}
          rows=${caveats}
        />
      `
    }
    ${
      computed.length > 0 &&
      html`
        <${Fold} title="Models" short=${count(computed.length, "model")}>
          <${Table} label="Models" heads=${["Model", "Dtype", "Reason"]} rows=${computed} />
        <//>
      `
    }
    ${
      !has("read")
        ? html`<h2>Ranks</h2><p>This needs a key with the scope <code>read</code>.</p>`
        : html`
            <${Problem} error=${silent} />
            ${
              agreed &&
              html`
                <${Fold}
                  title="Ranks"
                  short=${
                    agreed.consistent
                      ? "All ranks agree."
                      : html`
                          <strong class="bad">
                            Ranks or workers disagree: <${Coded} text=${agreed.detail || ""} />
                          </strong>
                        `
                  }
                  open=${agreed.consistent ? undefined : true}
                >
                  <${Ranks} dynamic=${dynamic} />
                <//>
              `
            }
          `
    }
    <h2>Slowest jobs of the last hour</h2>
    <${Slow} jobs=${jobs} />
  `;
}

// Policies: what is registered, its hits by day, a prompt's scores under one, its mode and its versions.

import { get, patch } from "../lib/api.js";
import { Button, Control, Loading, Problem, html, useState, useTask } from "../lib/ui.js";
import { EmptyState, Stats, Table } from "../lib/parts.js";
import { age, count, number } from "../lib/format.js";
import { short } from "../lib/chips.js";
import { useAnswer, useJobs, useModels } from "../lib/ask.js";
import { Reading, ReadingForm } from "../lib/readings.js";
import { messagesOf, textOf } from "../lib/turns.js";
import { Plot } from "../plots/plot.js";
import { Review } from "./hits.js";
import { ProbeResult } from "./probes.js";

const DAYS = 30; // POLICY_DAYS of schemas/base/limits.py
const DAY_MS = 24 * 3600 * 1000;
const MODES = { shadow: "decides and records", active: "acts" };
const ADVICE = {
  shadow: "Watch how often it triggers, and try prompts below, before it acts.",
  active: "In shadow mode it only records.",
};
const PILLS = { active: "good" };
const NONE =
  "Train a probe, then register a policy on its scores. It begins in shadow mode, where it only records.";

const current = ({ versions }) => versions[versions.length - 1];
const trafficOf = ({ all_traffic: all }) => (all ? "all traffic" : "requests that name it");
const actionOf = (item) =>
  typeof item === "string"
    ? item
    : `${item.action}${item.module ? ` ${item.module}${item.scale === 1 ? "" : ` × ${short(item.scale)}`}` : ""}`;
const actionsOf = ({ actions }) => actions.map(actionOf).join(", ") || "none";

/** Which tokens a policy reads. */
function readOf(tokens) {
  if (typeof tokens === "string")
    return { all: "of all tokens", generated: "of generated tokens" }[tokens] || "";
  const looks = tokens.map(({ role = "", turn = null, part = "" }) =>
    [role, turn === null ? "" : `turn ${turn}`, part].filter(Boolean).join(" "),
  );
  return `of ${looks.join(" or ")}`;
}

function conditionOf({
  probe,
  condition: {
    label,
    aggregation,
    window,
    decay,
    at_least: on,
    release_below: off,
    schedule,
    cool_down: cool,
    latch,
  },
}) {
  const of =
    { last: "score", exponential: `exponential mean (decay ${decay})` }[aggregation] ||
    `${aggregation} of ${window} scores`;
  const more = [
    off !== null && off !== on && `off below ${short(off)}`,
    cool > 0 && `then off for ${count(cool, "token")}`,
    latch !== "none" && `stays on for the ${latch}`,
    readOf(schedule.tokens),
    schedule.start > 0 && `from token ${schedule.start} on`,
  ];
  return `${of} of ${probe}${label ? ` (${label})` : ""} ≥ ${short(on)}${more
    .filter(Boolean)
    .map((text) => `; ${text}`)
    .join("")}`;
}

/** The last days, those without prompts too, oldest first. */
function lastDays(days) {
  const known = new Map(days.map((each) => [each.day, each]));
  return Array.from({ length: DAYS }, (_, n) => {
    const day = new Date(Date.now() - (DAYS - 1 - n) * DAY_MS).toISOString().slice(0, 10);
    return known.get(day) || { day, prompts: 0, triggered: 0, acted: 0 };
  });
}

const total = (days, what) => days.reduce((sum, each) => sum + each[what], 0);

/** Triggered prompts of each day, as small bars. */
const Spark = ({ days }) => {
  const most = Math.max(1, ...days.map(({ triggered }) => triggered));
  return html`
    <svg class="spark" width="92" height="22" viewBox="0 0 92 22" aria-hidden="true">
      <line x1="0" x2="92" y1="21.5" y2="21.5" />
      ${days.map(
        ({ triggered }, n) =>
          triggered > 0 &&
          html`
            <rect
              x=${n * 3 + 1}
              width="2"
              y=${21 - (triggered / most) * 19}
              height=${(triggered / most) * 19}
            />
          `,
      )}
    </svg>
  `;
};

const List = ({ policies }) => html`
  <${Table}
    label="Policies"
    heads=${["Policy", "Mode", "Reads", "Turns on at", "Does", `Hits in ${DAYS} days`]}
    keys=${policies.map(({ name }) => name)}
    rows=${policies.map((policy) => {
      const { content } = current(policy);
      return [
        html`
          <a
            href=${`#/policies/${encodeURIComponent(policy.name)}?model=${encodeURIComponent(policy.model)}`}
          >
            <strong>${policy.name}</strong>
          </a>
          ${policy.description && html`<br /><small>${policy.description}</small>`}
        `,
        html`<span class=${`pill ${PILLS[content.mode] || ""}`}>${content.mode}</span>`,
        trafficOf(content),
        conditionOf(content),
        actionsOf(content),
        policy.days.length
          ? html`
              <${Spark} days=${lastDays(policy.days)} />
              <br />
              <span class="soft">
                ${number(total(policy.days, "triggered"))} of ${count(
                  total(policy.days, "prompts"),
                  "prompt",
                )}
              </span>
            `
          : html`<span class="soft">none read</span>`,
      ];
    })}
  />
`;

/** Switches the mode, after a question that says what that does. */
function Mode({ policy, change, onError }) {
  const { content, version } = current(policy);
  const [mode, set] = useState(content.mode);
  const send = async () => {
    const acts =
      mode === "shadow" ? "It will only record" : `It will ${actionsOf(content)} in ${trafficOf(content)}`;
    const question =
      `Switch ${policy.name} from ${content.mode} to ${mode}?\n\n` +
      `${acts}, in requests accepted from now on. ` +
      `This makes version ${version + 1}; version ${version} can be restored.`;
    if (confirm(question)) await change({ mode });
  };
  return html`
    <div class="inline">
      <${Control}
        label="Mode"
        hint=${MODES[mode]}
        value=${mode}
        change=${({ target }) => set(target.value)}
        options=${Object.keys(MODES)}
      />
      <${Button} kind="main switch" disabled=${mode === content.mode} onClick=${send} onError=${onError}>
        Switch
      <//>
    </div>
  `;
}

function Versions({ policy, may, change, onError }) {
  const restore = async (version) => {
    const question =
      `Restore version ${version} of ${policy.name}? Its content and mode apply to requests accepted ` +
      `from now on, as version ${current(policy).version + 1}.`;
    return confirm(question) && change({ version });
  };
  return html`
    <h2>Versions</h2>
    <${Table}
      label="Versions"
      heads=${["Version", "Mode", "Reads", "Turns on at", "Does", "Made", ""]}
      rows=${[...policy.versions].reverse().map(({ version, content, created }, n) => [
        version,
        content.mode,
        trafficOf(content),
        conditionOf(content),
        actionsOf(content),
        `${age(created)} ago`,
        n === 0
          ? html`<span class="pill good">current</span>`
          : may &&
            html`
              <${Button}
                kind="small"
                aria-label=${`Restore version ${version}`}
                onClick=${() => restore(version)}
                onError=${onError}
              >
                Restore
              <//>
            `,
      ])}
    />
  `;
}

function Hits({ policy }) {
  const days = lastDays(policy.days);
  const bars = (from, to) =>
    days.map((each, n) => ({
      x: n,
      to: n + 1,
      from: from(each),
      y: to(each),
      tip:
        `${each.day}: ${number(each.triggered)} of ${count(each.prompts, "prompt")} triggered it, ` +
        `${number(each.acted)} acted on`,
    }));
  const ticks = days.map(({ day }, n) => [n + 0.5, day.slice(5)]).filter((_, n) => n % 7 === 1);
  return html`
    <${Plot}
      title="Prompts that triggered it, by day"
      note="UTC"
      name=${`${policy.name}.days`}
      rows=${days}
      height=${200}
      x=${{ low: 0, high: DAYS, ticks }}
      y=${{
        low: 0,
        high: Math.max(4, ...days.map(({ triggered }) => triggered * 1.1)),
        text: (value) => number(value),
        label: "prompts",
      }}
      series=${[
        {
          kind: "bars",
          name: "only recorded",
          points: bars(
            ({ acted }) => acted,
            ({ triggered }) => triggered,
          ),
        },
        {
          kind: "bars",
          name: "acted on",
          tone: "2",
          points: bars(
            () => 0,
            ({ acted }) => acted,
          ),
        },
      ]}
    />
  `;
}

/** Scores a prompt, or a chat, and its continuation under the policy. */
const trial = (policy) => ({
  name: `policies/${encodeURIComponent(policy.name)}`,
  action: "Try a prompt",
  example: "The service was slow, but the cook was a genius.",
  prompt: {
    hint: "a chat may have several turns, each on a line that begins with system:, user: or assistant:",
    sent: ({ prompts, messages }) => {
      const [first] = messages || prompts || [];
      return messages ? textOf(first) : typeof first === "string" ? first : "";
    },
  },
  missing: () => null,
  fields: () => [
    {
      name: "as",
      label: "Sent as",
      api: "messages",
      value: "text",
      options: { text: "plain text", chat: "a chat" },
      sent: ({ messages }) => (messages ? "chat" : "text"),
    },
    {
      name: "max_tokens",
      label: "Tokens to generate",
      api: "sampling.max_tokens",
      value: "24",
      type: "number",
      min: 1,
    },
  ],
  body: ({ max_tokens: tokens, prompt, as }) => ({
    ...(as === "chat" ? { prompts: undefined, messages: [messagesOf(prompt)] } : {}),
    ...(current(policy).content.all_traffic ? {} : { policies: [policy.name] }),
    probes: [{ probe: current(policy).content.probe, tokens: true }],
    sampling: { max_tokens: Number(tokens), temperature: 0 },
  }),
});

function One({ name, job, model, session, query, jobs }) {
  const [error, setError] = useState(null);
  const [policy, setPolicy] = useState(null);
  const path = `/v1/artifacts/policies/${encodeURIComponent(name)}?model=${encodeURIComponent(model)}`;
  const read = job && (jobs.byId.get(job) || {}).state === "succeeded"; // then it counts
  useJobs(jobs);
  useTask(
    (signal) => get(path, { signal }).then(setPolicy, (failure) => signal.aborted || setError(failure)),
    [path, read],
  );
  const may = ["steer-global", "admin"].some((scope) => session.scopes.includes(scope));
  const change = async (body) => {
    setError(null);
    const changed = await patch(path, body);
    setPolicy(({ days }) => ({ ...changed, days }));
  };
  if (!policy) return html`<h1>${name}</h1><${Problem} error=${error} />${!error && html`<${Loading} />`}`;
  const { content, version } = current(policy);
  const [prompts, triggered, acted] = ["prompts", "triggered", "acted"].map((what) =>
    total(policy.days, what),
  );
  const share = number((100 * triggered) / prompts, 1);
  const did =
    `It read ${count(prompts, "prompt")} in ${DAYS} days and was triggered by ${number(triggered)} ` +
    `(${share} %); it acted on ${acted ? number(acted) : "none"}.`;
  const mine = `policies/${encodeURIComponent(name)}`;
  return html`
    <p><a href="#/policies">All policies</a></p>
    <h1>${name}</h1>
    ${policy.description && html`<p class="lead">${policy.description}</p>`}
    <p class="finding">${prompts ? did : `It has read no prompt in ${DAYS} days.`}</p>
    <${Stats}
      items=${[
        { name: "Mode", value: content.mode, note: MODES[content.mode] },
        {
          name: "Version",
          value: version,
          note: policy.versions.length > 1 ? `the last ${policy.versions.length} are kept` : null,
        },
        { name: "Reads", value: content.all_traffic ? "all" : "named", note: trafficOf(content) },
      ]}
    />
    <p>
      Turns on at: ${conditionOf(content)}.
      <br />
      Does: ${actionsOf(content)}
      ${content.edits === "allow" ? "; edits before it are allowed" : ""}${content.told ? "; answers tell of it" : ""}.
    </p>
    ${(policy.warnings || []).map((text) => html`<p class="bad" role="status">${text}</p>`)}
    <${Problem} error=${error} />
    <div class="reading even">
      <${Hits} policy=${policy} />
      <section class="card" aria-label="Mode">
        <h2>Mode</h2>
        ${
          may
            ? html`<${Mode} key=${version} policy=${policy} change=${change} onError=${setError} />`
            : html`<p>A change needs a key with the scope <code>steer-global</code>.</p>`
        }
        <p class="soft">${ADVICE[content.mode]}</p>
      </section>
    </div>
    <${Review} policy=${policy} may=${may} all=${session.scopes.includes("admin")} read=${read} />
    <h2>A prompt under it</h2>
    <${ReadingForm} ...${trial(policy)} query=${query} />
    <${Reading} key=${job} id=${job} name=${mine} jobs=${jobs}>
      ${(result, view, n) => {
        const read = (result.probes || []).filter(
          (each) => each.request === n && each.policy && each.policy.name === name,
        );
        return read.length
          ? read.map((each) => html`<${ProbeResult} key=${n} found=${each} result=${result} view=${view} />`)
          : html`<p>The policy did not read this job.</p>`;
      }}
    <//>
    <${Versions} policy=${policy} may=${may} change=${change} onError=${setError} />
  `;
}

export default function View({ params, ...shared }) {
  const [error, setError] = useState(null);
  const [chosen, choose] = useState(null);
  const models = useModels(setError);
  const model = chosen || (models && models.length ? models[0].id : null);
  const found = useAnswer(
    model && !params[0] ? `/v1/artifacts/policies?model=${encodeURIComponent(model)}` : null,
    setError,
  );
  const scored = params[1] && shared.jobs.byId.get(params[1]);
  if (model && params[0])
    return html`
      <${One}
        key=${params[0]}
        name=${params[0]}
        job=${params[1]}
        model=${shared.query.get("model") || (scored && scored.model) || model}
        ...${shared}
      />
    `;
  return html`
    <h1>Policies</h1>
    <p class="lead">
      Conditions on a probe's scores, and what is done when one is met: flag, stop, steer, capture, send a
      webhook.
    </p>
    <${Problem} error=${error} />
    ${
      models &&
      models.length > 1 &&
      html`
        <${Control}
          label="Model"
          value=${model}
          change=${({ target }) => choose(target.value)}
          options=${models.map(({ id }) => id)}
        />
      `
    }
    ${
      models &&
      !models.length &&
      html`<${EmptyState} title="No model is served" text="Start one with midstream up." />`
    }
    ${
      found &&
      (found.policies.length
        ? html`<${List} policies=${found.policies} />`
        : html`
            <${EmptyState} title="No policy is registered." text=${NONE}>
              <code>midstream put policy NAME -f policy.json</code>
            <//>
          `)
    }
  `;
}

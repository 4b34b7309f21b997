// One job: prompt, output, receipts by rank, files, and its request as code.

import { html, useLayoutEffect, useRef, useState, useTask, Button, Copy, Guard, Problem, Coded } from "../lib/ui.js";
import { ApiError } from "../lib/api.js";
import { useAnswer } from "../lib/ask.js";
import { bytes, count, identity, number, time } from "../lib/format.js";
import { isSurvey, titleOf } from "../lib/jobs.js";
import { kindOf } from "../lib/kinds.js";
import { Id, State } from "../lib/parts.js";
import { codeOf } from "../lib/code.js";
import { TimeLine } from "../plots/time_line.js";

const MOST = 200; // rows of a list that are shown
const PATHS = { dose: "/v1/doses" }; // of a kind that is no model's, where it is sent
const FEW = 4; // receipts that are shown without a click

/** What a job is whose request has no form as code. */
function uncoded(job) {
  if (job.kind === "harvest")
    return isSurvey(job) ? "a survey of a harvest, which lists it" : "part of a harvest";
  if (job.kind === "fit") return "a fit: the form of its request depends on what it fits";
  return `of the kind ${job.kind}, which has no form as code`;
}

function List({ items, total, more, children }) {
  const shown = items.slice(0, MOST);
  const left = (total ?? items.length) - shown.length;
  return html`
    ${shown.map(children)}
    ${left > 0 && html`<p class="soft">… and ${number(left)} more ${more}</p>`}
  `;
}

function Receipts({ determinism }) {
  if (!determinism)
    return html`<p class="soft">Nothing was captured, steered or probed, so the ranks sent no receipts.</p>`;
  const rows = determinism.stages.flatMap((stage) => stage.ranks.map((rank) => ({ ...rank, pp: stage.pp })));
  return html`
    <details open=${rows.length <= FEW}>
      <summary class=${determinism.consistent ? "" : "bad"}>
        ${determinism.consistent ? "All ranks agree" : "Ranks disagree"}
        ${determinism.worker ? `; worker ${determinism.worker}` : ""}.
      </summary>
      <table>
        <thead>
          <tr>
            <th scope="col">Rank</th>
            <th scope="col">Prompt</th>
            <th scope="col">Status</th>
            <th scope="col">Applied</th>
            <th scope="col">Checksum</th>
          </tr>
        </thead>
        <tbody>
          ${rows.slice(0, MOST).map(
            (rank) => html`
              <tr>
                <td>${rank.rank} (stage ${rank.pp})</td>
                <td>${rank.request}</td>
                <td>${rank.status}${rank.message ? `: ${rank.message}` : ""}</td>
                <td>${rank.applied} of ${rank.actions}</td>
                <td class="mono">${rank.checksum}</td>
              </tr>
            `,
          )}
        </tbody>
      </table>
      ${rows.length > MOST && html`<p class="soft">… and ${number(rows.length - MOST)} more receipts</p>`}
    </details>
  `;
}

function Files({ id, captured }) {
  if (!captured || captured.status === "not_requested")
    return html`<p class="soft">No capture was requested.</p>`;
  return html`
    <p>
      ${captured.status}: ${number(captured.rows)} rows, ${bytes(captured.bytes)}. <a
        href=${`#/capture/${id}`}
      >
        View the rows
      </a>
      ${captured.detail && html`<br /><small><${Coded} text=${captured.detail} /></small>`}
    </p>
    <${List} items=${captured.files} more="files">
      ${(file) => html`
        <div class="mono">
          ${file.path} <span class="soft">${bytes(file.bytes)}, rank ${file.rank}</span>
        </div>
      `}
    <//>
  `;
}

const steps = (job) =>
  ["created", "queued", "started", "generated", "cancelling", "finished"]
    .filter((name) => job[name])
    .map((name) => [name, time(job[name])]);

export function JobDetails({ id, job, session, onClose }) {
  const [error, setError] = useState(null);
  const [Answers, setAnswers] = useState(null); // loaded where there are readings, or a fit
  const head = useRef(null);
  const from = `/v1/jobs/${encodeURIComponent(id)}`;
  const known = useAnswer(!job && from, setError); // older than what the feed began with
  const at = job || known;
  const over = at && at.state === "succeeded";
  const asked = useAnswer(`${from}/request`, setError);
  const result = useAnswer(
    over && `${from}/result`,
    (failure) => failure instanceof ApiError && setError(failure),
  );
  useLayoutEffect(() => head.current.focus(), []); // before the next key, which may be Escape
  const attention = Boolean(
    asked &&
    asked.body &&
    [asked.body.capture].flat().some((each) => each && each.hooks && each.hooks.q && each.hooks.k),
  );
  const outcome = result && ["fit", "dose"].find((kind) => result[kind]);
  const readings = Boolean(
    result &&
    (outcome ||
      result.lens ||
      result.features ||
      result.readers ||
      (result.probes || []).length ||
      attention),
  );
  useTask(
    (signal) => {
      if (readings)
        import(outcome ? `./${outcome}.js` : "./answers.js").then(
          (loaded) => signal.aborted || setAnswers(() => loaded.default),
          (failure) => signal.aborted || setError(failure),
        );
    },
    [readings],
  );
  const path = asked && (asked.path || PATHS[at && at.kind]);
  const code = path && asked.body ? codeOf(path, asked.body, session.auth !== "open") : null;
  const parts = html`
    ${
      at &&
      html`
        <p>
          <${State} state=${at.state} /> ${at.kind} · ${at.model} <span class="mono">
            ${identity(at.identity)}
          </span>
          ${at.retry_reason ? ` · attempt ${at.attempt} (the one before ended: ${at.retry_reason})` : ""}
          ${at.worker ? ` · worker ${at.worker}` : ""}
        </p>
      `
    }
    ${at && at.error && html`<${Problem} error=${new ApiError(at.error.status, at.error)} />`}
    ${
      at &&
      kindOf(at.kind).grid &&
      html`<p><a class="button small" href=${`#/${at.kind}/${id}`}>Open the heatmap</a></p>`
    }
    ${outcome === "dose" && html`<p><a class="button small" href=${`#/dose/${id}`}>Open the curves</a></p>`}
    <h3>Prompt</h3>
    ${
      asked
        ? asked.prompts.length
          ? html`
              <${List} items=${asked.prompts} total=${asked.prompts_total} more="prompts">
                ${(prompt) => html`
                  <pre data-part="prompt">${prompt.text === null ? "(token ids)" : prompt.text}</pre>
                  <small>${count(prompt.tokens, "token")}</small>
                `}
              <//>
            `
          : html`<p class="soft">${(at && at.prompt) || "None."}</p>`
        : html`<p class="soft">Loading …</p>`
    }
    <h3>${{ fit: "Fit", dose: "Dose" }[outcome] || "Output"}</h3>
    ${
      result
        ? outcome
          ? Answers && html`<${Answers} id=${id} ...${{ [outcome]: result[outcome] }} />`
          : result.outputs.length
            ? html`
                <${List} items=${result.outputs} more="outputs">
                  ${(output) => html`
                    <pre data-part="output">${output.text}</pre>
                    <small>${count(output.token_ids.length, "token")}, ${output.finish_reason}</small>
                  `}
                <//>
              `
            : html`<p class="soft">None.</p>`
        : html`
            <p class="soft">
              ${over ? "Loading …" : at && at.finished ? `No output (job ${at.state}).` : "Not ready yet."}
            </p>
          `
    }
    ${
      readings &&
      !outcome &&
      Answers &&
      at &&
      html`<${Guard} place=${id}><${Answers} result=${result} view=${at} attention=${attention} /><//>`
    }
    <h3>Receipts by rank</h3>
    ${
      result
        ? html`<${Receipts} determinism=${result.determinism} />`
        : html`
            <p class="soft">${at ? `${at.receipts || 0} of ${at.receipts_expected || 0} received.` : ""}</p>
          `
    }
    <h3>Files</h3>
    ${
      result
        ? html`<${Files} id=${id} captured=${result.capture_results} />`
        : html`<p class="soft">${at ? `Captures: ${at.capture_status || "not_requested"}.` : ""}</p>`
    }
    <h3>Request as code</h3>
    ${
      code
        ? html`<${Copy} tabs=${code} label="Request" />`
        : html`
            <p class="soft">
              ${
                at && asked
                  ? path
                    ? "The request was not kept: it is larger than 16 KiB, or an older server accepted it."
                    : `This job is ${uncoded(at)}.`
                  : ""
              }
            </p>
          `
    }
    <h3>Times</h3>
    ${at && at.started && at.finished && html`<${TimeLine} key=${at.finished} job=${at} />`}
    ${
      at &&
      html`
        <table>
          <tbody>
            ${steps(at).map(([name, text]) => html`<tr><th scope="row">${name}</th><td>${text}</td></tr>`)}
          </tbody>
        </table>
      `
    }
  `;
  return html`
    <section
      class="details"
      aria-labelledby="job-title"
      onKeyDown=${(event) => event.key === "Escape" && onClose()}
    >
      <div class="details-head">
        <div>
          <h2 id="job-title" tabindex="-1" ref=${head}>${at ? titleOf(at) : "Job"}</h2>
          <${Id} id=${id} />
        </div>
        <${Button} kind="small" onClick=${onClose}>Close<//>
      </div>
      <${Problem} error=${error} />
      ${error && !at ? "" : parts}
    </section>
  `;
}

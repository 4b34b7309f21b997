// A replay of a policy: prompts of the past under another version or threshold, before it acts.

import { get, post } from "../lib/api.js";
import { Button, Control, Problem, html, useState } from "../lib/ui.js";
import { Section, Table } from "../lib/parts.js";
import { count, number } from "../lib/format.js";
import { short } from "../lib/chips.js";
import { Around } from "./hits.js";

const HOLD_S = 30;
const LIVE = ["queued", "running", "cancelling"];
const MOST = 20; // prompts of each table
const SOURCES = { jobs: "of the last jobs", hits: "of the last hits" };

const turned = (turn) => (turn ? `${short(turn.score)} at token ${turn.position}` : "–");

function Changes({ title, hits }) {
  if (!hits.length) return null;
  return html`
    <h3>${title}</h3>
    <${Table}
      label=${title}
      heads=${["Job", "Text", "Old", "New"]}
      rows=${hits
        .slice(0, MOST)
        .map(({ job, request, text, old, new: now }) => [
          html`<a href=${`#/jobs/${job}`}>Prompt ${request}</a>`,
          html`<${Around} text=${text} />`,
          turned(old),
          turned(now),
        ])}
    />
    ${hits.length > MOST && html`<p class="soft">The ${MOST} highest of ${number(hits.length)}.</p>`}
  `;
}

const foundOf = ({ prompts, kept, gained, lost }) =>
  `Of ${count(prompts, "prompt")}, both turn on at ${number(kept)}; the new one alone at ` +
  `${number(gained.length)}, the old one alone at ${number(lost.length)}.`;

export function Replay({ policy }) {
  const { name, model, versions } = policy;
  const { version, content } = versions[versions.length - 1];
  const [form, set] = useState({ version: `${version}`, at_least: "", of: "jobs", last: "100" });
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  const entry = (field, label, more) => html`
    <${Control}
      label=${label}
      value=${form[field]}
      change=${({ target }) => set({ ...form, [field]: target.value })}
      ...${more}
    />
  `;
  const tried = versions.find((each) => `${each.version}` === form.version) || { content };
  const of = `/v1/policies/${encodeURIComponent(name)}/replays`;
  const send = async () => {
    setError(null);
    setFound(null);
    const { id } = await post(`${of}?${new URLSearchParams({ model })}`, {
      version: Number(form.version),
      of: form.of,
      last: Number(form.last),
      ...(form.at_least === "" ? {} : { condition: { at_least: Number(form.at_least) } }),
    });
    const look = () => get(`/v1/jobs/${id}?wait=${HOLD_S}`);
    let job = await look();
    while (LIVE.includes(job.state)) job = await look();
    setFound(await get(`${of}/${id}`));
  };
  return html`
    <${Section} title="Before it acts">
      <p class="soft">
        Reads prompts of the past under another version or threshold, compared with version ${version}. Nothing
        is generated, counted or done.
      </p>
      <div class="inline">
        ${entry("version", "Version to try", { options: versions.map((each) => `${each.version}`) })}
        ${entry("at_least", "Threshold", {
          type: "number",
          step: "any",
          placeholder: short(tried.content.condition.at_least),
        })}
        ${entry("of", "Prompts", { options: SOURCES })}
        ${entry("last", "Number", { type: "number", min: 1, max: 1000 })}
      </div>
      <${Button} onClick=${send} onError=${setError}>Replay<//>
      <${Problem} error=${error} />
      ${found &&
      html`
        <p class="finding">${foundOf(found)}</p>
        <${Changes} title="Gained" hits=${found.gained} />
        <${Changes} title="Lost" hits=${found.lost} />
      `}
    <//>
  `;
}

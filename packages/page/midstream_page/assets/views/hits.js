// The hits of a policy: where it turned on, what people say of each, and the precision of its versions.

import { del, get, put } from "../lib/api.js";
import { Button, Control, Problem, html, useState, useTask } from "../lib/ui.js";
import { EmptyState, Id, Section, Table } from "../lib/parts.js";
import { count, number, percent, time } from "../lib/format.js";
import { short } from "../lib/chips.js";
import { Replay } from "./replay.js";

const PAGE = 20;
const VERDICTS = { right: "right", false_alarm: "false alarm", unsure: "unsure" };
const MARKS = { "": "any", none: "none yet", ...VERDICTS };
const NO_TEXT = "no text: it is not kept, deleted, or another tenant's";

/** The text around the token at which the policy turned on. */
export const Around = ({ text }) =>
  text
    ? html`<span class="around">${text.before}<mark class="second">${text.token}</mark>${text.after}</span>`
    : html`<span class="soft">${NO_TEXT}</span>`;

/** A hit's mark; with `may`, controls that set it. */
function Mark({ hit, may, path, changed, onError }) {
  const known = hit.mark || { verdict: "", note: "" };
  const [verdict, setVerdict] = useState(known.verdict);
  const [note, setNote] = useState(known.note);
  if (!may) return html`${VERDICTS[known.verdict] || "–"}${known.note && html`<br /><small>${known.note}</small>`}`;
  const save = async () => {
    if (verdict) await put(path, { verdict, note });
    else await del(path);
    changed();
  };
  return html`
    <div class="inline">
      <${Control}
        label="Mark"
        value=${verdict}
        change=${({ target }) => setVerdict(target.value)}
        options=${{ "": "–", ...VERDICTS }}
      />
      <${Control}
        label="Note"
        value=${note}
        maxlength="1000"
        change=${({ target }) => setNote(target.value)}
      />
      <${Button}
        kind="small"
        aria-label=${`Save the mark of ${hit.id}`}
        disabled=${verdict === known.verdict && note === known.note}
        onClick=${save}
        onError=${onError}
      >
        Save
      <//>
    </div>
  `;
}

const precisionOf = ({ version, right, false_alarm: wrong, unsure, precision }) =>
  `Version ${version}: ` +
  (precision === null
    ? "no hit is marked as right or as a false alarm"
    : `${number(right)} of ${count(right + wrong, "marked hit")} right (${percent(precision)})`) +
  (unsure ? `, ${number(unsure)} unsure` : "");

function Filters({ chosen, set, versions, labels }) {
  const entry = (name, label, more) => html`
    <${Control}
      label=${label}
      value=${chosen[name] || ""}
      change=${({ target }) => set({ ...chosen, [name]: target.value })}
      ...${more}
    />
  `;
  const among = (values) => ({ "": "any", ...Object.fromEntries(values.map((each) => [each, each])) });
  return html`
    <div class="inline">
      ${entry("mark", "Marked", { options: MARKS })}
      ${versions.length > 1 && entry("version", "Version", { options: among(versions) })}
      ${labels.length > 1 && entry("label", "Label", { options: among(labels) })}
      ${entry("at_least", "Score from", { type: "number", step: "any" })}
      ${entry("below", "Score below", { type: "number", step: "any" })}
    </div>
  `;
}

export function Review({ policy, may, all, read }) {
  const { name, model, versions } = policy;
  const [chosen, set] = useState({});
  const [found, setFound] = useState(null);
  const [cursors, setCursors] = useState([""]); // of the pages up to the one that is shown
  const [error, setError] = useState(null);
  const [looks, look] = useState(0);
  const of = `/v1/policies/${encodeURIComponent(name)}`;
  const asked = Object.entries(chosen).filter(([, value]) => value !== "");
  const query = new URLSearchParams([["model", model], ["limit", PAGE], ...asked]);
  const cursor = cursors[cursors.length - 1];
  if (cursor) query.set("cursor", cursor);
  useTask(
    (signal) => {
      setError(null);
      const answers = [`${of}/hits?${query}`, `${of}/precision?${new URLSearchParams({ model })}`];
      Promise.all(answers.map((path) => get(path, { signal }))).then(
        ([page, { versions: marked }]) => setFound({ ...page, marked }),
        (failure) => signal.aborted || setError(failure),
      );
    },
    [`${query}`, looks, read],
  );
  const choose = (next) => {
    set(next);
    setCursors([""]);
  };
  const labels = policy.versions[policy.versions.length - 1].probe.content.labels;
  const heads = ["When", ...(all ? ["Tenant"] : []), "Job", "Text", "Score", "Did", "Mark"];
  if (error && error.code === "not_installed") return null;
  return html`
    <${Section}
      title="Hits"
      aside=${html`<${Button} kind="small" onClick=${() => look(looks + 1)}>Look again<//>`}
    >
      <${Problem} error=${error} />
      ${found && found.marked.map((each) => html`<p key=${each.version}>${precisionOf(each)}.</p>`)}
      <${Filters}
        chosen=${chosen}
        set=${choose}
        labels=${labels}
        versions=${versions.map(({ version }) => version)}
      />
      ${found &&
      (found.hits.length
        ? html`
            <${Table}
              label=${`Hits of ${name}`}
              heads=${heads}
              keys=${found.hits.map(({ id }) => id)}
              rows=${found.hits.map((hit) => [
                time(hit.at),
                ...(all ? [hit.tenant] : []),
                html`<a href=${`#/jobs/${hit.job}`}>Job</a> <${Id} id=${hit.job} />`,
                html`<${Around} text=${hit.text} />`,
                html`
                  ${short(hit.score)}<br />
                  <small>${labels.length > 1 ? `${hit.label} ` : ""}≥ ${short(hit.threshold)}</small>
                `,
                html`
                  ${hit.acted ? hit.actions.join(", ") || "nothing" : "only recorded"}<br />
                  <small>version ${hit.version}, ${hit.mode}</small>
                `,
                html`
                  <${Mark}
                    key=${`${hit.id} ${hit.mark ? hit.mark.at : ""}`}
                    hit=${hit}
                    may=${may}
                    path=${`${of}/hits/${hit.id}/mark?${new URLSearchParams({ model })}`}
                    changed=${() => look(looks + 1)}
                    onError=${setError}
                  />
                `,
              ])}
            />
          `
        : html`
            <${EmptyState}
              title="No hit"
              text=${asked.length ? "Choose less." : "It has turned on at no token, or hits are no longer kept."}
            />
          `)}
      <div class="inline">
        ${cursors.length > 1 &&
        html`<${Button} kind="small" onClick=${() => setCursors(cursors.slice(0, -1))}>Newer<//>`}
        ${found &&
        found.next &&
        html`<${Button} kind="small" onClick=${() => setCursors([...cursors, found.next])}>Older<//>`}
      </div>
    <//>
    ${may && found && html`<${Replay} key=${versions.length} policy=${policy} />`}
  `;
}

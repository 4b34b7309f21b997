// Components that views share.

import { html, useState, useEffect, useErrorBoundary, useRef } from "../vendor/preact.js";

export {
  html,
  render,
  useState,
  useEffect,
  useLayoutEffect,
  useRef,
  useMemo,
  useCallback,
} from "../vendor/preact.js";

/** A text whose words in backticks are code. */
export const Coded = ({ text }) =>
  text.split("`").map((part, n) => (n % 2 ? html`<code>${part}</code>` : part));

/** An error, said to screen readers too; nothing without one. */
export function Problem({ error, title = "" }) {
  if (!error) return null;
  const text = error.message || String(error);
  return html`
    <div class="problem" role="alert">
      ${title && html`<strong>${title}: </strong>`}
      <${Coded} text=${text} />
      ${error.retryAfter ? `${/[.!?]$/.test(text) ? "" : "."} Try again in ${error.retryAfter} s.` : ""}
    </div>
  `;
}

export const Loading = () => html`<p class="loading" role="status">Loading …</p>`;

/** Shows why a view could not be drawn, instead of an empty page; tries again at another `place`. */
export function Guard({ place, children }) {
  const [error, reset] = useErrorBoundary();
  useEffect(() => reset(), [place]);
  return error ? html`<${Problem} error=${error} title="This view has failed" />` : children;
}

/**
 * A button that is disabled while its `onClick` (which may be async) runs, so that a double click acts
 * once. `onError` gets what it throws.
 */
export function Button({
  onClick,
  onError,
  children,
  disabled = false,
  kind = "",
  type = "button",
  ...rest
}) {
  const busy = useRef(false);
  const [, show] = useState(0);
  const mounted = useRef(true);
  useEffect(() => {
    mounted.current = true;
    return () => (mounted.current = false);
  }, []);
  const click = async (event) => {
    if (busy.current || !onClick) return;
    busy.current = true;
    show((n) => n + 1);
    try {
      await onClick(event);
    } catch (error) {
      if (!onError) throw error;
      onError(error);
    } finally {
      busy.current = false;
      if (mounted.current) show((n) => n + 1);
    }
  };
  return html`
    <button
      type=${type}
      class=${`button ${kind}`}
      disabled=${disabled || busy.current}
      aria-busy=${busy.current ? "true" : null}
      onClick=${click}
      ...${rest}
    >
      ${children}
    </button>
  `;
}

let numbers = 0;

/**
 * A label around one control: `<Field label="Prompt" hint="…">${(id) => html`<input id=${id}
 * …>`}</Field>`; hint and error describe it.
 */
export function Field({ label, hint, error, children }) {
  const id = useRef(null);
  if (id.current === null) id.current = `field-${(numbers += 1)}`;
  const control = Array.isArray(children) ? children[0] : children;
  const made = typeof control === "function" ? control(id.current) : control;
  const told = [error && `${id.current}-error`, hint && `${id.current}-hint`].filter(Boolean).join(" ");
  if (made && made.props)
    Object.assign(made.props, { "aria-describedby": told || null, "aria-invalid": error ? "true" : null });
  return html`
    <div class="field">
      <label for=${id.current}>${label}</label>
      ${made}
      ${hint && html`<small id=${`${id.current}-hint`}>${hint}</small>`}
      ${
        error &&
        html`<small id=${`${id.current}-error`} class="bad" role="alert"><${Coded} text=${error} /></small>`
      }
    </div>
  `;
}

/**
 * A labelled control: one of `options` ([value, …] or {value: text}), a text of several `rows`, or an
 * input; `rest` are its attributes.
 */
export function Control({ label, hint, error, value, change, options, rows, ...rest }) {
  const listed = Array.isArray(options) ? options.map((each) => [each, each]) : Object.entries(options || {});
  return html`
    <${Field} label=${label} hint=${hint} error=${error}>
      ${(id) =>
        options
          ? html`
              <select id=${id} value=${value} onChange=${change} ...${rest}>
                ${listed.map(([each, text]) => html`<option key=${each} value=${each}>${text}</option>`)}
              </select>
            `
          : rows
            ? html`<textarea id=${id} rows=${rows} value=${value} onInput=${change} ...${rest}></textarea>`
            : html`<input id=${id} type="text" value=${value} onInput=${change} ...${rest} />`}
    <//>
  `;
}

/** What stands beside a control that an error is about. */
export const faultOf = ({ detail, allowed }) => `${detail}${allowed ? ` (${allowed})` : ""}`;

/** From {beginning of a field of the API's errors: control}: the control of a field, or null. */
export const byStart = (controls) => (field) =>
  (Object.entries(controls).find(([name]) => field.startsWith(name)) || [])[1] || null;

/**
 * A form's values, the control of each by `entry(name, label, more)`, and the `error` that none shows;
 * `controlOf(field, form)`: which does.
 */
export function useForm(begin, controlOf = () => null) {
  const [form, setForm] = useState(begin);
  const [error, setError] = useState(null);
  const at = error && controlOf(error.field || "", form);
  const wrong = (name) => (at === name ? faultOf(error) : null);
  const entry = (name, label, more) => html`
    <${Control}
      label=${label}
      error=${wrong(name)}
      value=${form[name]}
      change=${({ target }) => setForm((known) => ({ ...known, [name]: target.value }))}
      ...${more}
    />
  `;
  return { form, setForm, error: at ? null : error, setError, wrong, entry };
}

/** Tabs of code with a button that copies: `tabs` is {name: text}. */
export function Copy({ tabs, label = "Code" }) {
  const names = Object.keys(tabs);
  const [chosen, choose] = useState(names[0]);
  const [copied, setCopied] = useState("");
  const current = names.includes(chosen) ? chosen : names[0];
  const area = useRef(null);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(tabs[current]);
      setCopied("Copied");
    } catch {
      const range = document.createRange(); // no clipboard without https: select it for the user's own Ctrl-C
      range.selectNodeContents(area.current);
      const selection = getSelection();
      selection.removeAllRanges();
      selection.addRange(range);
      setCopied("Selected: press Ctrl-C");
    }
    setTimeout(() => setCopied(""), 3000);
  };
  const step = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const next = names[(names.indexOf(current) + by + names.length) % names.length];
    choose(next);
    const tab = event.currentTarget.querySelector(`[data-tab="${next}"]`);
    if (tab) tab.focus();
  };
  return html`
    <div class="copy">
      <div class="copy-head">
        <div role="tablist" aria-label=${label} onKeyDown=${step}>
          ${names.map(
            (name) => html`
              <button
                type="button"
                role="tab"
                data-tab=${name}
                aria-selected=${name === current ? "true" : "false"}
                tabindex=${name === current ? 0 : -1}
                onClick=${() => choose(name)}
              >
                ${name}
              </button>
            `,
          )}
        </div>
        <span role="status" class="copied">${copied}</span>
        <${Button} kind="small" onClick=${copy}>Copy<//>
      </div>
      <pre tabindex="0" ref=${area} data-code=${current} aria-label=${`${label}: ${current}`}>
        ${tabs[current]}
      </pre>
    </div>
  `;
}

/** A bar from 0 to `total` with its text. */
export function Progress({ value, total, label }) {
  const share = total ? Math.min(1, value / total) : 0;
  return html`
    <span class="progress">
      <progress max="1" value=${share} aria-label=${label}></progress>
      <span>${label}</span>
    </span>
  `;
}

export function Empty({ children }) {
  return html`<p class="empty">${children}</p>`;
}

/**
 * An effect that takes time: the signal of `work(signal)` aborts when one of `deps` changes, and with
 * the component.
 */
export function useTask(work, deps) {
  useEffect(() => {
    const stop = new AbortController();
    work(stop.signal);
    return () => stop.abort();
  }, deps);
}

/** The present moment in seconds, renewed every `seconds`. */
export function useNow(seconds = 1) {
  const [now, set] = useState(Date.now() / 1000);
  useEffect(() => {
    const timer = setInterval(() => set(Date.now() / 1000), seconds * 1000);
    return () => clearInterval(timer);
  }, [seconds]);
  return now;
}

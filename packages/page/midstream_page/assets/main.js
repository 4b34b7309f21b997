// The page: session, feed, router, top bar. Views are in views/, one file each.

import { get, post, del, sse, useSession, watchLate } from "./lib/api.js";
import {
  html,
  render,
  useState,
  useEffect,
  useRef,
  useCallback,
  useTask,
  Problem,
  Button,
  Field,
  Guard,
  Loading,
} from "./lib/ui.js";
import { bytes, number } from "./lib/format.js";
import { History } from "./lib/history.js";
import { JobStore } from "./lib/jobs.js";
import { Logo } from "./lib/parts.js";
import Start from "./views/start.js";

/**
 * Path → view. `#/sweep/ID` opens `sweep` with params ["ID"]; views other than the first are loaded
 * when they are opened. `group`: heading in the list of views.
 */
const VIEWS = {
  start: { title: "Start", group: "", load: async () => Start },
  jobs: { title: "Jobs", group: "Runs", load: async () => (await import("./views/jobs.js")).default },
  sweep: { title: "Sweep", group: "Study", load: async () => (await import("./views/sweeps.js")).default },
  capture: {
    title: "Capture",
    group: "Study",
    load: async () => (await import("./views/capture.js")).default,
  },
  // not in the list: opened from jobs
  attribution: { title: "Attribution", load: async () => (await import("./views/attribution.js")).default },
  dose: { title: "Dose", load: async () => (await import("./views/dose.js")).View }, // the same
  compare: { title: "Compare", load: async () => (await import("./views/compare.js")).default }, // the same
  lens: { title: "Lens", group: "Read", load: async () => (await import("./views/lens.js")).default },
  attention: {
    title: "Attention",
    group: "Read",
    load: async () => (await import("./views/attention.js")).default,
  },
  features: {
    title: "Features",
    group: "Read",
    load: async () => (await import("./views/features.js")).default,
  },
  probes: { title: "Probes", group: "Read", load: async () => (await import("./views/probes.js")).default },
  playground: {
    title: "Playground",
    group: "Steer",
    load: async () => (await import("./views/playground.js")).default,
  },
  policies: {
    title: "Policies",
    group: "Steer",
    load: async () => (await import("./views/policies.js")).default,
  },
  modules: {
    title: "Modules",
    group: "Library",
    load: async () => (await import("./views/modules.js")).default,
  },
  harvests: {
    title: "Harvests",
    group: "Library",
    load: async () => (await import("./views/harvests.js")).default,
  },
  ops: { title: "Ops", group: "Service", load: async () => (await import("./views/ops.js")).default },
};
const GROUPS = ["", "Runs", "Study", "Read", "Steer", "Library", "Service"];

/** A part of an address as text; what is no encoding of one stays as it is. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function route() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...params] = path.split("/").filter(Boolean).map(decoded);
  return { name: name || "start", params, query: new URLSearchParams(query) };
}

function Theme() {
  const [theme, set] = useState(localStorage.getItem("theme") || "auto"); // nothing else is stored
  useEffect(() => {
    if (theme === "auto") {
      localStorage.removeItem("theme");
      delete document.documentElement.dataset.theme;
    } else {
      localStorage.setItem("theme", theme);
      document.documentElement.dataset.theme = theme;
    }
  }, [theme]);
  return html`
    <label class="theme">
      <span class="visually-hidden">Colours</span>
      <select value=${theme} onChange=${(event) => set(event.target.value)}>
        <option value="auto">System</option>
        <option value="light">Light</option>
        <option value="dark">Dark</option>
      </select>
    </label>
  `;
}

function Login({ onSession, reason }) {
  const [key, setKey] = useState("");
  const [error, setError] = useState(null);
  const field = useRef(null);
  useEffect(() => field.current && field.current.focus(), []);
  const send = async () => {
    setError(null);
    onSession(await post("/session", { key }));
  };
  return html`
    <main class="login">
      <p><${Logo} /></p>
      <h1>Midstream</h1>
      ${reason && !error && html`<div class="problem" role="alert">${reason}</div>`}
      <form onSubmit=${(event) => event.preventDefault()}>
        <${Field} label="API key" hint="It is exchanged for a session of this browser, and not stored.">
          ${(id) => html`
            <input
              id=${id}
              ref=${field}
              type="password"
              autocomplete="off"
              required
              maxlength="512"
              value=${key}
              onInput=${(event) => setKey(event.target.value)}
            />
          `}
        <//>
        <${Button} type="submit" kind="main" disabled=${!key} onClick=${send} onError=${setError}>Log in<//>
      </form>
      <${Problem} error=${error} />
      <p>
        <small>
          An operator creates keys with <code>midstream create key</code>. <a href="/schema">API</a>
        </small>
      </p>
      <${Theme} />
    </main>
  `;
}

function Figures({ service, connected }) {
  const steered = service ? service.models.filter((model) => model.steered) : [];
  const usage = service && service.tenant.usage;
  const limits = service && service.tenant.limits;
  const quota =
    limits && limits.capture_mib
      ? limits.capture_mib * 2 ** 20 - usage.capture_bytes
      : service
        ? (service.quota_left ?? null)
        : null;
  const figure = (name, value, bad = false) =>
    html`<div class=${bad ? "bad" : ""}><dt>${name}</dt><dd>${value}</dd></div>`;
  return html`
    <div class="figures">
      <div role="status" class="global">
        ${
          steered.length
            ? html`
                <strong class="steered">
                  Global steering is on: ${steered
                    .map((model) => `${model.name} (${model.steering_entries})`)
                    .join(", ")}
                </strong>
              `
            : ""
        }
      </div>
      ${
        service &&
        html`
          <dl>
            ${service.models.map((model) =>
              figure(
                model.name,
                model.workers ? `${model.healthy} of ${model.workers} healthy` : "no worker",
                model.healthy < model.workers || !model.workers,
              ),
            )}
            ${!service.models.length && figure("models", "none", true)}
            ${service.tokens_s !== undefined && figure("tokens/s", number(service.tokens_s))}
            ${
              service.queued !== undefined
                ? figure("queue", number(service.queued))
                : figure("your jobs", number(usage.jobs_in_flight))
            }
            ${
              service.disk_free !== undefined &&
              figure("disk free", bytes(service.disk_free), service.disk_free < 2 ** 30)
            }
            ${figure(
              "quota left",
              quota === null ? "no quota" : bytes(Math.max(0, quota)),
              quota !== null && quota <= 0,
            )}
          </dl>
        `
      }
      ${
        service &&
        service.troubles &&
        html`
          <details class="bad">
            <summary>
              ${service.troubles.length === 1 ? "1 problem" : `${service.troubles.length} problems`}
            </summary>
            <ul>${service.troubles.map((text) => html`<li>${text}</li>`)}</ul>
          </details>
        `
      }
      <span role="status" class="connection">${connected ? "" : "Connecting …"}</span>
    </div>
  `;
}

function Shell({ session, onEnd }) {
  const [at, setAt] = useState(route);
  const [service, setService] = useState(null);
  const [connected, setConnected] = useState(false);
  const [error, setError] = useState(null);
  const [loaded, setLoaded] = useState({}); // {name, View}
  const jobs = useRef(null);
  if (jobs.current === null) jobs.current = new JobStore();
  const history = useRef(null);
  if (history.current === null) history.current = new History();
  const main = useRef(null);
  const shown = useRef("");
  const [menu, setMenu] = useState(false); // on a phone: whether the views are listed

  useEffect(() => {
    const change = () => (setAt(route()), setMenu(false));
    addEventListener("hashchange", change);
    return () => removeEventListener("hashchange", change);
  }, []);

  useTask((signal) => {
    sse("/v1/feed?limit=5000", {
      signal,
      reconnect: true,
      onState: setConnected,
      onEvent: ({ event, data }) => {
        if (event === "jobs") jobs.current.take(data);
        else if (event === "history") history.current.begin(data);
        else if (event === "service") {
          history.current.take(data);
          setService(data);
        }
      },
    }).catch((failure) => failure.status === 401 || setError(failure));
  }, []);

  const view = Object.hasOwn(VIEWS, at.name) ? VIEWS[at.name] : null;
  useTask(
    (signal) => {
      document.title = `${view ? view.title : "Not found"} · Midstream`;
      if (!view) return;
      view.load().then(
        (View) => signal.aborted || setLoaded({ name: at.name, View }),
        (failure) => signal.aborted || setError(failure),
      );
      // a screen reader goes on in the new view
      if (shown.current && shown.current !== at.name && main.current) main.current.focus();
      shown.current = at.name;
    },
    [at.name],
  );

  const View = loaded.name === at.name && loaded.View; // never another one with this one's parameters
  const logOut = async () => {
    await del("/session");
    onEnd("You are logged out.");
  };
  const models = service ? service.models : [];
  return html`
    <a class="skip" href="#main" onClick=${(event) => (event.preventDefault(), main.current.focus())}>
      Skip to content
    </a>
    <div
      class=${menu ? "frame open" : "frame"}
      onKeyDown=${(event) => event.key === "Escape" && setMenu(false)}
    >
      <header>
        <a class="name" href="#/start"><${Logo} />Midstream</a>
        <${Figures} service=${service} connected=${connected} />
        <button
          type="button"
          class="button small menu"
          aria-expanded=${menu ? "true" : "false"}
          aria-controls="views"
          onClick=${() => setMenu(!menu)}
        >
          ${menu ? "Close" : "Menu"}
        </button>
        <div class="who">
          <span>
            ${
              session.key_name
                ? `${session.tenant} · ${session.key_name}`
                : session.auth === "open"
                  ? "no login needed"
                  : session.tenant
            }
          </span>
          <${Theme} />
          ${session.csrf && html`<${Button} kind="small" onClick=${logOut} onError=${setError}>Log out<//>`}
        </div>
      </header>
      <nav class="views" id="views" aria-label="Views">
        ${GROUPS.map(
          (group) => html`
            <div>
              ${group && html`<h2>${group}</h2>`}
              ${Object.entries(VIEWS)
                .filter(([, view]) => view.group === group)
                .map(
                  ([name, { title }]) => html`
                    <a href=${`#/${name}`} aria-current=${name === at.name ? "page" : null}>${title}</a>
                  `,
                )}
            </div>
          `,
        )}
      </nav>
      <main id="main" tabindex="-1" ref=${main}>
        <${Problem} error=${error} />
        ${
          !view
            ? html`
                <h1>Not found</h1>
                <p>There is no view <code>${at.name}</code>. <a href="#/start">Start</a></p>
              `
            : !View
              ? html`<${Loading} />`
              : html`
                  <${Guard} place=${location.hash}>
                    <${View}
                      key=${at.name}
                      params=${at.params}
                      query=${at.query}
                      session=${session}
                      models=${models}
                      service=${service}
                      jobs=${jobs.current}
                      history=${history.current}
                    />
                  <//>
                `
        }
      </main>
      <footer>
        Midstream ${session.version} · ${["docs", "schema", "swagger", "flower", "grafana"]
          .filter((name) => session.links[name])
          .map((name) => html` <a href=${session.links[name]}>${name}</a>`)}
      </footer>
    </div>
  `;
}

function App() {
  const [session, setSession] = useState(null);
  const [reason, setReason] = useState("");
  const [error, setError] = useState(null);
  const end = useCallback((why) => {
    useSession("", () => {});
    setSession((known) => known && { ...known, signed_in: false, csrf: "" });
    setReason(why);
  }, []);
  const begin = useCallback((found) => {
    useSession(found.csrf, (failure) => end(`The session has ended: ${failure.detail}.`));
    setReason("");
    setSession(found);
  }, []);
  const ask = useCallback(async () => {
    try {
      begin(await get("/session"));
      setError(null);
    } catch (failure) {
      setError(failure);
      setTimeout(ask, 2000);
    }
  }, []);
  useEffect(() => void ask(), []);
  if (!session)
    return html`
      <main>
        <${Problem} error=${error} />
        ${!error && html`<p class="loading">Midstream is loading …</p>`}
      </main>
    `;
  return session.signed_in
    ? html`<${Shell} key=${session.key} session=${session} onEnd=${end} />`
    : html`<${Login} onSession=${begin} reason=${reason} />`;
}

/** Says so while calls have no answer, whatever the page shows by then. */
function Late() {
  const [late, set] = useState(0);
  useEffect(() => watchLate(set), []);
  return (
    late > 0 &&
    html`
      <${Problem}
        title="The service does not answer"
        error="it is busy or out of reach, or other windows of this browser hold all connections to it: close some."
      />
    `
  );
}

const root = document.getElementById("app");
root.textContent = "";
render(html`<${Late} /><${App} />`, root);

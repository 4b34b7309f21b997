// A closer look at part of a grid: what it would run, as the server says, and the button that runs it.

import { get, post } from "../lib/api.js";
import { Button, Problem, html, useEffect, useMemo, useRef, useState, useTask } from "../lib/ui.js";
import { count } from "../lib/format.js";
import { hookTitle } from "../lib/hooks.js";
import { closer } from "../lib/sweep_request.js";

/** How large the planned sweep is, in words. */
function sized({ cells, layers, pairs }) {
  const first = layers.length > 1 ? `layers ${layers[0]} to` : "layer";
  const columns = count(pairs[0].columns.length, "column");
  return `${count(cells, "cell")}: ${first} ${layers[layers.length - 1]}, ${columns}.`;
}

export function Closer({ grid, request, part, pair, close }) {
  const [byHead, setByHead] = useState(false);
  const [heads, setHeads] = useState(false); // whether the model's heads can be patched
  const [plan, setPlan] = useState(null);
  const [error, setError] = useState(null);
  const area = useRef(null);
  const asked = useMemo(() => {
    if (!request)
      return {
        failure: new Error(
          "the server did not keep the request of this sweep, so a closer look is not possible",
        ),
      };
    try {
      return { body: closer(request, grid.result, part, byHead) };
    } catch (failure) {
      return { failure };
    }
  }, [request, part, byHead]);

  useEffect(() => {
    if (area.current && area.current.ownerDocument.activeElement?.closest(".cells"))
      area.current.querySelector("h2").focus();
    if (!request || grid.result.axis !== "position") return;
    get(`/v1/models/${encodeURIComponent(request.model)}`).then(
      (model) => setHeads(model.hooks.includes("z")),
      () => {},
    );
  }, []);
  useTask(
    (signal) => {
      setPlan(null);
      setError(null);
      if (asked.body)
        post("/v1/sweeps?dry_run=true", asked.body, { signal }).then(
          setPlan,
          (failure) => signal.aborted || setError(failure),
        );
    },
    [asked],
  );

  const start = async () => {
    const job = await post("/v1/sweeps", asked.body);
    location.hash = `#/sweep/${job.id}`;
  };
  const names = grid.names(pair);
  const span = ([first, last], of) => (first === last ? of[first] : `${of[first]} to ${of[last]}`);
  return html`
    <section
      class="closer"
      aria-label="Closer look"
      ref=${area}
      onKeyDown=${(event) => event.key === "Escape" && close()}
    >
      <h2 tabindex="-1">Closer look</h2>
      <p>${hookTitle(part.hook)}, layers ${span(part.rows, grid.layers)}, ${span(part.columns, names)}</p>
      ${
        heads &&
        html`
          <p>
            <label>
              <input
                type="radio"
                name="closer"
                checked=${!byHead}
                onChange=${() => setByHead(false)}
              /> each token and layer separately
            </label>
            <label>
              <input
                type="radio"
                name="closer"
                checked=${byHead}
                onChange=${() => setByHead(true)}
              /> the heads of these layers
            </label>
          </p>
        `
      }
      <p role="status">
        ${plan ? sized(plan) : asked.body && !error ? "Planning …" : ""}
      </p>
      <${Problem} error=${asked.failure || error} />
      <p>
        <${Button} kind="main" disabled=${!plan} onClick=${start} onError=${setError}>
          Run the closer look
        <//> <${Button} onClick=${close}>Close<//>
      </p>
    </section>
  `;
}

// What components ask of the API: once, or again and again.

import { get } from "./api.js";
import { useEffect, useRef, useState, useTask } from "./ui.js";

/** Seconds until the next look while no model is served: after a start, loading one takes a minute. */
const NONE_S = 2;

/**
 * What `path` answers, of several the fields of all; undefined until then, null where it fails
 * (`onError` gets why). No path: undefined.
 */
export function useAnswer(paths, onError = () => {}) {
  const path = [paths].flat().filter(Boolean).join("\n");
  const [found, set] = useState({});
  useTask(
    (signal) => {
      if (!path) return;
      Promise.all(path.split("\n").map((each) => get(each, { signal }))).then(
        (values) => set({ path, value: Object.assign({}, ...values) }),
        (error) => signal.aborted || (set({ path, value: null }), onError(error)),
      );
    },
    [path],
  );
  return found.path === path ? found.value : undefined; // never what another path answered
}

/**
 * [what `path` answered last, how to ask now, why it failed last], asked again every `seconds` while
 * `busy(answer)`, until it is not found. No path: nothing is asked.
 */
export function usePolled(path, seconds, busy = () => true) {
  const [found, set] = useState({});
  const now = useRef(() => {});
  useEffect(() => {
    if (!path) return undefined;
    const stop = new AbortController();
    let timer = null;
    const look = async () => {
      clearTimeout(timer);
      try {
        const data = await get(path, stop);
        set({ data });
        if (!busy(data)) return;
      } catch (error) {
        if (stop.signal.aborted) return;
        set(({ data }) => ({ data, error }));
        if (error.status === 404) return;
      }
      timer = setTimeout(look, seconds * 1000);
    };
    now.current = look;
    look();
    return () => (stop.abort(), clearTimeout(timer));
  }, [path]);
  return [found.data, () => now.current(), found.error];
}

/** Draws the component again whenever the feed brings news. */
export function useJobs(jobs) {
  const [, redraw] = useState(0);
  useEffect(() => jobs.subscribe(() => redraw((n) => n + 1)), [jobs]);
}

/** The models as `GET /v1/models` lists them; undefined until they are known. */
export function useModels(onError) {
  const [found, , error] = usePolled("/v1/models", NONE_S, ({ data }) => !data.length);
  useEffect(() => void (error && onError(error)), [error]);
  return found && found.data;
}

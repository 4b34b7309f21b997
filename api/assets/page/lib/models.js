// The served models, for forms.

import { get } from "./api.js";
import { useEffect, useState } from "./ui.js";

/** Milliseconds until the next look while none is served: after a start, loading one takes a minute. */
const NONE_MS = 2000;

/** The models as `GET /v1/models` lists them; null until they are known. */
export function useModels(onError) {
  const [models, setModels] = useState(null);
  useEffect(() => {
    const stop = new AbortController();
    let timer = null;
    const load = async () => {
      try {
        const { data } = await get("/v1/models", { signal: stop.signal });
        setModels(data);
        if (!data.length) timer = setTimeout(load, NONE_MS);
      } catch (error) {
        if (!stop.signal.aborted) onError(error);
      }
    };
    load();
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, []);
  return models;
}

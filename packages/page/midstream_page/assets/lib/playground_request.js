// What the playground sends.

export const PATHS = { plain: "/v1/completions", chat: "/v1/chat/completions" };
export const TAG = "playground";

/** A module as an entry: one that is not saved yet has its own, and of a feature the slider is its value. */
export const entryOf = ({ name, scale, entry }) =>
  entry ? { ...entry, [entry.sae ? "value" : "scale"]: scale } : { module: name, scale };

/** Modules whose slider is not at zero. */
export const steeringOf = (form) => form.modules.filter(({ scale }) => scale !== 0).map(entryOf);

const messagesOf = ({ system, prompt }) => [
  ...(system ? [{ role: "system", content: system }] : []),
  { role: "user", content: prompt },
];

/** The tokens' text: what `/v1/tokenize` takes. */
export const asked = (form) =>
  form.mode === "chat" ? { messages: messagesOf(form) } : { prompt: form.prompt };

/** The fields hold text, as it was typed. */
function sampling(form) {
  const found = { max_tokens: Number(form.max_tokens), temperature: Number(form.temperature) };
  return form.seed === "" ? found : { ...found, seed: Number(form.seed) };
}

/**
 * What colours the tokens, as fields of a request. `form.colour`: null, {probe, label}, or {module,
 * hook, layer}.
 */
function colouring(form) {
  const { colour } = form;
  if (!colour) return {};
  if (colour.probe) return { probes: [{ probe: colour.probe, tokens: true }] };
  return {
    capture: { hooks: { [colour.hook]: [colour.layer] }, positions: "all", at: "after", tag: TAG },
    capture_wait: true,
  };
}

/** The body of a completion, plain or chat. */
export function bodyOf(form, steered) {
  const steering = steered ? steeringOf(form) : [];
  return {
    model: form.model,
    ...asked(form),
    ...sampling(form),
    ...(steering.length ? { steering } : {}),
    ...colouring(form),
  };
}

/** Field of an error → the form's field, such as `steering[1].module` → `module 1`; null: of none. */
export function fieldOf(field, form) {
  const steering = /^steering\[(\d+)\]/.exec(field);
  if (steering) {
    const used = form.modules.filter(({ scale }) => scale !== 0)[Number(steering[1])];
    return used ? `module ${used.name}` : null;
  }
  if (/^(prompt|messages)/.test(field)) return "prompt";
  if (/^(probes|capture)/.test(field)) return "colour";
  return ["model", "max_tokens", "temperature", "seed"].includes(field) ? field : null;
}

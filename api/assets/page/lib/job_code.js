// The request of a job as Python, curl and a command, to copy.

import { curl, python, shell } from "./code.js";

const json = (body) => JSON.stringify(body, null, 2);
const CALLS = { "/v1/jobs": "run", "/v1/completions": "completion", "/v1/chat/completions": "chat", "/v1/sweeps": "sweep" };
const IS_NAME = /^[A-Za-z_][A-Za-z0-9_]*$/;
const KEYWORDS = new Set("False None True and as assert async await break class continue def del elif else except finally for from global if import in is lambda nonlocal not or pass raise return try while with yield".split(" "));

function inPython(path, body, url) {
  const { stream, stream_options, ...fields } = body; // the client waits for the whole answer
  const names = Object.keys(fields);
  const plain = names.every((name) => IS_NAME.test(name) && !KEYWORDS.has(name));
  const given = plain
    ? names.map((name) => `        ${name}=${python(fields[name], "        ")},\n`).join("")
    : `        **${python(fields, "        ")},\n`;
  const show = { run: "for output in answer.outputs:\n        print(output.text)", sweep: "print(answer)" };
  return `from midstream import Client

with Client(${python(url)}) as client:  # the key: MIDSTREAM_API_KEY
    answer = client.${CALLS[path]}(
${given}    )
    ${show[CALLS[path]] || "print(answer.text)"}
`;
}

/** The fields of `POST /v1/jobs` that say the same as an OpenAI-style body; null where there are none. */
function asJob(path, body) {
  if (path === "/v1/jobs") return body;
  const sampling = ["max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos"];
  const same = ["model", "steering", "patch", "capture", "lens", "features", "probes", "readers", "lora", "metadata", "priority"];
  const dropped = ["prompt", "messages", "stream", "stream_options", "capture_wait", "user"];
  const job = { sampling: {} };
  for (const [name, value] of Object.entries(body)) {
    if (sampling.includes(name)) job.sampling[name] = name === "stop" && typeof value === "string" ? [value] : value;
    else if (same.includes(name)) job[name] = value;
    else if (!dropped.includes(name)) return null;
  }
  if (path === "/v1/chat/completions") job.messages = [body.messages];
  else if (typeof body.prompt === "string" || typeof body.prompt[0] === "number") job.prompts = [body.prompt];
  else job.prompts = body.prompt;
  return job;
}

function inShell(path, body, url) {
  const [verb, fields] = path === "/v1/sweeps" ? ["sweep", body] : ["submit", asJob(path, body)];
  if (fields === null) return null;
  return `midstream ${verb} --url ${shell(url)} --body /dev/stdin <<'JSON'
${json(fields)}
JSON
`;
}

/** {Python, curl, CLI} of a request; `keys`: whether the API asks for keys. A form that cannot say the same is left out. */
export function codeOf(path, body, { url = location.origin, keys = true } = {}) {
  const tabs = { Python: inPython(path, body, url), curl: curl(url, path, body, keys) };
  const command = inShell(path, body, url);
  return command === null ? tabs : { ...tabs, CLI: command };
}

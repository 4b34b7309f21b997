// A request as Python, curl and a command, to copy.

import { lean } from "./sweep_request.js";

/** JSON as a Python literal, over several lines where it is long. */
function python(value, indent = "") {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  const parts = Array.isArray(value)
    ? value.map((item) => python(item, inner))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${python(item, inner)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const line = `${open}${parts.join(", ")}${close}`;
  return line.length + indent.length <= 88 && !line.includes("\n")
    ? line
    : `${open}\n${parts.map((part) => `${inner}${part},\n`).join("")}${indent}${close}`;
}

/** One word of a POSIX shell. */
const shell = (text) => (/^[A-Za-z0-9_./:=,@%+-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);

const curl = (path, body, url, keyed) =>
  [
    `curl -s ${shell(url + path)} -H 'content-type: application/json'`,
    ...(keyed ? [`-H "authorization: Bearer $MIDSTREAM_API_KEY"`] : []),
    `-d ${shell(JSON.stringify(body))}`,
  ].join(" \\\n  ");

const TEXTS = ["clean", "corrupt", "answer", "foil"];

/** A sweep as the documentation teaches it: a study of the pairs, swept. */
function study(request, url, keyed) {
  const { model, pairs, ...fields } = request;
  const single = pairs.length === 1 && Object.keys(pairs[0]).every((name) => TEXTS.includes(name));
  const given = (of, indent) =>
    Object.entries(of)
      .map(([name, value]) => `${indent}${name}=${python(value, indent)},\n`)
      .join("");
  const what = single ? given(pairs[0], "        ") : `        ${python(pairs, "        ")},\n`;
  return `from midstream import Client, PatchStudy

with Client(${python(url)}) as client:${keyed ? "  # the key is in MIDSTREAM_API_KEY" : ""}
    study = PatchStudy${single ? "" : ".pairs"}(
${what}        client=client,
        model=${python(model)},
    )
    study.sweep(
${given(fields, "        ")}    )
    for cell in study.top(3):
        print(cell.hook, cell.layer, cell.label, f"{cell.value:.2f}")
`;
}

const CALLS = {
  "/v1/jobs": "run",
  "/v1/completions": "completion",
  "/v1/chat/completions": "chat",
  "/v1/attributions": "attribute",
  "/v1/doses": "dose",
};
const IS_NAME = /^[A-Za-z_][A-Za-z0-9_]*$/;
const KEYWORDS = new Set(
  (
    "False None True and as assert async await break class continue def del elif else except finally for " +
    "from global if import in is lambda nonlocal not or pass raise return try while with yield"
  ).split(" "),
);

function inPython(path, body, url, keyed) {
  if (path === "/v1/sweeps") return study(body, url, keyed);
  const { stream, stream_options, ...fields } = body; // the client waits for the whole answer
  const names = Object.keys(fields);
  const plain = names.every((name) => IS_NAME.test(name) && !KEYWORDS.has(name));
  const given = plain
    ? names.map((name) => `        ${name}=${python(fields[name], "        ")},\n`).join("")
    : `        **${python(fields, "        ")},\n`;
  const call = CALLS[path];
  const show = {
    run: ["for output in answer.outputs:", "    print(output.text)"],
    attribute: ["print(answer)", "print(answer.to_pandas())"],
    dose: ["print(answer.dose)"],
  }[call] || ["print(answer.text)"];
  if (fields.probes && call !== "run") show.push("print(answer.probes)");
  return `from midstream import Client

with Client(${python(url)}) as client:${keyed ? "  # the key is in MIDSTREAM_API_KEY" : ""}
    answer = client.${call}(
${given}    )
${show.map((line) => `    ${line}\n`).join("")}`;
}

/** The fields of `POST /v1/jobs` that say the same as an OpenAI-style body; null where there are none. */
function asJob(path, body) {
  if (path === "/v1/jobs") return body;
  if (path === "/v1/doses") return null;
  const sampling = [
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
  ];
  const same = [
    "model",
    "steering",
    "patch",
    "capture",
    "lens",
    "features",
    "probes",
    "readers",
    "lora",
    "metadata",
    "priority",
  ];
  const dropped = ["prompt", "messages", "stream", "stream_options", "capture_wait", "user"];
  const job = { sampling: {} };
  for (const [name, value] of Object.entries(body)) {
    if (sampling.includes(name))
      job.sampling[name] = name === "stop" && typeof value === "string" ? [value] : value;
    else if (same.includes(name)) job[name] = value;
    else if (!dropped.includes(name)) return null;
  }
  if (path === "/v1/chat/completions") job.messages = [body.messages];
  else if (typeof body.prompt === "string" || typeof body.prompt[0] === "number") job.prompts = [body.prompt];
  else job.prompts = body.prompt;
  return job;
}

/** Path → the command that takes its body. */
const GRIDS = { "/v1/sweeps": "sweep", "/v1/attributions": "attribute" };

function inShell(path, body, url) {
  const [verb, fields] = path in GRIDS ? [GRIDS[path], body] : ["submit", asJob(path, body)];
  if (fields === null) return null;
  return `midstream ${verb} --url ${shell(url)} --file /dev/stdin <<'JSON'
${JSON.stringify(fields, null, 2)}
JSON
`;
}

// others' data: what is empty there may say something
const AS_GIVEN = new Set(["tools", "response_format", "json", "metadata", "options", "chat_template_kwargs"]);
// that say nothing where they are {}; lens: {} and verify: {} ask for the defaults
const UNSAID = new Set(["metadata", "sampling"]);
const says = ([name, value]) =>
  value !== null &&
  (typeof value !== "object" || Object.keys(value).length > 0 || !(Array.isArray(value) || UNSAID.has(name)));

/** Without what says nothing: null and what is empty, at all depths. */
const told = (value) =>
  Array.isArray(value)
    ? value.map(told)
    : value && typeof value === "object"
      ? Object.fromEntries(
          Object.entries(value)
            .map(([name, item]) => [name, AS_GIVEN.has(name) ? item : told(item)])
            .filter(says),
        )
      : value;

/**
 * {Python, curl, CLI} of a request; `keyed`: the API asks for a key. A form that cannot say the same
 * is left out.
 */
export function codeOf(path, request, keyed) {
  const { priority, ...rest } = told(path in GRIDS ? lean(request) : request);
  const [url, body] = [location.origin, priority && priority !== "normal" ? { ...rest, priority } : rest];
  const command = inShell(path, body, url);
  return {
    Python: inPython(path, body, url, keyed),
    curl: curl(path, body, url, keyed),
    ...(command === null ? {} : { CLI: command }),
  };
}

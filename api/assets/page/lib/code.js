// Requests as text to copy: Python literals, shell words, and what a caller with a key needs.

/** JSON as a Python literal, over several lines where it is long. */
export function python(value, indent = "") {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  const parts = Array.isArray(value) ? value.map((item) => python(item, inner)) : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${python(item, inner)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const line = `${open}${parts.join(", ")}${close}`;
  return line.length + indent.length <= 88 && !line.includes("\n") ? line : `${open}\n${parts.map((part) => `${inner}${part},\n`).join("")}${indent}${close}`;
}

/** One word of a POSIX shell. */
export const shell = (text) => (/^[A-Za-z0-9_./:=,@%+-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);

/** `curl` of a JSON body; `keyed`: the API asks for a key. */
export const curl = (origin, path, body, keyed) =>
  `curl -s ${shell(origin + path)} -H 'content-type: application/json' \\\n${keyed ? `  -H "authorization: Bearer $MIDSTREAM_API_KEY" \\\n` : ""}  -d ${shell(JSON.stringify(body))}`;

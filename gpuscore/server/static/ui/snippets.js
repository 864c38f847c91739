// The same request for a shell, for gpuscore's Python client and for OpenAI's client.

/** @returns {[name: string, text: string][]} */
export function snippets(origin, path, body, hasKey) {
  return [
    ["curl", curl(origin, path, body, hasKey)],
    ["Python", python(origin, path, body, hasKey)],
    ["OpenAI's client", openai(origin, path, body, hasKey)],
  ];
}

function curl(origin, path, body, hasKey) {
  const key = hasKey ? '  -H "Authorization: Bearer $GPUSCORE_API_KEY" \\\n' : "";
  const json = JSON.stringify(body).replaceAll("'", "'\\''");
  return `curl -s ${origin}${path} \\\n${key}  -H 'Content-Type: application/json' \\\n  -d '${json}'\n`;
}

function python(origin, path, body, hasKey) {
  const key = hasKey ? ', api_key=os.environ["GPUSCORE_API_KEY"]' : "";
  const call = PYTHON_CALLS[path](body);
  return `${hasKey ? "import os\n\n" : ""}from gpuscore.client import Client\n\n` +
    `with Client(${literal(origin)}${key}) as client:\n` +
    `    result = client.${call.method}(\n${call.lines.map((l) => `        ${l},\n`).join("")}    )\n` +
    "print(result)\n";
}

const given = (name, value) => (value === undefined ? [] : [`${name}=${literal(value)}`]);

const PYTHON_CALLS = {
  "/v1/score": (body) => ({
    method: "score",
    lines: [
      literal(body.query ?? ""), literal(body.items), ...given("labels", body.labels),
      ...given("label_token_ids", body.label_token_ids),
      `apply_softmax=${literal(body.apply_softmax === true)}`, "return_label_logprobs=True",
      "return_label_mass=True",
      ...given("on_error", body.on_error), ...given("model", body.model),
    ],
  }),
  "/v1/rerank": (body) => ({
    method: "rerank",
    lines: [
      literal(body.query), literal(body.documents), ...given("instruction", body.instruction),
      ...given("on_error", body.on_error), ...given("model", body.model),
    ],
  }),
  "/v1/classify": (body) => ({
    method: "classify",
    lines: [
      literal(body.input), ...given("query", body.query), ...given("labels", body.labels),
      ...given("model", body.model),
    ],
  }),
};

/** OpenAI's client has no method for these routes: they go through its plain `post`. */
function openai(origin, path, body, hasKey) {
  const key = hasKey ? 'os.environ["GPUSCORE_API_KEY"]' : '"none"';
  const head = `${hasKey ? "import os\n\n" : ""}from openai import OpenAI\n\n` +
    `client = OpenAI(base_url=${literal(`${origin}/v1`)}, api_key=${key})\n`;
  const short = path.replace(/^\/v1/, "");
  return `${head}result = client.post(\n    ${literal(short)},\n    body=${literal(body)},\n` +
    "    cast_to=object,\n)\nprint(result)\n";
}

/** A value as a Python literal: JSON but for three words. */
export function literal(value) {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([k, v]) => `${literal(k)}: ${literal(v)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}

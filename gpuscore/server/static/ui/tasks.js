// What can be asked of the server: a body from the form, and rows from the answer.
//
// A new kind of question is one more entry of TASKS; the rest of the page knows only its functions:
//   body(form, info)      the request's body
//   read(answer, form, info)  {columns, rows, ranked}: see `row`
//   prompts(form, info)   the parts of each item's prompt for /tokenize, or null if the server alone
//                         makes them

const usageOf = (usage) => ({
  tokens: usage.prompt_tokens, cached: usage.prompt_tokens_details.cached_tokens,
});

/** A row of results: `parts` are the labels with their share and, if known, probability. */
const row = (index, text, main, parts, mass = null, error = null) =>
  ({ index, text: shown(text), main, parts, mass, error });

const shown = (item) => (typeof item === "string" ? item : JSON.stringify(item));
const named = (form) => (form.model ? { model: form.model } : {});
const failed = (answer) => new Map((answer.errors ?? []).map((one) => [one.index, one]));
const bad = (index, text, error) => row(index, text, null, [], null, `${error.code}: ${error.message}`);

export const TASKS = {
  rerank: {
    name: "Rerank, in the family's prompt", path: "/v1/rerank", uses: ["query", "items", "instruction"],
    items: "Documents", query: "Query",
    body: (form) => ({
      ...named(form), query: form.query, documents: form.items,
      ...(form.instruction ? { instruction: form.instruction } : {}), on_error: "null",
      return_label_mass: true,
    }),
    read(answer, form) {
      const rows = answer.results.map((one) => row(
        one.index, form.items[one.index], one.relevance_score,
        [{ label: "relevance", share: one.relevance_score, probability: null }],
        one.label_mass ?? null));
      const errors = [...failed(answer)].map(([i, error]) => bad(i, form.items[i], error));
      return { columns: ["relevance"], rows: [...rows, ...errors], ranked: true, ...usageOf(answer.usage) };
    },
    prompts: (form, info) => familyPrompts(form, info),
  },
  score: {
    name: "Score labels", path: "/v1/score", uses: ["query", "items", "labels", "family", "softmax"],
    items: "Items", query: "Query",
    body(form, info) {
      const [before, after] = surrounding(form, info);
      return {
        ...named(form), query: before, items: form.items.map((item) => joined(item, after)),
        ...labelsOf(form, info), apply_softmax: form.softmax,
        return_label_logprobs: true, return_label_mass: true, on_error: "null",
      };
    },
    read(answer, form, info) {
      const names = labelNames(form, info);
      const errors = failed(answer);
      const rows = answer.scores.map((scores, index) => {
        if (scores === null) return bad(index, form.items[index], errors.get(index));
        const parts = scores.map((share, j) => (
          { label: names[j], share, probability: Math.exp(answer.label_logprobs[index][j]) }));
        return row(index, form.items[index], scores[0], parts, answer.label_mass[index]);
      });
      return { columns: names, rows: byMain(rows), ranked: true, ...usageOf(answer.usage) };
    },
    prompts(form, info) {
      const [before, after] = surrounding(form, info);
      return form.items.map((item) => [{ text: before + joined(item, after), special: true }]);
    },
  },
  classify: {
    name: "Classify texts", path: "/v1/classify", uses: ["query", "items", "labels"],
    items: "Texts", query: "Query (guards only: the message that the texts answer)",
    body: (form) => ({
      ...named(form), input: form.items, ...(form.query ? { query: form.query } : {}),
      ...(form.labels.length ? { labels: form.labels } : {}), return_label_mass: true,
    }),
    read(answer, form) {
      const rows = answer.data.map((one) => row(
        one.index, form.items[one.index], Math.max(...one.probs),
        one.probs.map((share, j) => ({ label: answer.labels[j], share, probability: null })),
        one.label_mass ?? null));
      return { columns: answer.labels, rows, ranked: false, ...usageOf(answer.usage) };
    },
    prompts: (form, info) => (info.model_type.classifier && info.gpuscore.family
      ? familyPrompts(form, info)
      : form.items.map((text) => [{ text, special: true }])),
  },
};

export const offered = (info) => Object.keys(TASKS).filter(
  (task) => task !== "rerank" || Boolean(info.model_type.reranker));

/** Choose a task for a request that names none. */
export const usual = (info) => (info.model_type.reranker ? "rerank"
  : info.model_type.classifier ? "classify" : "score");

const byMain = (rows) => [...rows].sort((a, b) => (b.main ?? -1) - (a.main ?? -1) || a.index - b.index);

function labelsOf(form, info) {
  if (form.labels.length) return { labels: form.labels };
  return form.family && info.gpuscore.family
    ? { label_token_ids: info.gpuscore.family.label_token_ids } : {};
}

function labelNames(form, info) {
  if (form.labels.length) return form.labels;
  return (info.gpuscore.family?.labels ?? info.gpuscore.classes ?? []).map(String);
}

const joined = (item, after) => (typeof item === "string" ? item + after : item);

/** The text before and after each item: the query alone, or the family's prompt around it. */
function surrounding(form, info) {
  const family = form.family ? info.gpuscore.family : null;
  if (!family) return [form.query, ""];
  const text = family.prompt.map((part) => filled(part, form, family, "{document}")).join("");
  const at = text.lastIndexOf("{document}");
  return [text.slice(0, at), text.slice(at + "{document}".length)];
}

/** The family's prompts part by part, because the server makes tokens of them one by one. */
function familyPrompts(form, info) {
  const family = info.gpuscore.family;
  if (!family) return null;
  return form.items.map((item) => family.prompt.map(
    (part) => ({ text: filled(part, form, family, shown(item)), special: false })));
}

/** Fill a part's fields; doubled braces stand for single ones. */
function filled(part, form, family, document) {
  const values = {
    query: form.query, document, instruction: form.instruction || family.instruction,
  };
  return part.replace(/\{\{|\}\}|\{(\w+)\}/g, (found, name) => (
    found === "{{" ? "{" : found === "}}" ? "}" : values[name] ?? found));
}

// Tables of results: of one request, and of two beside each other.

import { bar, byId, count, download, make, number, percent, table } from "./dom.js";
import { writeCsv } from "./texts.js";
import { hover, MOST_PROMPTS, promptLine, buildTree, sharing, showTree, tokenise } from "./tokens.js";

const MOST_SHOWN = 1000;  // rows; the CSV has all

/** The section of one request: summary, table, tokens, export. */
export function showRun(run) {
  const section = make("section", { class: "run", "aria-label": `Request ${run.name}` },
    make("h3", {}, `${run.name}: ${run.task.name}`),
    make("p", { class: "summary" }, summary(run)),
    rowsTable(run));
  if (run.result.rows.length > MOST_SHOWN) {
    section.append(make("p", { class: "quiet" },
      `The first ${count(MOST_SHOWN)} of ${count(run.result.rows.length)} rows; the CSV has all.`));
  }
  const later = make("div", { class: "more" });
  const button = make("button", {
    type: "button", onclick: () => download(`gpuscore-${run.name}.csv`, "text/csv", csvOf([run])),
  }, "Export CSV");
  section.append(later, make("p", {}, button));
  showTokens(run, section, later);
  return section;
}

function summary(run) {
  const share = run.tokens ? ` (${percent(run.cached / run.tokens)})` : "";
  return `${run.model} · ${count(run.result.rows.length)} rows · ${count(run.tokens)} prompt tokens, ` +
    `${count(run.cached)} of them cached or shared${share} · ${run.milliseconds.toFixed(1)} ms in this browser`;
}

function rowsTable(run) {
  const { result } = run;
  const labels = result.columns;
  const several = labels.length > 1;
  const known = result.rows.some((row) => row.parts.some((part) => part.probability !== null));
  const mass = result.rows.some((row) => row.mass !== null);
  const head = [
    result.ranked ? "Rank" : "Number", "Item", labels[0] ?? "Score",
    ...(several ? labels.slice(1) : []),
    ...(known ? labels.map((label) => `P(${label})`) : []),
    ...(mass ? ["Label mass"] : []),
  ];
  let rank = 0;
  const rows = result.rows.slice(0, MOST_SHOWN).map((row) => {
    const item = make("td", { class: "item" }, row.text);
    item.dataset.index = row.index;
    if (row.error !== null) {
      const cell = make("td", { class: "error", colspan: head.length - 2 }, row.error);
      return ["–", item, cell];
    }
    rank += 1;
    return [
      String(rank), item, main(row.parts[0]),
      ...(several ? row.parts.slice(1).map((part) => number(part.share)) : []),
      ...(known ? row.parts.map((part) => number(part.probability)) : []),
      ...(mass ? [massCell(row.mass)] : []),
    ];
  });
  return table(result.ranked ? "Items, best first" : "Answers in the request's order", head, rows);
}

function main(first) {
  return make("td", { class: "main" }, bar(first.share, first.label), ` ${number(first.share)}`);
}

/** A small mass means that the model would have said something else. */
function massCell(mass) {
  const low = mass !== null && mass < 0.5;
  return make("td", { class: low ? "low" : "", title: low ? "The model would rather say something else" : null },
    number(mass));
}

async function showTokens(run, section, place) {
  const prompts = run.task.prompts(run.form, run.info);
  if (prompts === null || prompts.length === 0 || prompts.some((parts) => parts.some((part) => typeof part.text !== "string"))) {
    if (prompts === null) {
      place.append(make("p", { class: "quiet" }, "The server makes these prompts; their tokens are not shown."));
    }
    return;
  }
  const load = async (some) => {
    place.replaceChildren(make("p", { class: "quiet" }, "Reading tokens …"));
    try {
      const tokens = await tokenise(some, run.form.model);
      const shares = sharing(buildTree(tokens), tokens);
      for (const cell of section.querySelectorAll("td.item")) {
        const index = Number(cell.dataset.index);
        if (tokens[index] !== undefined) {
          hover(cell, () => promptLine(tokens[index], shares[index], tokens.length));
        }
      }
      const complete = some.length === prompts.length && run.result.rows.every((row) => row.error === null);
      place.replaceChildren(showTree(tokens, run, complete));
    } catch (error) {
      place.replaceChildren(make("p", { class: "quiet" }, `Tokens: ${error.message}`));
    }
    if (some.length < prompts.length) {
      place.append(make("button", { type: "button", onclick: () => load(prompts) },
        `Read the tokens of all ${count(prompts.length)} prompts`));
    }
  };
  await load(prompts.slice(0, MOST_PROMPTS));
}

/** The main scores of two requests item by item; only items that both have can be compared. */
export function showBoth(a, b) {
  const other = new Map(b.result.rows.map((row, rank) => [key(row), { row, rank }]));
  const rows = [];
  a.result.rows.forEach((row, rank) => {
    const found = other.get(key(row));
    if (found === undefined || row.main === null || found.row.main === null) return;
    const moved = rank - found.rank;
    rows.push([
      String(rank + 1), String(found.rank + 1),
      moved === 0 ? "=" : moved > 0 ? `▲ ${moved}` : `▼ ${-moved}`,
      make("td", { class: "item" }, row.text), number(row.main), number(found.row.main),
      signed(found.row.main - row.main),
    ]);
  });
  if (rows.length === 0) return make("p", { class: "quiet" }, "The two requests have no item in common.");
  rows.splice(MOST_SHOWN);
  return make("section", { class: "both", "aria-label": "Both requests" },
    make("h3", {}, "A beside B"),
    table("Items of both requests, in A's order",
      ["Rank in A", "Rank in B", "Moved in B", "Item", "A", "B", "B − A"], rows));
}

const key = (row) => row.text;
const signed = (value) => (value > 0 ? `+${number(value)}` : number(value));

/** CSV of all requests: a line for each item and label. */
export function csvOf(runs) {
  const lines = [["request", "task", "rank", "index", "item", "label", "share", "probability", "label_mass", "error"]];
  for (const run of runs) {
    run.result.rows.forEach((row, rank) => {
      const own = [run.name, run.taskName, rank + 1, row.index, row.text];
      if (row.error !== null) lines.push([...own, "", "", "", "", row.error]);
      for (const part of row.parts) {
        lines.push([...own, part.label, part.share, part.probability, row.mass, ""]);
      }
    });
  }
  return writeCsv(lines);
}

export function showError(name, error) {
  const facts = [
    error.status ? `status ${error.status}` : "", error.code, error.param ? `at ${error.param}` : "",
    error.requestId ? `request ${error.requestId}` : "",
  ].filter(Boolean).join(" · ");
  byId("said").textContent = `Request ${name} failed: ${error.message}`;
  return make("section", { class: "run error", role: "alert", "aria-label": `Request ${name}` },
    make("h3", {}, `${name}: the request failed`),
    make("p", { class: "message" }, error.message), facts ? make("p", { class: "quiet" }, facts) : null);
}

// The page's state in its address: in the fragment, which browsers never send.
//
//   /#query=...&items=...&labels=...&run
//
// Items are divided by line feeds. Labels are divided by line feeds, or else by commas. `run` runs
// the request at once. Fields of the second request begin with `b.`, such as `b.query`.

export const FIELDS = {
  task: "", query: "", items: "", format: "lines", labels: "", family: "", instruction: "",
  model: "", softmax: "1",
};
const MOST = 100_000;  // characters; longer addresses are cut by mail programs and the like

/** @returns {{a: object, b: object|null, run: boolean}} */
export function readState(fragment) {
  const given = new URLSearchParams(fragment.replace(/^#/, ""));
  const side = (prefix) => Object.fromEntries(
    Object.entries(FIELDS).map(([name, usual]) => [name, given.get(prefix + name) ?? usual]));
  const hasB = [...given.keys()].some((name) => name.startsWith("b."));
  return {
    a: defaultTask(side("")),
    b: hasB ? defaultTask(side("b.")) : null,
    run: given.has("run"),
  };
}

/** Without a task, labels mean /v1/score; the page chooses for a request without labels. */
function defaultTask(side) {
  return side.task === "" && side.labels !== "" ? { ...side, task: "score" } : side;
}

/** @returns {string} a fragment, or "" if it would be too long */
export function writeState(a, b, run = false) {
  const found = new URLSearchParams();
  for (const [side, prefix] of [[a, ""], [b, "b."]]) {
    if (side === null) continue;
    for (const [name, usual] of Object.entries(FIELDS)) {
      if (side[name] !== usual) found.set(prefix + name, side[name]);
    }
    if (prefix && ![...found.keys()].some((name) => name.startsWith("b."))) found.set("b.task", "");
  }
  const text = found.toString() + (run ? "&run" : "");
  return text.length > MOST ? "" : `#${text}`;
}

// The playground: the form, its state in the address, and what a run shows.

import { byId, copy, download, make } from "./dom.js";
import { exampleFor } from "./examples.js";
import { remember, startHistory } from "./history.js";
import { csvOf, showBoth, showError, showRun } from "./results.js";
import { BASE, call, setKey } from "./server.js";
import { Side } from "./side.js";
import { snippets } from "./snippets.js";
import { readState, writeState } from "./state.js";
import { TASKS } from "./tasks.js";

const AGAIN = 3000;  // milliseconds
const sides = { a: null, b: null };
const models = [];
let running = 0, wanted = false, hasKey = false, again = 0;

function start() {
  sides.a = new Side("A", changed);
  sides.b = new Side("B", changed);
  byId("sides").append(sides.a.element, sides.b.element);
  byId("requests").addEventListener("submit", (event) => { event.preventDefault(); run(); });
  byId("requests").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); run(); }
  });
  byId("compare").addEventListener("change", () => { showSides(); changed(); });
  byId("example").addEventListener("click", () => { showExample(); changed(); });
  byId("copy-a").addEventListener("click", () => { sides.b.state = sides.a.state; changed(); });
  byId("link").addEventListener("click", (event) => {
    copy(location.origin + location.pathname + fragment(true), event.currentTarget);
  });
  byId("key").addEventListener("change", (event) => {
    hasKey = event.target.value.trim() !== "";
    setKey(event.target.value);
    connect();
  });
  addEventListener("hashchange", () => {
    if (location.hash !== "#results") open(location.hash);
  });
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();  // the fragment is the form's state
    byId("results").focus();
  });
  startHistory(openAgain);
  open(location.hash);
}

/** Fill the form from a fragment, and run it if it says so. */
function open(hash) {
  const found = readState(hash);
  sides.a.state = found.a;
  if (found.b) sides.b.state = found.b;
  byId("compare").checked = found.b !== null;
  showSides();
  wanted = found.run;
  connect();
}

const isEmpty = (state) => ["query", "items", "labels"].every((name) => state[name] === "");

function showExample() {
  sides.a.state = { ...sides.a.state, ...exampleFor(sides.a), format: "lines" };
}

function openAgain(hash) {
  location.hash = hash;  // as a link would, so that the browser's way back works
}

/** Ask what the server has; a request that was asked for by the address runs afterwards. */
async function connect() {
  const box = byId("server");
  clearTimeout(again);
  try {
    const listed = (await call("/v1/models")).answer.data.map((one) => one.id);
    models.splice(0, models.length, ...listed);
    await Promise.all(Object.values(sides).map((side) => describe(side)));
    byId("run").disabled = false;
    const { info } = sides.a;
    const family = info.gpuscore.family ? `, family ${info.gpuscore.family.name}` : "";
    box.textContent = `${listed.join(", ")}${family} · ${info.model_dtype} · prompts of up to ` +
      `${info.max_input_length.toLocaleString("en")} tokens · gpuscore ${info.version}`;
    box.className = "";
  } catch (error) {
    box.textContent = error.message;
    box.className = "bad";
    byId("run").disabled = true;
    if (error.status === 401) byId("key").focus();
    else again = setTimeout(connect, AGAIN);  // it loads its model, or it was stopped
    return;
  }
  if (!wanted && !byId("compare").checked && isEmpty(sides.a.state)) showExample();
  showSnippets();
  if (wanted) {
    wanted = false;
    await run();
  }
}

async function describe(side) {
  const chosen = side.inputs.model.value || models[0];
  const model = models.includes(chosen) ? chosen : models[0];
  side.describe((await call(`/info?model=${encodeURIComponent(model)}`)).answer, models);
}

function showSides() {
  const both = byId("compare").checked;
  sides.b.element.hidden = !both;
  byId("copy-a").hidden = !both;
  byId("sides").className = both ? "two" : "";
}

/** Show the request as code, and put it into the address. */
async function changed(side, name) {
  if (name === "model") {
    try {
      await describe(side);
    } catch (error) {
      byId("said").textContent = error.message;
    }
  }
  history.replaceState(null, "", fragment(false) || location.pathname);
  showSnippets();
}

const fragment = (run) =>
  writeState(sides.a.state, byId("compare").checked ? sides.b.state : null, run);

function showSnippets() {
  const place = byId("code");
  let made;
  try {
    const { task, form, info } = asked("a");
    made = snippets(BASE, task.path, task.body(form, info), hasKey);
  } catch (error) {
    place.replaceChildren(make("p", { class: "quiet" }, error.message));
    return;
  }
  place.replaceChildren(...made.map(([name, text]) => {
    const shown = make("pre", { tabindex: 0 }, text);
    return make("details", {}, make("summary", {}, name), shown,
      make("button", { type: "button", onclick: (e) => copy(text, e.currentTarget, shown) }, "Copy"));
  }));
}

/** The task, values and model of one side; the second one has the first one's items by default. */
function asked(which) {
  const side = sides[which];
  if (!side.info) throw new Error("The server has not answered yet.");
  const instead = which === "b" ? sides.a.read().items : null;
  return { task: side.task, taskName: side.inputs.task.value, form: side.read(instead), info: side.info };
}

async function run() {
  const turn = ++running;  // of two runs at a time, the later one is shown
  byId("results").setAttribute("aria-busy", "true");
  byId("said").textContent = "Running …";
  const which = byId("compare").checked ? ["a", "b"] : ["a"];
  const runs = [];
  for (const one of which) runs.push(await ask(one));  // one after the other, so that times compare
  if (turn !== running) return;
  const good = runs.filter((found) => !found.error);
  const shown = runs.map((found) => (found.error ? showError(found.name, found.error) : showRun(found)));
  const parts = [make("div", { class: shown.length > 1 ? "two" : "" }, ...shown)];
  if (good.length === 2) parts.unshift(showBoth(good[0], good[1]), exportBoth(good));
  byId("results").replaceChildren(...parts);
  byId("results").setAttribute("aria-busy", "false");
  if (good.length === runs.length) byId("said").textContent = "Done.";
  const { state } = sides.a;
  remember(`${TASKS[state.task]?.name ?? state.task}: ${state.query.slice(0, 60)}`, fragment(false), openAgain);
}

const exportBoth = (runs) => make("p", {}, make("button", {
  type: "button", onclick: () => download("gpuscore-A-B.csv", "text/csv", csvOf(runs)),
}, "Export both as CSV"));

async function ask(which) {
  const { name } = sides[which];
  try {
    const { task, taskName, form, info } = asked(which);
    const { answer, milliseconds } = await call(task.path, task.body(form, info));
    const result = task.read(answer, form, info);
    return {
      name, task, taskName, form, info, result, milliseconds,
      tokens: result.tokens, cached: result.cached, model: answer.model,
    };
  } catch (error) {
    return { name, error };
  }
}

start();

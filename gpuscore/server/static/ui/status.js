// The status page: queue, batches, cache and speed, of the whole server and per replica, from /metrics.

import { bar, byId, count, make, number, percent, table } from "./dom.js";
import { mean, rate, readMetrics, sum } from "./metrics.js";
import { call, setKey } from "./server.js";

const KEPT = 120;  // points of a curve
const curves = new Map(), batches = new Map();  // batches: the last mean of each replica
let before = null, timer = 0, paused = false, info = null, lastShare = null;

async function look() {
  clearTimeout(timer);
  const started = performance.now();
  try {
    const text = (await call("/metrics")).answer;
    if (info === null) info = await limits();
    const now = { at: started, metrics: readMetrics(text) };
    show(before, now);
    before = now;
    say("", `Last answer at ${new Date().toLocaleTimeString()}.`);
  } catch (error) {
    say("bad", error.message);
    if (error.status === 401) {
      if (document.activeElement === document.body) byId("key").focus();
      return;  // until there is a key
    }
    before = null;
  }
  if (!paused) timer = setTimeout(look, 1000 * Number(byId("period").value));
}

/** The most tokens of a batch, by model. */
async function limits() {
  const models = (await call("/v1/models")).answer.data.map((one) => one.id);
  const found = await Promise.all(models.map(
    (name) => call(`/info?model=${encodeURIComponent(name)}`).catch(() => null)));
  if (found.some((one) => one === null)) return null;  // still loading: asked again next time
  return Object.fromEntries(found.map(({ answer }, i) => [models[i], answer.max_batch_tokens]));
}

function say(kind, text) {
  byId("server").className = kind;
  byId("server").textContent = text;
}

function show(last, now) {
  const { metrics } = now;
  const seconds = last ? (now.at - last.at) / 1000 : 0;
  const per = (name, wanted) => rate(last?.metrics ?? null, metrics, seconds, name, wanted);
  const replicas = [...(metrics.get("gpuscore_replica_up") ?? [])];
  const up = sum(metrics, "gpuscore_replica_up");
  byId("now").replaceChildren(make("h2", {}, "Now"), make("div", { class: "cards" },
    card("Ready", sum(metrics, "gpuscore_ready") ? "yes" : "no", `${up} of ${replicas.length} replicas`),
    curve("Requests waiting", sum(metrics, "gpuscore_requests_waiting"), count,
      `${count(sum(metrics, "gpuscore_tokens_waiting"))} tokens`),
    curve("Tokens computed per second", per("gpuscore_computed_tokens_total"), count),
    curve("Items per second", per("gpuscore_items_total"), (value) => number(value, 1)),
    curve("Requests per second", per("gpuscore_requests_total", { method: "POST" }), (value) => number(value, 1)),
    curve("Prompt tokens not computed", share(last, metrics), percent, "cached or shared, of the last requests"),
    card("Event loop", ms(mean(last?.metrics ?? null, metrics, "gpuscore_event_loop_lag_seconds")), "mean delay")));
  showReplicas(last, metrics, per, replicas);
  showRequests(last, metrics, per);
}

/** Of the latest requests; while there are none, that of the last ones stays. */
function share(last, metrics) {
  const change = (name) => sum(metrics, name) - (last ? sum(last.metrics, name) : 0);
  const tokens = change("gpuscore_prompt_tokens_total");
  if (tokens > 0) lastShare = change("gpuscore_cached_tokens_total") / tokens;
  return lastShare;
}

function showReplicas(last, metrics, per, replicas) {
  const device = new Map((metrics.get("gpuscore_replica_info") ?? []).map(
    ({ labels }) => [`${labels.model} ${labels.replica}`, labels.device]));
  const rows = replicas.map(({ labels, value }) => {
    const own = { model: labels.model, replica: labels.replica };
    const gauge = (name, more = {}) => (value ? sum(metrics, name, { ...own, ...more }) : null);
    const name = `${labels.model} ${labels.replica}`;
    const latest = mean(last?.metrics ?? null, metrics, "gpuscore_batch_tokens", own);
    if (latest !== null) batches.set(name, latest);
    const batch = batches.get(name), most = info?.[labels.model];
    const fill = batch === undefined || !most ? "–" : cell(batch / most, `${count(batch)} of ${count(most)} tokens`);
    const used = gauge("gpuscore_kv_usage_ratio");
    const cached = gauge("gpuscore_kv_pages", { state: "cached" });
    return [
      name, device.get(name) ?? "–",
      value ? "up" : make("td", { class: "low" }, "down"),
      shown(gauge("gpuscore_requests_waiting")), shown(gauge("gpuscore_tokens_waiting")),
      shown(per("gpuscore_computed_tokens_total", own)), fill,
      used === null ? "–" : cell(used, `${percent(used)} used`), shown(cached),
      shown(sum(metrics, "gpuscore_engine_restarts_total", own)),
    ];
  });
  byId("replicas").replaceChildren(make("h2", {}, "Replicas"),
    rows.length === 0 ? make("p", { class: "quiet" }, "No model is loaded yet.")
      : table("Engines; batch fill is that of the last batches", [
        "Replica", "Device", "State", "Requests waiting", "Tokens waiting", "Tokens/s", "Batch fill",
        "KV pages", "Pages cached", "Restarts",
      ], rows));
}

function showRequests(last, metrics, per) {
  const routes = [...new Set((metrics.get("gpuscore_requests_total") ?? [])
    .filter(({ labels }) => labels.method === "POST").map(({ labels }) => labels.route))].sort();
  const rows = routes.map((route) => {
    const all = sum(metrics, "gpuscore_requests_total", { route });
    const good = sum(metrics, "gpuscore_requests_total", { route, status: "200" });
    return [
      route, count(all), count(all - good), number(per("gpuscore_requests_total", { route }), 1),
      ms(mean(last?.metrics ?? null, metrics, "gpuscore_request_duration_seconds", { route })),
    ];
  });
  byId("requests").replaceChildren(make("h2", {}, "Requests"),
    rows.length === 0 ? make("p", { class: "quiet" }, "None yet.")
      : table("Requests by route", ["Route", "Answered", "Not 200", "Per second", "Mean time"], rows));
}

const shown = (value) => (value === null ? "–" : count(value));
const ms = (seconds) => (seconds === null ? "–" : `${(1000 * seconds).toFixed(1)} ms`);
const cell = (value, text) => make("td", { class: "main" }, bar(value, text), ` ${text}`);

function card(name, value, more = "") {
  return make("div", { class: "card" }, make("h3", {}, name), make("div", { class: "value" }, value),
    make("div", { class: "quiet" }, more || "\u00a0"));
}

/** A card with the curve of its last values. */
function curve(name, value, format, more = "") {
  const points = [...(curves.get(name) ?? []), value].slice(-KEPT);
  curves.set(name, points);
  const made = card(name, value === null ? "–" : format(value), more);
  made.append(line(points.filter((one) => one !== null)));
  return made;
}

function line(points) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", `0 0 ${KEPT} 20`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const most = Math.max(1e-9, ...points);
  const start = KEPT - points.length;
  const path = document.createElementNS(space, "path");
  path.setAttribute("d", points.map(
    (value, i) => `${i ? "L" : "M"}${start + i},${(19 - 18 * value / most).toFixed(2)}`).join(" "));
  svg.append(path);
  return svg;
}

byId("key").addEventListener("change", (event) => { setKey(event.target.value); look(); });
byId("period").addEventListener("change", () => { if (!paused) look(); });
byId("pause").addEventListener("click", (event) => {
  paused = !paused;
  event.target.setAttribute("aria-pressed", String(paused));
  event.target.textContent = paused ? "Go on" : "Pause";
  if (paused) clearTimeout(timer); else look();
});
look();

// Earlier requests, only if the reader asks for it. They stay in this browser; keys are never kept.

import { byId, make } from "./dom.js";

const WANTED = "gpuscore.history.wanted", KEPT = "gpuscore.history";
const MOST = 30;

/** @param {(fragment: string) => void} open shows an earlier request */
export function startHistory(open) {
  const box = byId("keep-history");
  box.checked = localStorage.getItem(WANTED) === "1";
  box.addEventListener("change", () => {
    if (box.checked) localStorage.setItem(WANTED, "1");
    else clear();
    show(open);
  });
  byId("clear-history").addEventListener("click", () => { clear(box.checked); show(open); });
  show(open);
}

function clear(wanted = false) {
  localStorage.removeItem(KEPT);
  if (!wanted) localStorage.removeItem(WANTED);
}

export function remember(title, fragment, open) {
  if (localStorage.getItem(WANTED) !== "1" || fragment === "") return;
  const others = kept().filter((one) => one.fragment !== fragment);
  const all = [{ title, fragment, at: new Date().toISOString() }, ...others].slice(0, MOST);
  try {
    localStorage.setItem(KEPT, JSON.stringify(all));
  } catch {  // the browser's room is used up: the newest alone
    localStorage.setItem(KEPT, JSON.stringify(all.slice(0, 1)));
  }
  show(open);
}

function kept() {
  try {
    return JSON.parse(localStorage.getItem(KEPT) ?? "[]");
  } catch {
    return [];
  }
}

function show(open) {
  const entries = kept();
  byId("clear-history").disabled = entries.length === 0;
  byId("earlier").replaceChildren(...entries.map((one) => make("li", {},
    make("button", { type: "button", class: "link", onclick: () => open(one.fragment) }, one.title),
    make("span", { class: "quiet" }, ` ${new Date(one.at).toLocaleString()}`))));
}

// Tokens of prompts, and the tree of what they share, from /tokenize.

import { byId, count, make, percent } from "./dom.js";
import { call } from "./server.js";

export const MOST_PROMPTS = 20;  // asked for without a click
const AT_ONCE = 4;

/**
 * Tokenise prompts.
 * @param {{text: string, special: boolean}[][]} prompts the parts of each
 * @returns {Promise<{id: number, text: string}[][]>}
 */
export async function tokenise(prompts, model) {
  const known = new Map();  // parts that prompts have in common are asked for once
  const ids = async (part) => {
    const name = JSON.stringify(part);
    if (!known.has(name)) {
      known.set(name, call("/tokenize", {
        prompt: part.text, add_special_tokens: part.special, return_token_strs: true,
        ...(model ? { model } : {}),
      }).then(({ answer }) => readable(answer, part.text)));
    }
    return known.get(name);
  };
  const found = new Array(prompts.length);
  const waiting = prompts.keys();
  const work = async () => {
    for (const index of waiting) {
      const parts = [];
      for (const part of prompts[index]) if (part.text !== "") parts.push(...await ids(part));
      found[index] = parts;
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, work));
  return found;
}

/** Bytes by the characters that stand for them in byte-level vocabularies (GPT-2's alphabet). */
const BYTES = new Map();
for (let byte = 0, other = 256; byte < 256; byte += 1) {
  const itself = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  BYTES.set(String.fromCodePoint(itself ? byte : other), byte);
  if (!itself) other += 1;
}

/** Vocabulary entries as text: byte-level ones if that gives the prompt back, or else as they are. */
export function readable(answer, text) {
  const entries = answer.token_strs.map((entry) => entry ?? "");
  const bytes = entries.map((entry) => [...entry].map((char) => BYTES.get(char)));
  const decode = (list) => new TextDecoder().decode(new Uint8Array(list));
  const isBytes = bytes.every((list) => list.every((byte) => byte !== undefined)) &&
    decode(bytes.flat()).includes(text);
  return answer.tokens.map((id, i) => (
    { id, text: isBytes ? decode(bytes[i]) : entries[i].replaceAll("▁", " ") }));
}

/** A node of the tree: tokens in a row, the prompts below it, and its branches. */
export function buildTree(prompts) {
  const grow = (indices, depth) => {
    const node = { tokens: [], prompts: indices, branches: [] };
    for (;;) {
      const at = prompts[indices[0]][depth];
      const all = at !== undefined &&
        indices.every((i) => prompts[i][depth] !== undefined && prompts[i][depth].id === at.id);
      if (!all) break;
      node.tokens.push(at);
      depth += 1;
    }
    const groups = new Map();
    for (const i of indices) {
      const next = prompts[i][depth];
      if (next === undefined) continue;
      groups.set(next.id, [...(groups.get(next.id) ?? []), i]);
    }
    node.branches = [...groups.values()].map((some) => grow(some, depth));
    return node;
  };
  return grow(prompts.map((_, i) => i), 0);
}

export const treeSize = (node) =>
  node.tokens.length + node.branches.reduce((sum, one) => sum + treeSize(one), 0);

/** How many prompts share each token of each prompt, by position. */
export function sharing(tree, prompts) {
  const found = prompts.map(() => []);
  const walk = (node) => {
    for (const i of node.prompts) for (const _ of node.tokens) found[i].push(node.prompts.length);
    node.branches.forEach(walk);
  };
  walk(tree);
  return found;
}

const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·");

export function tokenSpan(token, shares, all) {
  const kind = shares === undefined ? "" : shares === all ? "all" : shares > 1 ? "some" : "own";
  return make("span", { class: `token ${kind}`, title: `id ${token.id}` }, visible(token.text));
}

/** The prompt of one item: its tokens, marked by how many prompts share them. */
export function promptLine(tokens, shares, all) {
  return make("span", { class: "tokens" }, ...tokens.map((t, i) => tokenSpan(t, shares[i], all)));
}

/** The tree as nested lists, with what it saves. */
export function showTree(prompts, usage, complete) {
  const tree = buildTree(prompts);
  const total = prompts.reduce((sum, one) => sum + one.length, 0);
  const size = treeSize(tree);
  const saved = total === 0 ? 0 : 1 - size / total;
  const said = `${count(prompts.length)} prompts have ${count(total)} tokens; as a tree they are ` +
    `${count(size)}, ${percent(saved)} fewer. `;
  const agrees = !complete ? "" : total === usage.tokens
    ? "The server counted as many."
    : `The server counted ${count(usage.tokens)}: it makes these prompts differently.`;
  return make("details", { class: "tree" },
    make("summary", {}, "Shared tokens"),
    make("p", {}, said + agrees),
    make("p", { class: "legend" },
      tokenSpan({ id: "–", text: "in all" }, 2, 2), tokenSpan({ id: "–", text: "in some" }, 2, 3),
      tokenSpan({ id: "–", text: "in one" }, 1, 3)),
    make("ul", { class: "branches" }, branch(tree, prompts.length)));
}

function branch(node, all) {
  const below = node.branches.length
    ? make("ul", {}, ...node.branches.map((one) => branch(one, all))) : null;
  const whose = node.prompts.length > 1 ? `${count(node.prompts.length)} items`
    : `item ${node.prompts[0] + 1}`;
  return make("li", {},
    make("span", { class: "whose" }, `${count(node.tokens.length)} tokens, ${whose}: `),
    make("span", { class: "tokens" },
      ...node.tokens.map((token) => tokenSpan(token, node.prompts.length, all))),
    below);
}

/** Show a prompt's tokens beside the pointer or the focus; Escape hides them. */
export function hover(target, content) {
  const show = () => {
    const tip = byId("tip");
    tip.replaceChildren(content());
    tip.hidden = false;
    const place = target.getBoundingClientRect();
    tip.style.top = `${place.bottom + scrollY + 4}px`;
    tip.style.left = `${Math.max(8, Math.min(place.left, innerWidth - tip.offsetWidth - 8)) + scrollX}px`;
  };
  const hide = () => { byId("tip").hidden = true; };
  target.tabIndex = 0;
  target.setAttribute("aria-describedby", "tip");
  target.addEventListener("mouseenter", show);
  target.addEventListener("focus", show);
  target.addEventListener("mouseleave", hide);
  target.addEventListener("blur", hide);
  target.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
}

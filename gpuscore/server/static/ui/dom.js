// Small helpers around the document. Text only ever becomes text nodes, never markup.

/**
 * Make an element.
 * @param {string} tag
 * @param {Record<string, unknown>} properties `class`, `on...` listeners, attributes, or properties
 * @param {...(Node|string|null|undefined)} children
 */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** A bar from 0 to 1. Its width is set by script, which the content policy allows, unlike style="". */
export function bar(share, name) {
  const fill = make("span", { class: "fill" });
  fill.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return make("span", { class: "bar", role: "img", "aria-label": `${name} ${percent(share)}` }, fill);
}

/** A table that scrolls by itself, so that the page fits a phone, and says so where it does. */
export function table(caption, head, rows) {
  const cells = head.map((text) => make("th", { scope: "col" }, text));
  const body = rows.map((row) =>
    make("tr", {}, ...row.map((cell, i) =>
      i === 0 ? make("th", { scope: "row" }, cell) : cell instanceof HTMLTableCellElement ? cell
        : make("td", {}, cell))));
  const wide = make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": caption },
    make("table", {},
      make("caption", {}, caption),
      make("thead", {}, make("tr", {}, ...cells)),
      make("tbody", {}, ...body)));
  const more = make("p", { class: "sideways", hidden: true }, "More columns: scroll the table sideways →");
  new ResizeObserver(() => { more.hidden = wide.scrollWidth <= wide.clientWidth; }).observe(wide);
  return make("div", {}, more, wide);
}

export const number = (value, digits = 4) =>
  value === null || value === undefined ? "–"
    : value !== 0 && Math.abs(value) < 10 ** -digits ? value.toExponential(2)
      : value.toFixed(digits);

export const percent = (value) => `${(100 * value).toFixed(1)} %`;

export const count = (value) => Math.round(value).toLocaleString("en");

/** Copy a text and say so on the button; where the browser forbids it, select the text instead. */
export async function copy(text, button, shown) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {  // a page that was not loaded over HTTPS or from this machine has no clipboard
    if (shown) getSelection().selectAllChildren(shown);
    button.textContent = shown ? "Selected: press Ctrl+C" : "The browser forbids it";
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}

export function download(name, type, text) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// Items and labels from text, and tables to CSV.

export const FORMATS = ["lines", "csv", "json"];
const TEXT_FIELDS = ["text", "item", "document", "doc", "passage", "content"];

/**
 * Read items.
 * @param {string} text
 * @param {string} format `lines`: one per line, empty ones left out; `csv`: a column called text,
 *   item or document, or else the first one; `json`: an array, or JSON lines, of texts or objects
 * @returns {unknown[]} texts; objects without a text field stay objects
 */
export function readItems(text, format) {
  if (format === "csv") return ofCsv(readCsv(text));
  if (format === "json") return readJson(text).map(ofJson);
  return readLines(text);
}

export function readLines(text) {
  return text.split(/\r?\n/).filter((line) => line.trim() !== "");
}

/** Labels are exact, spaces included: one per line, or, without a line feed, divided by commas. */
export function readLabels(text) {
  if (/\n/.test(text)) return text.split(/\r?\n/).filter((label) => label !== "");
  return text.split(",").map((label) => label.trim()).filter((label) => label !== "");
}

export function guessFormat(name, text) {
  if (/\.(csv|tsv)$/i.test(name)) return "csv";
  if (/\.(json|jsonl|ndjson)$/i.test(name)) return "json";
  return /^\s*[[{]/.test(text) && tryJson(text) ? "json" : "lines";
}

function tryJson(text) {
  try {
    return readJson(text).length > 0;
  } catch {
    return false;
  }
}

function readJson(text) {
  const start = text.trim();
  if (start === "") return [];
  if (start.startsWith("[")) {
    return JSON.parse(start);
  }
  return readLines(text).map((line) => JSON.parse(line));
}

function ofJson(one) {
  if (typeof one !== "object" || one === null) return one;
  const field = TEXT_FIELDS.find((name) => typeof one[name] === "string");
  return field === undefined ? one : one[field];
}

function ofCsv(rows) {
  if (rows.length === 0) return [];
  const head = rows[0].map((name) => name.trim().toLowerCase());
  const column = head.findIndex((name) => TEXT_FIELDS.includes(name));
  const body = column < 0 ? rows : rows.slice(1);
  return body.map((row) => row[Math.max(0, column)]).filter((cell) => cell && cell.trim() !== "");
}

/** Read CSV (RFC 4180), or values divided by tabs if the first line has one and no comma. */
export function readCsv(text) {
  const first = text.split("\n", 1)[0];
  const comma = first.includes("\t") && !first.includes(",") ? "\t" : ",";
  const rows = [];
  let row = [], cell = "", quoted = false;
  for (let i = 0; i < text.length; i += 1) {
    const char = text[i];
    if (quoted) {
      if (char !== '"') cell += char;
      else if (text[i + 1] === '"') { cell += '"'; i += 1; }
      else quoted = false;
    } else if (char === '"' && cell === "") quoted = true;
    else if (char === comma) { row.push(cell); cell = ""; }
    else if (char === "\n") {
      row.push(cell.replace(/\r$/, ""));
      rows.push(row);
      row = []; cell = "";
    } else cell += char;
  }
  if (quoted) throw new SyntaxError("the CSV has an opening quote without a closing one");
  if (cell !== "" || row.length > 0) rows.push([...row, cell]);
  return rows.filter((cells) => cells.length > 1 || cells[0] !== "");
}

export function writeCsv(rows) {
  return rows.map((row) => row.map(quote).join(",") + "\r\n").join("");
}

function quote(value) {
  const raw = value === null || value === undefined ? "" : String(value);
  // A cell that begins like a formula would be computed by a spreadsheet.
  const text = typeof value === "string" && /^[=+\-@\t\r]/.test(raw) ? `'${raw}` : raw;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

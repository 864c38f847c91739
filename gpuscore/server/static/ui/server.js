// Calls of the server that this page came from. The key stays in this module's memory.

let key = "";

/** The server's address, with the path of a proxy in front of it, without a slash at its end. */
export const BASE = new URL(".", document.baseURI).href.replace(/\/$/, "");

export function setKey(value) { key = value.trim(); }

/** An error as the server says it. */
export class ServerError extends Error {
  constructor(status, error, requestId) {
    super(error.message);
    Object.assign(this, { status, code: error.code, param: error.param, requestId });
  }
}

/** @returns {Promise<{answer: any, milliseconds: number}>} */
export async function call(path, body) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const started = performance.now();
  const response = await fetch(BASE + path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
    credentials: "same-origin",  // of a proxy in front; the server itself knows no cookies
  }).catch(() => { throw new Error("The server does not answer."); });
  const text = await response.text();
  const milliseconds = performance.now() - started;
  if (!response.ok) {
    throw new ServerError(
      response.status, readError(text, response), response.headers.get("X-Request-Id"));
  }
  const isJson = (response.headers.get("Content-Type") ?? "").startsWith("application/json");
  return { answer: isJson ? JSON.parse(text) : text, milliseconds };
}

function readError(text, response) {
  try {
    const error = JSON.parse(text).error;
    if (error && typeof error.message === "string") return error;
  } catch {
    // Something between this page and the server has answered, such as a proxy: shown as it is.
  }
  return { message: text.slice(0, 500) || response.statusText, code: "", param: null };
}

"use strict";
const $ = (id) => document.getElementById(id);
const KEY = "jpaged-api-key";

/** An element with a class and a text; text is only ever set as text. */
function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Fetches from the server that this page is of; raises ServerError with the server's own message. */
async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  const text = await response.text();
  throw new ServerError(response.status, messageIn(text) || `The server answered ${response.status}.`);
}

/** The message of an error as OpenAI's interface words it, or the text itself if it is short. */
function messageIn(text) {
  try {
    const body = JSON.parse(text);
    const found = body.error?.message ?? body.message ?? body.detail ?? body.error;
    return typeof found === "string" ? found : "";
  } catch {
    return text.length < 300 && !text.includes("<") ? text.trim() : "";
  }
}

let answerKey = null; // what the dialog is open for

/** Asks for the API key. Resolves to whether one was given; it is kept for this tab only. */
function askForKey(reason) {
  if (answerKey) return Promise.resolve(false);
  $("key-reason").textContent = reason;
  $("key").value = sessionStorage.getItem(KEY) ?? "";
  $("key-dialog").showModal();
  return new Promise((resolve) => { answerKey = resolve; });
}

function closeKeyDialog(isGiven) {
  $("key-dialog").close();
  answerKey?.(isGiven);
  answerKey = null;
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault(); // the key goes nowhere but into the headers
  const key = $("key").value.trim();
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  closeKeyDialog(true);
});
$("key-cancel").addEventListener("click", () => closeKeyDialog(false));
$("key-dialog").addEventListener("cancel", (event) => {
  event.preventDefault();
  closeKeyDialog(false);
});

// A conversation by POST /v1/chat/completions. What the model says is only ever set as text.
let turns = []; // {role, content}, without the system prompt
let running = null; // the AbortController of the answer that is being written

// Text and code blocks: what stands between lines of three or more backticks, the last one maybe still open.

function blocks(text) {
  const found = [];
  let code = null, ticks = 3, lines = [];
  const close = (isCode) => {
    let text = lines.join("\n");
    if (!isCode) text = text.replace(/^\n+/, "").trimEnd(); // a block of code has a margin of its own
    if (isCode || text) found.push({ code: isCode, language: code ?? "", text });
    lines = [];
  };
  for (const line of text.split("\n")) {
    const fence = line.match(/^\s*(`{3,})\s*([^`]*)$/);
    if (fence && code === null) {
      close(false);
      code = fence[2].trim().split(/\s/)[0]; // the language, if it says one
      ticks = fence[1].length;
    } else if (fence && fence[1].length >= ticks && !fence[2].trim()) {
      close(true);
      code = null;
    } else lines.push(line);
  }
  close(code !== null);
  return found;
}

function render(body, text, isRunning = false) {
  const shown = blocks(text);
  if (isRunning && !shown.length) shown.push({ code: false, text: "" }); // a place for the cursor
  body.replaceChildren(...shown.map((block) => {
    if (!block.code) return element("div", "text", block.text);
    const box = element("div", "code"), pre = element("pre");
    if (block.language) box.append(element("div", "language", block.language));
    pre.tabIndex = 0; // so that it can be scrolled by keyboard
    pre.append(element("code", "", block.text));
    box.append(pre);
    return box;
  }));
}

function addMessage(role, text) {
  $("hello")?.remove();
  const message = element("div", `message ${role}`), body = element("div", "body");
  message.setAttribute("aria-label", role === "user" ? "You" : "The model");
  message.setAttribute("role", "group");
  message.append(body);
  render(body, text);
  $("messages").append(message);
  scrollDown(true);
  return { message, body };
}

function addError(text) {
  const box = element("p", "error", text);
  box.setAttribute("role", "alert");
  $("messages").append(box);
  scrollDown(true);
}

const scroller = $("scroll");
const isAtEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
function scrollDown(always) {
  if (always) scroller.scrollTop = scroller.scrollHeight;
}

/** The data of server-sent events, one after the other, however the bytes are cut. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", data = [];
  for (;;) {
    const { value, done } = await reader.read();
    rest += done ? "\n\n" : value;
    const lines = rest.split(/\r\n|\n|\r(?!$)/);
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
      else if (!line && data.length) {
        yield data.join("\n");
        data = [];
      }
    }
    if (done) return;
  }
}

function body() {
  const system = $("system").value.trim(), temperature = $("temperature").value, maxTokens = $("max-tokens").value;
  return {
    model: $("model").value || undefined,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns],
    stream: true,
    stream_options: { include_usage: true },
    ...(temperature !== "" ? { temperature: Number(temperature) } : {}),
    ...(maxTokens !== "" ? { max_tokens: Number(maxTokens) } : {}),
  };
}

const REASONS = { length: "cut at the most tokens", stop: "", abort: "ended by the server" };
function note(answer) {
  const parts = [], { first, last, began, tokens, reason } = answer;
  if (first !== null) {
    parts.push(`${tokens} token${tokens === 1 ? "" : "s"}`, `first after ${((first - began) / 1000).toFixed(2)} s`);
    if (tokens > 1 && last > first) parts.push(`${((1000 * (tokens - 1)) / (last - first)).toFixed(1)} tokens/s`);
  }
  const why = REASONS[reason] ?? reason;
  if (why) parts.push(why);
  return parts.join(" · ");
}

async function answer() {
  const { message, body: box } = addMessage("assistant", "");
  const foot = element("div", "note");
  message.append(foot);
  message.classList.add("running");
  message.setAttribute("aria-busy", "true"); // read out when it is whole, not token by token
  render(box, "", true);
  const told = { began: performance.now(), first: null, last: null, tokens: 0, reason: null };
  let text = "", chunks = 0, frame = 0, isWhole = false, failure = null;
  const paint = () => {
    frame = 0;
    const follow = isAtEnd();
    render(box, text, true);
    setNote();
    scrollDown(follow);
  };
  const setNote = () => { foot.textContent = note(told); };
  running = new AbortController();
  setRunning(true);
  try {
    const response = await ask("v1/chat/completions", {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body()), signal: running.signal,
    });
    for await (const data of events(response.body)) {
      if (data === "[DONE]") {
        isWhole = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(0, messageIn(data) || "The server reported an error.");
      const choice = chunk.choices?.[0], piece = choice?.delta?.content;
      if (piece) {
        told.last = performance.now();
        told.first ??= told.last;
        told.tokens = ++chunks; // until usage says it exactly
        text += piece;
      }
      if (choice?.finish_reason) told.reason = choice.finish_reason;
      if (chunk.usage) told.tokens = chunk.usage.completion_tokens;
      frame ||= requestAnimationFrame(paint);
    }
    if (!isWhole) throw new Error("the answer ended early");
  } catch (error) {
    if (running.signal.aborted) told.reason = "stopped";
    else failure = error;
  }
  cancelAnimationFrame(frame);
  running = null;
  setRunning(false);
  message.classList.remove("running");
  message.removeAttribute("aria-busy");
  const follow = isAtEnd();
  render(box, text);
  setNote();
  scrollDown(follow);
  if (text || (!failure && told.reason !== "stopped")) turns.push({ role: "assistant", content: text });
  else takeBack(message);
  if (failure) await report(failure);
}

/** The last turn has no answer: its text goes back to where it can be sent again. */
function takeBack(message) {
  const last = turns.pop();
  message.previousElementSibling?.remove();
  message.remove();
  if (!$("prompt").value) $("prompt").value = last.content;
}

async function report(error) {
  if (!(error instanceof ServerError)) {
    addError(`The connection to the server was lost (${error.message}).`);
  } else if (error.status === 401 || error.status === 403) {
    if (await askForKey(error.message)) loadModels();
    else addError(error.message);
  } else addError(error.message);
}

function setRunning(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  $("new").disabled = is;
}

function send() {
  const text = $("prompt").value.trim();
  if (!text || running) return;
  for (const box of document.querySelectorAll("#messages > .error")) box.remove();
  $("prompt").value = "";
  turns.push({ role: "user", content: text });
  addMessage("user", text);
  answer();
}

async function loadModels() {
  const select = $("model");
  try {
    const models = await (await ask("v1/models")).json();
    const chosen = select.value;
    select.replaceChildren(...models.data.map((model) => new Option(model.id, model.id)));
    if (chosen && models.data.some((model) => model.id === chosen)) select.value = chosen;
  } catch (error) {
    await report(error);
  }
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
$("stop").addEventListener("click", () => {
  running?.abort();
  $("prompt").focus();
});
$("new").addEventListener("click", () => {
  turns = [];
  $("messages").replaceChildren();
  $("prompt").focus();
});
$("toggle").addEventListener("click", () => {
  const shown = $("settings").toggleAttribute("hidden");
  $("toggle").setAttribute("aria-expanded", String(!shown));
});
$("set-key").addEventListener("click", async () => {
  if (await askForKey("The key that this server was started with, if any.")) loadModels();
});
loadModels();
$("prompt").focus();

// The engine as /dashboard/state tells of it. The map, the strips and the charts are drawn on canvases.
const POLL = 500, RETRY = 2000, SLOW = 2500, GIVE_UP = 20000; // milliseconds
const SPAN = 60; // seconds that the charts show
let state = null, samples = [], lastGood = 0, keyWasAsked = false;
let lit = null; // what is pointed at: {request: index} or {cell: index}
let holders = new Map(); // cell -> indices of requests
let grid = { columns: 1, size: 1 };
const rows = []; // of the list of requests: {item, canvas, ...}

const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const fine = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const format = (value) => (value < 10 && value % 1 ? fine : number).format(value);
const percent = (value) => (Number.isFinite(value) ? `${format(100 * value)} %` : "–");
const seconds = (value) => value < 0.9995 ? `${value < 0.01 ? (1000 * value).toFixed(1) : format(Math.round(1000 * value))} ms`
  : value < 100 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : `${format(value)} s`;
const count = (value, one, many = `${one}s`) => `${number.format(value)} ${value === 1 ? one : many}`;
const setText = (node, text) => { if (node.textContent !== text) node.textContent = text; };

// Colours follow the theme: canvases know no custom properties, so each is asked of an element that does.
let colours = {};
function readColours() {
  const probe = element("span");
  document.body.append(probe);
  for (const name of ["free", "owned", "cached", "shared-few", "shared-many", "prompt", "output", "padding", "lit", "text", "quiet", "line", "surface", "warn"]) {
    probe.style.color = `var(--${name})`;
    colours[name] = getComputedStyle(probe).color;
  }
  probe.remove();
}
const isDark = matchMedia("(prefers-color-scheme: dark)");
isDark.addEventListener("change", () => { readColours(); draw(); });

function mix(a, b, share) {
  const parts = [a, b].map((colour) => colour.match(/[\d.]+/g).map(Number));
  return `rgb(${[0, 1, 2].map((i) => Math.round(parts[0][i] + (parts[1][i] - parts[0][i]) * share)).join(" ")})`;
}
/** The colour of a page in one of the states ".", "c", "1" to "9". */
function colourOf(cell) {
  if (cell === ".") return colours.free;
  if (cell === "c") return colours.cached;
  if (cell === "1") return colours.owned;
  return mix(colours["shared-few"], colours["shared-many"], (Number(cell) - 2) / 7);
}
function hueOf(id) {
  let hash = 7;
  for (const letter of id) hash = (hash * 31 + letter.codePointAt(0)) % 100003;
  return `hsl(${(hash * 137.508) % 360} 62% ${isDark.matches ? 62 : 48}%)`;
}
function describe(cell) {
  if (cell === ".") return "free";
  if (cell === "c") return "free, its contents can be found again";
  if (cell === "1") return "held by one request";
  return `shared by ${cell === "9" ? "9 or more" : cell}`;
}

/** Fits a canvas to its place; returns its context and size in CSS pixels. */
function fit(canvas, height) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width, height];
}

// The map of the pool

const cellOf = (page) => Math.floor((page - 1) / state.snapshot.map.pages_per_cell);

function index() {
  holders = new Map();
  state.snapshot.requests.forEach((request, at) => {
    for (const page of request.block_table) {
      if (!page) continue; // given back: no token to come sees it
      const cell = cellOf(page);
      const held = holders.get(cell);
      if (!held) holders.set(cell, [at]);
      else if (held.at(-1) !== at) held.push(at);
    }
  });
}

function litCells() {
  if (lit?.cell !== undefined) return new Set([lit.cell]);
  const request = lit ? state.snapshot.requests[lit.request] : null;
  return request && new Set(request.block_table.filter(Boolean).map(cellOf));
}

function drawMap() {
  const { cells } = state.snapshot.map, canvas = $("map"), width = canvas.clientWidth;
  const most = innerWidth < 600 ? 320 : 430; // of its height
  let size = 30; // of a cell with the gap after it
  while (size > 3 && Math.ceil(cells.length / Math.floor(width / size)) * size > most) size--;
  const columns = Math.max(Math.floor(width / size), 1);
  grid = { columns, size };
  const [context] = fit(canvas, Math.ceil(cells.length / columns) * size);
  const side = size - (size > 5 ? 2 : size > 3 ? 1 : 0.5), shown = litCells(), byRequest = $("by-request").checked;
  const hues = byRequest ? state.snapshot.requests.map((request) => hueOf(request.id)) : [];
  context.font = `600 ${Math.min(side - 5, 13)}px system-ui, sans-serif`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (let at = 0; at < cells.length; at++) {
    const cell = cells[at], x = (at % columns) * size, y = Math.floor(at / columns) * size;
    const isLit = shown?.has(at);
    context.globalAlpha = shown && !isLit && cell !== "." ? 0.35 : 1;
    const owner = byRequest && cell !== "." && cell !== "c" ? holders.get(at)?.[0] : undefined;
    context.fillStyle = isLit ? colours.lit : owner === undefined ? colourOf(cell) : hues[owner];
    if (cell === "c" && side > 4 && !isLit) { // hollow: nobody holds it
      const edge = Math.max(side * 0.2, 1.5);
      context.lineWidth = edge;
      context.strokeStyle = context.fillStyle;
      context.strokeRect(x + edge / 2, y + edge / 2, side - edge, side - edge);
    } else context.fillRect(x, y, side, side);
    if (cell > "1" && cell <= "9" && side >= 11) {
      context.fillStyle = colours.surface;
      context.fillText(cell === "9" ? "9+" : cell, x + side / 2, y + side / 2 + 0.5);
    }
  }
  context.globalAlpha = 1;
}

function drawPool() {
  const { pages, num_pages, page_size, map, swap } = state.snapshot;
  const many = map.pages_per_cell > 1 ? `; a cell is ${map.pages_per_cell} pages, in the state of most of them` : "";
  setText($("pool-note"), `${count(num_pages, "page")} of ${count(page_size, "token")}${many}`);
  const owned = pages.used - pages.shared;
  const known = [["owned", "held by one request", owned], ["shared", "shared", pages.shared], ["cached", "free, can be found again", pages.cached], ["free", "free", pages.free]];
  fill($("legend"), known);
  $("map").setAttribute("aria-label", `Map of the KV pages: ${known.map(([, name, value]) => `${number.format(value)} ${name}`).join("; ")}`);
  const tiers = swap ? [["Host memory", swap.memory, swap.memory_pages], ["Disk", swap.disk, swap.disk_pages]] : [];
  const shown = tiers.filter(([, , places]) => places);
  const box = $("swap");
  while (box.children.length > shown.length) box.lastChild.remove();
  shown.forEach(([name, value, places], at) => {
    let meter = box.children[at];
    if (!meter) {
      meter = element("div", "meter");
      const track = element("div", "track");
      track.append(element("span"));
      meter.append(element("span"), track, element("span", "quiet"));
      box.append(meter);
    }
    setText(meter.children[0], name);
    meter.children[1].firstChild.style.width = `${(100 * value) / places}%`;
    setText(meter.children[2], `${number.format(value)} of ${count(places, "page")}`);
  });
}

/** A legend: [class of the swatch, name, value]. */
function fill(list, entries) {
  while (list.children.length > entries.length) list.lastChild.remove();
  entries.forEach(([kind, name, value], at) => {
    let item = list.children[at];
    if (!item) {
      item = element("li");
      item.append(element("span", `swatch ${kind}`), element("span"), element("b"));
      list.append(item);
    }
    setText(item.children[1], name);
    setText(item.children[2], typeof value === "number" ? format(value) : value);
  });
}

// The list of requests

function makeRow(at) {
  const item = element("li"), who = element("div", "who"), canvas = element("canvas");
  const [id, status, facts] = [element("span", "id"), element("span"), element("span", "facts")];
  item.tabIndex = 0;
  canvas.setAttribute("aria-hidden", "true"); // the facts say it in words
  who.append(id, status, facts);
  item.append(who, canvas);
  for (const name of ["pointerenter", "focus"]) item.addEventListener(name, () => point({ request: at }));
  for (const name of ["pointerleave", "blur"]) item.addEventListener(name, () => point(null));
  $("requests").append(item);
  return { item, id, status, facts, canvas };
}

function drawRequests() {
  const { requests, num_running, num_waiting } = state.snapshot, all = num_running + num_waiting;
  const left = all - requests.length;
  setText($("requests-note"), !all ? "None now: what comes shows up here." : `${number.format(num_running)} running, ${number.format(num_waiting)} waiting${left > 0 ? `; ${number.format(left)} of them not shown` : ""}`);
  $("requests-legend").hidden = !all;
  while (rows.length > requests.length) rows.pop().item.remove();
  const near = litRequests();
  requests.forEach((request, at) => {
    const row = (rows[at] ??= makeRow(at));
    setText(row.id, request.id);
    row.id.title = request.id;
    setText(row.status, request.state);
    row.status.className = `state ${request.state}`;
    const computed = Math.min(request.num_computed_tokens, request.num_prompt_tokens);
    const facts = [
      `prompt ${number.format(computed)}/${number.format(request.num_prompt_tokens)}${request.num_cached_tokens ? ` (${number.format(request.num_cached_tokens)} cached)` : ""}`,
      `output ${number.format(request.num_output_tokens)}/${number.format(request.max_tokens)}`,
      count(request.num_pages, "page"), seconds(request.age),
    ];
    if (request.num_preemptions) facts.push(`preempted ${request.num_preemptions}×`);
    if (request.priority) facts.push(`priority ${request.priority}`);
    setText(row.facts, facts.join(" · "));
    row.item.classList.toggle("lit", near.has(at));
    drawStrip(row.canvas, request);
  });
}

function drawStrip(canvas, request) {
  const [context, width] = fit(canvas, request.num_pages ? 21 : 9), { cells } = state.snapshot.map;
  const half = Math.round(width * 0.4), rest = width - half - 4;
  const part = (x, w, colour) => { context.fillStyle = colour; context.fillRect(x, 0, w, 8); };
  const share = (tokens) => (half * Math.min(tokens, request.num_prompt_tokens)) / request.num_prompt_tokens;
  part(0, half, colours.free);
  part(0, share(request.num_computed_tokens), colours.prompt);
  part(0, share(Math.min(request.num_cached_tokens, request.num_computed_tokens)), colours.cached);
  part(half + 4, rest, colours.free);
  part(half + 4, (rest * Math.min(request.num_output_tokens, request.max_tokens)) / Math.max(request.max_tokens, 1), colours.output);
  const table = request.block_table, step = Math.min(width / Math.max(table.length, 1), 10);
  const hue = $("by-request").checked ? hueOf(request.id) : null;
  table.forEach((page, at) => {
    const cell = page ? cells[cellOf(page)] : ".";
    const isLit = lit?.cell !== undefined && page && cellOf(page) === lit.cell;
    context.fillStyle = isLit ? colours.lit : hue && page ? hue : colourOf(page && (cell === "." || cell === "c") ? "1" : cell);
    context.fillRect(at * step, 12, Math.max(step - (step > 3 ? 1 : 0), 0.5), 8);
  });
}

// Pointing: at a request, which lights up its pages, or at a page, which lights up who holds it

function litRequests() {
  if (lit?.request !== undefined) return new Set([lit.request]);
  return new Set(lit ? (holders.get(lit.cell) ?? []) : []);
}

function point(at) {
  if (JSON.stringify(at) === JSON.stringify(lit)) return;
  lit = at;
  if (state) draw();
}

function hint() {
  const { map, requests, num_pages } = state.snapshot;
  if (lit?.cell !== undefined && lit.cell < map.cells.length) {
    const first = lit.cell * map.pages_per_cell + 1, last = Math.min(first + map.pages_per_cell - 1, num_pages);
    const ids = (holders.get(lit.cell) ?? []).map((at) => requests[at].id);
    const who = ids.length ? `: ${ids.slice(0, 12).join(", ")}${ids.length > 12 ? ` and ${ids.length - 12} more` : ""}` : "";
    return `${first === last ? `Page ${first}` : `Pages ${first} to ${last}, most of them`} ${describe(map.cells[lit.cell])}${who}`;
  }
  if (lit?.request !== undefined && requests[lit.request]) {
    const request = requests[lit.request];
    return `${request.id} holds ${count(request.num_pages, "page")}${request.num_pages ? ", lit in the map" : " while it waits"}.`;
  }
  return "Point at a page to see who holds it, at a request to see its pages. Arrow keys move over the map.";
}

const map = $("map");
function pointAtCell(event) {
  if (!state) return;
  const box = map.getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / grid.size);
  const at = Math.floor((event.clientY - box.top) / grid.size) * grid.columns + column;
  point(column < grid.columns && at >= 0 && at < state.snapshot.map.cells.length ? { cell: at } : null);
}
map.addEventListener("pointermove", pointAtCell);
map.addEventListener("pointerdown", pointAtCell);
map.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && point(null)); // a finger only lets go
map.addEventListener("blur", () => point(null));
map.addEventListener("keydown", (event) => {
  const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: grid.columns, ArrowUp: -grid.columns };
  if (!state || !(event.key in moves)) return;
  event.preventDefault();
  const at = lit?.cell === undefined ? 0 : lit.cell + moves[event.key];
  if (at >= 0 && at < state.snapshot.map.cells.length) point({ cell: at });
});

// Figures and charts

function recent(span = 2) {
  const now = state.time, within = samples.filter((sample) => sample.time > now - span);
  const total = { seconds: 0 };
  for (const sample of within) for (const name in sample) if (name !== "time") total[name] = (total[name] ?? 0) + sample[name];
  return total;
}
const decodeTokens = (sample) => Math.min(sample.output_tokens ?? 0, sample.scheduled_tokens ?? 0);
// Scheduled tokens are those of prompts and one for each output token: a sample in which only decode steps ran has no prompts.
const promptTokens = (sample) => (sample.steps === sample.decode_steps ? 0 : (sample.scheduled_tokens ?? 0) - decodeTokens(sample));

function drawTiles() {
  const { snapshot, totals } = state, total = recent(), per = (value) => (total.seconds ? value / total.seconds : 0);
  // What was scheduled beside one token for each of the output was of prompts (or computed again).
  const computed = Math.max(totals.num_scheduled_tokens - totals.num_output_tokens, 0);
  const cached = totals.num_cached_tokens / (totals.num_cached_tokens + computed || 1);
  const swaps = totals.num_pages_swapped_out + totals.num_pages_swapped_in;
  const tiles = [
    ["Output tokens/s", format(per(decodeTokens(total))), `${number.format(totals.num_output_tokens)} in all`],
    ["Prompt tokens/s", format(per(promptTokens(total))), `${format(per(total.steps ?? 0))} steps/s`],
    ["Running / waiting", `${number.format(snapshot.num_running)} / ${number.format(snapshot.num_waiting)}`, `at most ${number.format(snapshot.max_num_seqs)} run`],
    ["KV pages in use", percent(snapshot.pages.used / snapshot.num_pages), `${number.format(snapshot.pages.used)} of ${number.format(snapshot.num_pages)}`],
    ["Prefix cache hits", percent(cached), `${count(totals.num_cached_tokens, "token")}`],
    ["Preemptions", number.format(totals.num_preemptions), `${count(totals.num_page_copies, "page")} copied`],
    ["Pages swapped", number.format(swaps), `${number.format(totals.num_pages_swapped_out)} out, ${number.format(totals.num_pages_swapped_in)} in`],
    ["Late compiles", number.format(totals.num_compiles), "after warm-up"],
  ];
  const list = $("tiles");
  tiles.forEach(([name, value, note], at) => {
    let tile = list.children[at];
    if (!tile) {
      tile = element("div");
      tile.append(element("dt", "", name), element("dd"), element("dd", "note"));
      list.append(tile);
    }
    setText(tile.children[1], value);
    setText(tile.children[2], note);
  });
}

function niceTop(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 10].map((step) => step * power).find((top) => top >= value);
}

/** Series as steps over time, each sample as wide as the time it counts. `stacked`: areas upon each other. */
function chart(canvas, series, { stacked = false, top = null, unit = "" } = {}) {
  const [context, width, height] = fit(canvas, 130), left = 44, base = height - 18, high = 8;
  const start = state.time - SPAN, x = (time) => left + ((width - left - 4) * Math.max(time - start, 0)) / SPAN;
  const shown = samples.filter((sample) => sample.time > start);
  const sum = (sample) => series.reduce((total, one) => (stacked ? total + one.of(sample) : Math.max(total, one.of(sample))), 0);
  const most = top ?? niceTop(shown.reduce((value, sample) => Math.max(value, sum(sample)), 0));
  const y = (value) => base - ((base - high) * Math.min(value, most)) / most;
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colours.quiet;
  context.strokeStyle = colours.line;
  context.lineWidth = 1;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const share of [0, 0.5, 1]) {
    const at = Math.round(y(most * share)) + 0.5;
    context.beginPath();
    context.moveTo(left, at);
    context.lineTo(width - 4, at);
    context.stroke();
    context.fillText(format(most * share), left - 6, at);
  }
  context.textBaseline = "alphabetic";
  for (const [ago, align] of [[SPAN, "left"], [SPAN / 2, "center"], [0, "right"]]) {
    context.textAlign = align;
    context.fillText(ago ? `${ago} s ago` : "now", x(state.time - ago), height - 3);
  }
  const ratio = devicePixelRatio || 1, snap = (at) => Math.round(at * ratio) / ratio; // no seams between neighbours
  const below = new Map(shown.map((sample) => [sample, 0]));
  for (const one of series) {
    context.strokeStyle = context.fillStyle = one.colour();
    context.lineWidth = 1.8;
    context.beginPath();
    let end = null;
    for (const sample of shown) {
      const value = one.of(sample), [from, to] = [x(sample.time - sample.seconds), x(sample.time)];
      if (stacked) {
        const under = below.get(sample);
        context.fillRect(snap(from), y(under + value), snap(to) - snap(from), y(under) - y(under + value));
        below.set(sample, under + value);
      } else {
        if (end !== null && from - end < 2) context.lineTo(from, y(value));
        else context.moveTo(from, y(value));
        context.lineTo(to, y(value));
        end = to;
      }
    }
    if (!stacked) context.stroke();
  }
  const now = shown.at(-1);
  canvas.setAttribute("aria-label", now ? series.map((one) => `${one.name}: ${format(one.of(now))}${unit}`).join(", ") : "nothing yet");
  return series.map((one) => [one.kind, one.name, now ? `${format(one.of(now))}${unit}` : "–"]);
}

const paint = (name) => () => colours[name];
const perSecond = (of) => (sample) => of(sample) / sample.seconds;
const perStep = (of) => (sample) => (sample.steps ? of(sample) / sample.steps : 0);
function drawCharts() {
  fill($("rate-legend"), chart($("rate-chart"), [
    { name: "prompt", kind: "prompt", colour: paint("prompt"), of: perSecond(promptTokens) },
    { name: "output", kind: "output", colour: paint("output"), of: perSecond(decodeTokens) },
  ]));
  fill($("batch-legend"), chart($("batch-chart"), [
    { name: "prompts", kind: "prompt", colour: paint("prompt"), of: perStep(promptTokens) },
    { name: "decode rows", kind: "output", colour: paint("output"), of: perStep(decodeTokens) },
    { name: "padding", kind: "padding", colour: paint("padding"), of: perStep((sample) => sample.padded_tokens) },
  ], { stacked: true }));
  fill($("request-legend"), chart($("request-chart"), [
    { name: "running", kind: "prompt", colour: paint("prompt"), of: (sample) => sample.running },
    { name: "waiting", kind: "output", colour: paint("output"), of: (sample) => sample.waiting },
  ]));
  const share = (value) => (100 * value) / state.snapshot.num_pages;
  fill($("page-legend"), chart($("page-chart"), [
    { name: "held by one", kind: "owned", colour: paint("owned"), of: (sample) => share(sample.used - sample.shared) },
    { name: "shared", kind: "shared", colour: paint("shared-few"), of: (sample) => share(sample.shared) },
    { name: "can be found", kind: "cached", colour: paint("cached"), of: (sample) => share(sample.cached) },
  ], { stacked: true, top: 100, unit: " %" }));
}

const LATENCIES = [["ttft", "First token", "ttft"], ["tpot", "Per token, mean of a request", "tpot"], ["itl", "Gap between tokens", "itl"], ["e2e_latency", "Whole request", "e2e"]];
function drawLatencies() {
  const { latencies } = state, body = $("latencies");
  setText($("latency-note"), latencies.num_requests ? `${count(latencies.num_requests, "sequence")}, last ${count(Math.ceil(latencies.seconds), "second")}` : `none ended in the last ${count(Math.max(Math.ceil(latencies.seconds), 1), "second")}`);
  LATENCIES.forEach(([name, title, short], at) => {
    let row = body.children[at];
    if (!row) {
      row = element("tr");
      const head = element("th", "", title);
      head.scope = "row";
      head.append(element("span", "quiet small", ` ${short}`));
      row.append(head, ...Array.from({ length: 4 }, () => element("td")));
      body.append(row);
    }
    ["p50", "p90", "p99", "max"].forEach((rank, column) => {
      setText(row.children[column + 1], latencies[name] ? seconds(latencies[name][rank]) : "–");
    });
  });
}

function draw() {
  if (!state) return;
  drawTiles();
  drawPool();
  drawMap();
  drawRequests();
  drawCharts();
  drawLatencies();
  setText($("hint"), hint());
}

// The connection

function show(kind, status, banner = "", withKey = false) {
  setText($("status"), status);
  $("status").dataset.kind = kind;
  $("banner").hidden = !banner;
  $("banner").dataset.kind = kind;
  setText($("banner-text"), banner);
  setText($("banner-age"), banner && lastGood ? `What you see is of ${count(Math.round((performance.now() - lastGood) / 1000), "second")} ago.` : "");
  $("banner-key").hidden = !withKey;
  $("main").classList.toggle("stale", kind === "lost");
}

async function poll() {
  const since = samples.length ? `?since=${samples.at(-1).time}` : "";
  const slow = setTimeout(() => show("slow", "Waiting", `No answer yet: a long step, a compilation, or a busy server.`), SLOW);
  try {
    const response = await ask(`dashboard/state${since}`, { signal: AbortSignal.timeout(GIVE_UP) });
    const next = await response.json();
    if (samples.length && next.time < samples.at(-1).time) samples = []; // another server has taken its place
    samples = [...samples, ...next.history].filter((sample) => sample.time > next.time - SPAN - 5);
    state = next;
    $("main").hidden = false;
    lastGood = performance.now();
    if ($("status").dataset.kind !== "live" || !$("model").textContent) nameModel();
    if (lit?.request !== undefined && lit.request >= next.snapshot.requests.length) lit = null;
    index();
    draw();
    show("live", "Live");
    return POLL;
  } catch (error) {
    if (error instanceof ServerError && (error.status === 401 || error.status === 403)) {
      show("lost", "Key needed", `The server wants an API key: ${error.message}`, true);
      if (!keyWasAsked) {
        keyWasAsked = true;
        if (await askForKey(error.message)) return 0;
      }
      return RETRY;
    }
    if (error instanceof ServerError && error.status === 503 && !/crashed|stopped/.test(error.message)) show("slow", "Not ready", `${error.message}.`);
    else if (error instanceof ServerError) show("lost", "Error", `${error.message}. Trying again.`);
    else show("lost", "Connection lost", `The server cannot be reached. Trying again every ${RETRY / 1000} seconds.`);
    return RETRY;
  } finally {
    clearTimeout(slow);
  }
}

async function nameModel() {
  try {
    const models = await (await ask("v1/models")).json();
    setText($("model"), models.data.map((model) => model.id).slice(0, 3).join(", "));
  } catch {
    setText($("model"), "");
  }
}

let wake = null;
const sleep = (time) => new Promise((resolve) => {
  const timer = setTimeout(resolve, time);
  wake = () => { clearTimeout(timer); resolve(); };
});
async function changeKey() {
  if (await askForKey("The key that this server was started with, if any.")) wake?.();
}
$("set-key").addEventListener("click", changeKey);
$("banner-key").addEventListener("click", changeKey);
$("by-request").addEventListener("change", () => {
  $("legend").classList.toggle("by-request", $("by-request").checked);
  draw();
});
document.addEventListener("visibilitychange", () => wake?.());
addEventListener("resize", draw);
readColours();
(async () => {
  for (;;) {
    // Nobody looks at a hidden page: the engine is not asked.
    while (document.hidden) await sleep(60000);
    await sleep(await poll());
  }
})();

// The page of one run: takes its state and what is new of it from the stream, and shows it. Every text of a peer goes in
// as text, never as markup.

import { Curve, Timeline, scale, short } from "/charts.js";

const by = (id) => document.getElementById(id);
const STALE_MS = 20000;
let state = null;

// --- the stream -----------------------------------------------------------------------------------------------------

function token() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem("token");
}

async function follow() {
  let pause = 500;
  for (;;) {
    try {
      const key = token();
      const answer = await fetch("/api/v1/events", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
      if (answer.status === 401) { await askToken(key); continue; }
      if (!answer.ok) throw new Error(await answer.text());
      by("ask").hidden = true;
      pause = 500;
      await read(answer.body.getReader());
      lost("the dashboard hung up; trying again");
    } catch (error) {
      lost(`no connection: ${error.message.trim() || "the dashboard does not answer"}; trying again`);
    }
    await new Promise((resume) => setTimeout(resume, pause));
    pause = Math.min(10000, pause * 2);
  }
}

async function read(reader) {
  const decoder = new TextDecoder();
  let text = "", stale = null;
  for (;;) {
    clearTimeout(stale);
    stale = setTimeout(() => reader.cancel(), STALE_MS);
    const { done, value } = await reader.read();
    if (done) { clearTimeout(stale); return; }
    text += decoder.decode(value, { stream: true });
    const messages = text.split("\n\n");
    text = messages.pop();
    for (const message of messages) take(message);
  }
}

function take(message) {
  const kind = /^event: (.*)$/m.exec(message), data = /^data: (.*)$/m.exec(message);
  if (!kind || !data) return;
  const content = JSON.parse(data[1]);
  if (kind[1] === "state") state = content;
  else apply(content);
  say("");
  requestAnimationFrame(render);
}

function apply(patch) {
  Object.assign(state, patch.set);
  for (const [peer, one] of Object.entries(patch.peers || {})) {
    if (one === null) delete state.peers[peer];
    else state.peers[peer] = one;
  }
  if (patch.all_steps) state.steps = patch.all_steps;
  for (const row of patch.steps || []) {
    const at = state.steps.findIndex((known) => known[0] === row[0]);
    if (at >= 0) state.steps[at] = row;
    else state.steps.push(row);
  }
  if (patch.steps) state.steps.sort((a, b) => a[0] - b[0]);
  for (const log of ["churn", "moves", "events"]) {
    for (const entry of patch[log] || []) {
      const at = state[log].findIndex((known) => known.id === entry.id);
      if (at >= 0) state[log].splice(at, 1);
      state[log].push(entry);
      if (log === "churn") announce(entry);
    }
    state[log].splice(0, Math.max(0, state[log].length - 300));
  }
}

function askToken(refused) {
  sessionStorage.removeItem("token");
  say(refused ? "that token does not fit" : "a token is needed");
  by("state").textContent = "locked";
  by("ask").hidden = false;
  by("token").value = "";
  by("token").focus();
  return new Promise((resume) => {
    by("ask").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem("token", by("token").value.trim());
      resume();
    };
  });
}

// What is shown is not the present any more, and must not look like it.
function lost(words) {
  say(state ? `${words}. What is shown is from ${clock(state.at)}` : words);
  by("state").textContent = "not connected";
  by("state").className = "chip bad";
}

function say(words) { if (by("connection").textContent !== words) by("connection").textContent = words; }

function announce(entry) { by("announce").textContent = `${entry.name} ${WHAT[entry.what][0]}, step ${entry.step}`; }

// --- words ----------------------------------------------------------------------------------------------------------

const NONE = "–";
const STATES = {
  training: ["training", "good"], ready: ["ready", "good"], member: ["member", "good"], waiting: ["waiting to join", "warn"], syncing: ["getting its part", "warn"],
  starting: ["starting", "warn"], draining: ["leaving in order", "warn"], silent: ["does not answer", "bad"],
  stalled: ["stalled: does not answer", "bad"], away: ["away: cannot be reached", "bad"], lost: ["lost", "bad"],
  left: ["left", "off"], ended: ["ended", "off"],
};
const RUN_STATES = {
  training: ["training", "good"], waiting: ["waiting", "warn"], ended: ["ended", "off"], past: ["over, or cut short", "off"],
  stalled: ["stalled", "bad"], away: ["away", "bad"],
};
const WHAT = {
  joined: ["joined", "good"], left: ["left in order", "warn"], lost: ["was lost", "bad"], moved: ["took over another part", "warn"],
  silent: ["does not answer", "bad"], back: ["is back", "good"],
};
const UNHEARD = new Set(["silent", "stalled", "away"]);

const words = (name) => Object.hasOwn(STATES, name) ? STATES[name] : [name, "off"];
const number = (value, digits = 0) => value === null || value === undefined ? NONE
  : value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: 0 });
const fixed = (value, digits) => value === null || value === undefined ? NONE : value.toFixed(digits);
const percent = (value) => value === null || value === undefined ? NONE : `${Math.round(value * 100)} %`;
const rate = (value) => value === null || value === undefined ? NONE : `${short(value)}B/s`;
const clock = (at) => at ? new Date(at * 1000).toLocaleTimeString("en-GB") : NONE;

function stageName(part) {
  return part.replace("stage-", "stage ").replace(/\.v(\d+)of(\d+)/, ", variant $1 of $2");
}

function partName(part) {
  if (!part) return "no part";
  if (part.startsWith("shared-")) return `shared by ${part.slice(7)} stages`;
  return part === "ends" ? "ends (embedding, head)" : stageName(part);
}

function duration(seconds) {
  if (seconds === null || !Number.isFinite(seconds)) return NONE;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

// --- what is shown --------------------------------------------------------------------------------------------------

function make(name, properties = {}, ...children) {
  const made = document.createElement(name);
  Object.assign(made, properties);
  made.append(...children);
  return made;
}

// Keeps one element for each key, in order: focus and scroll stay where they are.
function keyed(parent, items, create, update) {
  const known = parent.known || (parent.known = new Map()), kept = new Map();
  let before = null;
  for (const [key, item] of items) {
    const one = known.get(key) || create(item, key);
    update(one, item, key);
    kept.set(key, one);
    const next = before ? before.nextSibling : parent.firstChild;
    if (next !== one) parent.insertBefore(one, next);
    before = one;
  }
  for (const [key, one] of known) if (!kept.has(key)) one.remove();
  parent.known = kept;
}

function put(node, text) { if (node.textContent !== text) node.textContent = text; }

function render() {
  if (!state) return;
  const { run } = state;
  const title = run.name || (run.id ? `run ${run.id.slice(0, 12)}` : "a run");
  put(by("run"), title);
  document.title = `${state.step ? `${state.step} · ` : ""}${title} · swarm`;
  const [said, mood] = RUN_STATES[state.state];
  put(by("state"), said);
  by("state").className = `chip ${mood}`;
  put(by("why"), state.why);
  by("why").hidden = !state.why;
  by("why").className = mood;
  keyed(by("notes"), state.notes.map((note) => [note, note]), () => make("li"), put);
  by("notes").hidden = !state.notes.length;
  figures();
  parts();
  charts();
  tables();
  logs();
  if (by("peer").open) facts(by("peer").shown);
}

function figures() {
  const { run } = state, left = run.steps === null ? null : Math.max(0, run.steps - state.step);
  const counted = Math.max(1, state.step - state.since_step + 1);
  const perStep = state.tokens_per_s && state.steps.length ? state.tokens / counted / state.tokens_per_s : null;
  const shown = [
    ["Step", run.steps === null ? number(state.step) : `${number(state.step)} of ${number(run.steps)}`],
    ["Loss", fixed(state.loss, 4)],
    ...(state.held_out ? [[`Held-out loss after step ${number(state.held_out[0])}`, fixed(state.held_out[1], 4)]] : []),
    ["Tokens a second", state.tokens_per_s === null ? NONE : short(state.tokens_per_s)],
    [state.since_step > 1 ? `Tokens since step ${number(state.since_step)}` : "Tokens so far",
      state.computed_tokens > state.tokens ? `${short(state.tokens)} learnt of ${short(state.computed_tokens)}` : short(state.tokens)],
    ["Peers", number(state.members)],
    ["Parameters", run.parameters === null ? NONE : short(run.parameters)],
    ["Time left", state.state !== "training" || left === null || perStep === null ? NONE : duration(left * perStep)],
  ];
  keyed(by("figures"), shown, (_, key) => make("div", {}, make("dt", { textContent: key }), make("dd")),
    (one, value) => put(one.lastChild, value));
}

function parts() {
  const placed = new Set(state.parts.flatMap((part) => part.peers));
  const rest = Object.keys(state.peers).filter((peer) => !placed.has(peer));
  const here = rest.filter((peer) => state.peers[peer].here);
  const groups = state.parts.map((part) => [part.part, { title: partName(part.part), ...part }]);
  const others = [
    ["trainers", "Trainers", here.filter((peer) => state.peers[peer].role === "trainer"), "They bring the data, and hold no part."],
    ["others", "Others", here.filter((peer) => state.peers[peer].role !== "trainer"), "They help others find the run, and hold no part."],
    ["coming", "On their way", rest.filter((peer) => state.peers[peer].state === "waiting"), state.steps.length ? "They wait to be let in at the end of a step." : "They wait for the run to begin."],
  ];
  for (const [key, title, peers, about] of others) if (peers.length) groups.push([key, { title, peers, about }]);
  keyed(by("parts"), groups, group, (row, part) => {
    put(row.querySelector("h3"), part.title);
    put(row.querySelector(".turnout"), part.about || [turnout(part), part.said].filter(Boolean).join("; "));
    put(row.querySelector(".why"), part.why ? Object.entries(part.why).map(([name, why]) => `${name}: ${why}`).join("; ") : "");
    keyed(row.querySelector(".cards"), part.peers.filter((peer) => state.peers[peer]).map((peer) => [peer, state.peers[peer]]), card, fill);
  });
}

function group() {
  const about = make("div", {}, make("h3"), make("p", { className: "turnout muted" }), make("p", { className: "why muted" }));
  return make("div", { className: "part" }, about, make("div", { className: "cards" }));
}

function turnout(part) {
  if (part.participating === null) return `${part.live} there`;
  return `${part.live} live, ${part.participating} in the last averaging, ${part.averaged} with work in it`;
}

function card(one, peer) {
  const bar = make("span", { className: "bar" }, ...["busy", "waiting", "idle"].map((kind) => make("i", { className: kind })));
  const made = make("button", { type: "button", className: "card" }, make("strong"), make("span", { className: "what" }), bar,
    make("span", { className: "load" }), make("span", { className: "why" }));
  made.addEventListener("click", () => { by("peer").shown = peer; facts(peer); by("peer").showModal(); });
  return made;
}

function fill(one, peer) {
  const [said, mood] = words(peer.state);
  one.className = `card ${mood}${peer.probation.length ? " warn" : ""}`;
  put(one.querySelector("strong"), peer.name);
  put(one.querySelector(".what"), [said, peer.link === "relayed" || peer.reachability === "relayed" ? "through a relay" : "",
    peer.averaging ? "averaging" : ""].filter(Boolean).join(", "));
  const bar = one.querySelector(".bar"), known = peer.busy !== null;
  bar.hidden = !known;
  for (const kind of ["busy", "waiting", "idle"]) bar.querySelector(`.${kind}`).style.width = known ? `${peer[kind] * 100}%` : "0";
  const load = [];
  if (known) load.push(`${percent(peer.busy)} busy, ${percent(peer.waiting)} waiting`);
  if (peer.queued) load.push(`${peer.queued} queued`);
  put(one.querySelector(".load"), load.join(", "));
  put(one.querySelector(".why"), peer.probation.length ? `on probation: ${peer.probation[0].why || "it failed"}` : UNHEARD.has(peer.state) ? peer.why : "");
}

function facts(id) {
  const peer = state.peers[id];
  if (!peer) return;
  put(by("peer-name"), peer.name);
  const [said] = words(peer.state);
  const shown = [
    ["Peer id", id],
    ["State", peer.why ? `${said}: ${peer.why}` : said],
    ["Role", peer.role === "stage" ? "stage host" : peer.role],
    ["Holds", partName(peer.part)],
    ["Keeps copies of", peer.copies.map(partName).join(", ") || "nothing"],
    ["Region", peer.region || NONE],
    ["Device", peer.busy === null ? NONE : `${percent(peer.busy)} computing, ${percent(peer.waiting)} waiting for others, ${percent(peer.idle)} nothing to do`],
    ["A microbatch takes", peer.compute_ms === null ? NONE : `${number(peer.compute_ms, 1)} ms forward and backward`],
    ["Work", peer.under_way === null ? NONE : `${peer.under_way} microbatches under way, ${peer.queued} queued`],
    ["Sends, receives", `${rate(peer.sent_per_s)}, ${rate(peer.received_per_s)}`],
    ["Reached", `${peer.link === "self" ? "shown by itself" : peer.link}${peer.round_trip_ms === null ? "" : `, ${number(peer.round_trip_ms, 1)} ms there and back`}`],
    ["Counted work", `${number(peer.microbatches)} microbatches, ${number(peer.tokens)} tokens`],
    ["Counted data", `${number(peer.trained_microbatches)} microbatches, ${number(peer.trained_tokens)} tokens`],
    ["On probation", peer.probation.map((one) => `by ${one.by} for ${number(one.left_s)} s: ${one.why || "it failed"}`).join("; ") || "no"],
  ];
  if (peer.addresses) shown.push(["Addresses", peer.addresses.join(", ") || NONE]);
  const rows = shown.flatMap(([name, value]) => [[`${name}.`, ["dt", name]], [name, ["dd", value]]]);
  keyed(by("peer-facts"), rows, ([tag]) => make(tag), (one, [, text]) => put(one, text));
}

const curves = {
  loss: new Curve(by("loss"), (row) => row[1], { title: "Loss", say: (value) => value.toFixed(4) }, readout),
  speed: new Curve(by("speed"), (row) => row[2], { title: "Tokens a second", say: short }, readout),
};
const timeline = new Timeline(by("churn"));

function readout(row) {
  put(by("readout"), `Step ${row[0]}: loss ${fixed(row[1], 4)}, ${row[2] === null ? NONE : short(row[2])} tokens/s, ` +
    `${number(row[3])} microbatches, ${number(row[4])} members, closed at ${clock(row[5])}`);
}

function charts() {
  const range = scale(state.steps.map((row) => row[0]));
  curves.loss.show(state.steps, range);
  curves.speed.show(state.steps, range);
  timeline.show(lives(range), range);
}

// Each peer with the spans of steps in which it was there: who comes back has several.
function lives({ first, last }) {
  const found = new Map();
  for (const [peer, one] of Object.entries(state.peers)) {
    if (one.state !== "waiting") found.set(peer, { name: one.name, off: !one.here, spans: [{ from: first, to: null }], marks: [] });
  }
  for (const entry of state.churn) {
    const life = found.get(entry.peer);
    if (!life || entry.step < first) continue;
    const span = life.spans[life.spans.length - 1];
    if (entry.what === "silent") life.marks.push({ step: entry.step, sign: "○", bad: true });
    if (entry.what === "back" && span.to === null) life.marks.push({ step: entry.step, sign: "●" });
    else if (entry.what === "joined" || entry.what === "back") {
      if (span.to === null) span.from = entry.step;
      else life.spans.push({ from: entry.step, to: null });
      life.marks.push({ step: entry.step, sign: "▸" });
    }
    if (entry.what === "left" || entry.what === "lost") {
      span.to = entry.step;
      life.marks.push({ step: entry.step, sign: entry.what === "lost" ? "✕" : "◂", bad: entry.what === "lost" });
    }
  }
  for (const life of found.values()) for (const span of life.spans) span.to ??= last;
  return [...found.values()].sort((a, b) => a.spans[0].from - b.spans[0].from || (a.name < b.name ? -1 : 1)).slice(-40);
}

function tables() {
  const newest = state.steps.slice(-20).reverse().map((row) => [row[0], row]);
  rows(by("steps"), newest, (row) => [number(row[0]), fixed(row[1], 4), row[2] === null ? NONE : short(row[2]), number(row[3]), number(row[4]), clock(row[5])]);
  const all = Object.entries(state.peers), sum = (key) => all.reduce((sum, [, peer]) => sum + peer[key], 0);
  const computed = sum("tokens"), brought = sum("trained_tokens"), share = (part, total) => part && total ? part / total : null;
  const workers = all.filter(([, peer]) => peer.tokens || peer.trained_tokens || peer.here)
    .sort(([, a], [, b]) => b.tokens + b.trained_tokens - a.tokens - a.trained_tokens || (a.name < b.name ? -1 : 1));
  const some = (value) => value ? number(value) : NONE;
  put(by("since"), state.since_step ? `, counted since step ${number(state.since_step)}` : "");
  rows(by("shares"), workers, (peer) => [peer.here ? peer.name : `${peer.name} (${(words(peer.state))[0]})`, partName(peer.part),
    some(peer.microbatches), some(peer.tokens), share(peer.tokens, computed),
    some(peer.trained_microbatches), some(peer.trained_tokens), share(peer.trained_tokens, brought)]);
  const links = state.links.map((link) => [`${link.from}>${link.to}`, link]);
  by("link-table").hidden = by("link-table").parentElement.hidden = !links.length;
  by("no-links").hidden = !!links.length;
  put(by("no-links"), state.source.kind === "files" ? "The files of a run do not tell what goes over which link."
    : "Nobody has said yet what goes over which link.");
  const name = (peer) => state.peers[peer] ? state.peers[peer].name : peer.slice(-6);
  rows(by("link-table"), links, (link) => [name(link.from), name(link.to), link.kind === "relayed" ? "through a relay" : link.kind, rate(link.bytes_per_s),
    state.peers[link.to] && state.peers[link.to].round_trip_ms !== null ? `${number(state.peers[link.to].round_trip_ms, 1)} ms` : NONE]);
}

function rows(table, items, cells) {
  keyed(table.tBodies[0], items, (item) => make("tr", {}, ...cells(item).map((_, index) =>
    index ? make("td") : make("th", { scope: "row" }))), (row, item) => {
    cells(item).forEach((value, index) => {
      const cell = row.children[index];
      if (typeof value === "string") { put(cell, value); return; }
      if (!cell.firstChild) cell.append(make("span", { className: "bar" }, make("i", { className: "busy" })), make("span"));
      cell.firstChild.hidden = value === null;
      cell.firstChild.firstChild.style.width = `${(value || 0) * 100}%`;
      put(cell.lastChild, percent(value));
    });
  });
}

function logs() {
  const newest = (log) => state[log].slice().reverse().map((entry) => [entry.n, entry]);
  const line = () => make("li", {}, make("time"), make("b"), make("span"));
  const tell = (one, at, head, mood, text) => {
    put(one.children[0], at);
    put(one.children[1], head);
    one.children[1].className = mood;
    put(one.children[2], text);
  };
  keyed(by("churn-log"), newest("churn"), line, (one, entry) => {
    const [words, mood] = WHAT[entry.what];
    const part = entry.part ? ` (${stageName(entry.part)})` : "";
    tell(one, `step ${entry.step}`, `${entry.name} ${words}`, mood, `${part}${entry.why ? `: ${entry.why}` : ""}`);
  });
  keyed(by("moves-log"), newest("moves"), line, (one, entry) => {
    const times = entry.times ? ` (${entry.times} times)` : "";
    if (entry.what === "part") tell(one, `step ${entry.step}`, `${entry.who} took over ${partName(entry.new)}`, "warn", `, before ${partName(entry.old)}: ${entry.why}`);
    else tell(one, `step ${entry.step}`, `work of ${entry.old} went to ${entry.new}`, "", `, stage ${entry.stage}, ${entry.way}: ${entry.why}${times}`);
  });
  keyed(by("events-log"), newest("events"), line, (one, entry) => {
    const text = entry.text === "(address)" ? "at an address that is not shown" : entry.text;
    tell(one, clock(entry.at), entry.label, "", ` ${text}${entry.who ? ` (${entry.who})` : ""}`);
  });
  for (const [id, words] of [["churn-log", "Nobody came or went."], ["moves-log", "Nothing had to move."], ["events-log", "Nothing happened yet."]]) {
    by(id).dataset.empty = by(id).children.length ? "" : words;
  }
}

by("peer").addEventListener("click", (event) => { if (event.target === by("peer")) by("peer").close(); });
follow();

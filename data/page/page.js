// The human's page of nanoHH, all of its behaviour; feedback.py has the models and the files.
//
//   load    what does the server know of this tab's conversation? The page goes on from there
//   ask     a message; two answers arrive piece by piece, as lines of JSON
//   choose  which is better, and by how much; the conversation goes on from that answer
//
// Whatever is sent has a name of its own (conversation and turn, and an id for a choice), so it can
// be sent again after a lost connection or a reload, and counts once. Until the server has answered
// it is kept in this tab's sessionStorage, as is what is typed and not sent yet.
// Texts and names of models are content: they become text nodes and are never read as HTML.

const $ = (id) => document.getElementById(id);
const BETTER = { helpful: "better", harmless: "more harmful" };
const KEPT = { comparison: "for training", weak: "as too weak to train on", none: "as undecided" };
const PATIENCE = 15;  // seconds without a word from the server, which has one every three

let talk = { task: "helpful", turns: [] };  // as the server tells it
let leaving = new AbortController();  // ends what still runs for the conversation before
const saved = {                       // what this tab remembers over a reload
  get: (key) => JSON.parse(sessionStorage.getItem(key)),
  set: (key, value) => sessionStorage.setItem(key, JSON.stringify(value)),
};

// ---------------------------------------------------------------- the server

class Lost extends Error {}           // no answer, or not now: to be sent again
class Refused extends Error {}        // the server's own no: sending it again won't help

const lost = (error) => { throw error.name === "AbortError" ? error : new Lost(); };

async function request(path, body, signal = leaving.signal) {
  const headers = { "Content-Type": "application/json" };
  if (saved.get("token")) headers["X-Token"] = saved.get("token");
  const reply = await fetch(path, { method: body ? "POST" : "GET", headers,
    body: body && JSON.stringify(body), signal, cache: "no-store" }).catch(lost);
  if (reply.ok) return reply;
  const { error = `The server answered ${reply.status}.` } = await reply.json().catch(() => ({}));
  if ([429, 502, 503, 504].includes(reply.status)) throw new Lost(error);
  throw Object.assign(new Refused(error), { status: reply.status });
}

async function json(path, body) {
  const signal = AbortSignal.any([leaving.signal, AbortSignal.timeout(1000 * PATIENCE)]);
  return (await request(path, body, signal)).json().catch(lost);
}

// Attempts until the server has answered; only its refusal, or leaving, ends it otherwise.
async function persist(attempt) {
  for (let failed = false; ; failed = true) {
    try {
      const reply = await attempt(failed);
      if (failed) problem("");
      return reply;
    } catch (error) {
      if (!(error instanceof Lost)) throw error;
      if (!failed) problem(error.message || "No connection to the server; trying again.");
    }
    await new Promise((resolve, reject) => {
      leaving.signal.addEventListener("abort", () => reject(new DOMException("", "AbortError")));
      setTimeout(resolve, 2000);
    });
  }
}

// The lines of /api/ask: pieces go to their card; returns the last, which has both whole texts.
async function listen(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const silence = new Promise((_, reject) => setTimeout(reject, 1000 * PATIENCE, new Lost()));
    const { done, value } = await Promise.race([reader.read(), silence]).catch(lost);
    if (done) throw new Lost();
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.filter(Boolean).map((x) => JSON.parse(x))) {
      if (line.error) throw new Refused(line.error);
      if (line.piece) $(`text-${line.side}`).append(line.piece);
      if (line.done) return line;
    }
  }
}

// ---------------------------------------------------------------- the conversation

const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(16)),  // works without https
  (byte) => byte.toString(16).padStart(2, "0")).join("");
const texts = (role) => talk.turns.filter((turn) => turn[0] === role).map((turn) => turn[1]);

function leave() {
  leaving.abort();
  leaving = new AbortController();
  talk = { ...talk, talk: null, open: null };
  $("scale").disabled = false;
  $("send").disabled = true;
}

// The conversation as the server has it, a new one if it has none of that id; what was sent before
// a reload and is not settled yet goes on.
async function load(task = saved.get("task") || "helpful", id = saved.get("talk") || newId()) {
  leave();
  const asking = saved.get("asking"), choosing = saved.get("choosing");
  saved.set("task", task);
  saved.set("talk", id);
  talk = await persist(() => json("/api/new", { talk: id, task }));
  draw();
  if (choosing?.talk === id) return send(choosing);
  const asked = texts("human"), mine = asking?.talk === id && asking;
  const next = talk.pending?.text || (mine.turn === asked.length && mine.text);
  saved.set("asking", null);
  if (mine && mine.text !== (next || asked[mine.turn])) type(mine.text);  // another tab was first
  if (talk.open) return complete();
  if (next) return ask(next);
}

async function ask(text) {
  const turn = texts("assistant").length, before = talk.turns.slice(0, 2 * turn);
  const body = { talk: talk.talk, turn, text };
  saved.set("asking", body);
  talk = { ...talk, turns: [...before, ["human", text]], open: null };
  draw(true);
  say("Two models are writing.");
  $("question-title").focus();
  try {
    const { a, b } = await persist(async (again) => {
      const reply = await request("/api/ask", body);
      if (again) problem("");
      for (const side of ["a", "b"]) $(`text-${side}`).textContent = "";
      return listen(reply);
    });
    talk.open = { turn, a, b };
    complete();
  } catch (error) {
    if (error instanceof Refused) {  // and not that the person has left this conversation
      type(text);
      talk.turns = before;
      draw();
    }
    throw error;
  } finally {
    saved.set("asking", null);
  }
}

function complete() {
  draw();
  say(`Both answers are complete. Which is ${BETTER[talk.task]}?`);
  $("scale").focus({ preventScroll: true });  // and no step of it, which would be a hint
}

function choose() {
  const step = new FormData($("choice")).get("choice");
  if (step === null) {
    problem("Pick a step of the scale first, or “No preference”.");
    return $("scale").focus();
  }
  const { side, text } = saved.get("edit") || {}, { turn, [side]: original } = talk.open;
  const edited = side && text.trim() && text.trim() !== original.trim();
  return send({ talk: talk.talk, turn, id: newId(), choice: Number(step),
    edit: edited ? { side, text } : null });
}

async function send(body) {
  saved.set("choosing", body);
  $("scale").disabled = true;
  try {
    const { turns, stored, elo, revealed, kept } = await persist(() => json("/api/choose", body));
    talk = { ...talk, turns, stored, elo, open: null };
    draw();
    say(`Answer A came from ${revealed.a}, answer B from ${revealed.b}. Stored ${KEPT[kept]}.`);
  } finally {
    saved.set("choosing", null);
    $("scale").disabled = false;
  }
}

// Runs what may fail and shows the server's no. If the conversation is another one by now (a second
// tab has it too, or the server forgot it), the page takes over what the server knows.
async function run(action) {
  try {
    await action();
  } catch (error) {
    if (error.name === "AbortError") return;
    problem(error.message);
    if ([404, 409].includes(error.status) && action !== load) run(load);
  }
}

// ---------------------------------------------------------------- what is seen

const say = (text) => { $("status").textContent = text; };
const problem = (text) => { $("problem").textContent = text; };

function type(text) {
  $("message").value = text;
  saved.set("message", text);
}

function filled(template, ...contents) {  // a copy of a template, with texts in its places
  const copy = $(template).content.firstElementChild.cloneNode(true);
  copy.querySelectorAll(".fill").forEach((place, i) => { place.textContent = contents[i]; });
  return copy;
}

function draw(writing = false) {
  const { open, turns, task } = talk, draft = saved.get("edit");
  document.body.dataset.task = $("task").elements.task.value = task;
  for (const word of document.querySelectorAll("#scale label b")) word.textContent = BETTER[task];
  $("turns").replaceChildren(...turns.map(([role, text]) => filled(role, text)));
  $("question").hidden = !(open || writing);
  $("ask").hidden = !$("question").hidden;
  $("send").disabled = false;
  $("choice").hidden = !open;
  $("choice").reset();
  $("pair").setAttribute("aria-busy", String(writing));
  for (const side of ["a", "b"]) {
    $(`text-${side}`).textContent = open ? open[side] : "";
    $(`edit-${side}`).hidden = !open || task !== "helpful";
  }
  edit(open && draft && draft.talk === talk.talk && draft.turn === open.turn ? draft : null);
  if (talk.stored) standings(talk);
  say("");
  if (!$("ask").hidden) $("message").focus();
}

function edit(draft) {  // the editor of one answer, or none
  saved.set("edit", draft);
  $("editor").hidden = !draft;
  $("edit").value = draft ? draft.text : "";
  $("edit-label").textContent = draft ? `Your version of answer ${draft.side.toUpperCase()}` : "";
}

function standings({ stored, elo }) {
  $("stored").textContent = `${stored.comparisons} comparisons stored for training, ` +
    `${stored.edits} edits, ${stored.weak} weak preferences, ${stored.none} without preference.`;
  $("elo").replaceChildren(eloTable("Helpfulness", elo.helpful),
    eloTable("Harmlessness", elo.harmless));
  $("elo-note").textContent = elo.note;
}

function eloTable(title, rows) {  // null: unknown, or without a bound
  const known = rows.flatMap((row) => [row.elo, row.low, row.high]).filter(Number.isFinite);
  const least = Math.min(...known), span = Math.max(...known) - least || 1;
  const at = (x, edge) => (x === null ? `${edge}%` : `${4 + 92 * (x - least) / span}%`);
  const number = (x, unknown) => (x === null ? unknown :
    `${x >= 0.5 ? "+" : ""}${Math.round(x)}`.replace("-", "−"));
  const table = filled("table", title);
  for (const { name, elo, low, high, games } of rows) {
    const interval = elo === 0 && low === high ? "reference" :
      `${number(low, "−∞")} to ${number(high, "∞")}`;
    const row = filled("row", name, number(elo, "?"), interval, games);
    const [line, dot] = row.querySelectorAll("line, circle");
    line.setAttribute("x1", at(low, 0));
    line.setAttribute("x2", at(high, 100));
    dot.setAttribute("cx", at(elo, -100));
    table.tBodies[0].append(row);
  }
  return table;
}

// ---------------------------------------------------------------- what the person does

function on(id, name, action) {
  $(id).addEventListener(name, (event) => {
    if (name === "submit") event.preventDefault();
    if (name === "submit" || name === "change") problem("");
    run(async () => action(event));
  });
}

on("ask", "submit", () => {
  const text = $("message").value.trim();
  if (!text || !talk.talk) return null;
  type("");
  return ask(text);
});
on("message", "input", () => type($("message").value));
on("message", "keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
on("choice", "submit", choose);
on("choice", "change", () => null);  // but that a problem before is past
on("edit", "input", () => saved.set("edit", { ...saved.get("edit"), text: $("edit").value }));
on("discard", "click", () => { edit(null); $("scale").focus(); });
for (const side of ["a", "b"]) {
  on(`edit-${side}`, "click", () => {
    const { turn, [side]: text } = talk.open;
    if (saved.get("edit")?.side !== side) edit({ talk: talk.talk, turn, side, text });
    $("edit").focus();
  });
}
on("restart", "click", () => load(talk.task, newId()));
on("task", "change", () => {
  if ($("task").elements.task.value === "helpful") return load("helpful", newId());
  $("warning").returnValue = "";  // not that of the last time, should Escape close it
  $("warning").showModal();
});
on("warning", "close", () => {
  if ($("warning").returnValue === "harmless") return load("harmless", newId());
  $("task").elements.task.value = talk.task;
});

document.addEventListener("keydown", (event) => {  // a digit picks a step, Enter confirms it
  const { key, repeat, ctrlKey, altKey, metaKey, target } = event;
  if (!/^([0-8]|Enter)$/.test(key) || !talk.open || $("scale").disabled || repeat || ctrlKey ||
      altKey || metaKey || target.closest("textarea, button, a, #task, dialog")) return;
  event.preventDefault();
  if (key === "Enter") return $("choice").requestSubmit();
  const step = $("choice").querySelector(`[value="${key}"]`);
  step.focus();
  step.click();
});

const [, token] = location.hash.split("#token=");
if (token) saved.set("token", token);
$("message").value = saved.get("message") || "";
run(load);

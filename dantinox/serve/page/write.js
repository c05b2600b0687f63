"use strict";
// Writing with the model. A text is a list of parts, of the person and of the model; parts are replaced and never changed once
// something else has begun, so that what was there can be had back. A part of the model has the records of its tokens as they came.

const KEPT = "dantinox.write";
const SHOWN_EVERY = 200; // milliseconds between drawings of the plots while tokens come
const WORDS = {
  story: {draft: "Your words", go: "Write on", nothing: "Begin with a few words below: the model goes on from there. Each of its tokens is shaded by how unsure it was, and a click on one shows what else could have stood there."},
  chat: {draft: "Your message", go: "Send", nothing: "Send a message below. Each token of the answer is shaded by how unsure the model was, and a click on one shows what else could have stood there."},
};
const STOPPED = "stopped";
const writing = {
  mode: "story",
  texts: {story: {parts: [], past: [], future: []}, chat: {parts: [], past: [], future: []}},
  about: null,
  abort: null, // of the request that is being answered
  use: null, // tokens in the context, and of the prompt those that were left out
  edited: null, // while a turn of a chat is edited: its number; "all" for a story
};
const current = () => writing.texts[writing.mode];
const isChat = () => writing.mode === "chat";
const isModel = (part) => part.who === "model";
const textOf = (part) => (part.tokens?.length ? part.tokens.map(({text}) => text).join("") : part.text);

// Requests.

function headers() {
  const key = sessionStorage.getItem("dantinox.key");
  return {"Content-Type": "application/json", ...(key && {Authorization: `Bearer ${key}`})};
}

/** A response, or an Error with the server's sentence and, of a wrong setting, its name. */
async function asked(path, options = {}) {
  const response = await fetch(path, {...options, headers: headers()}).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached.");
  });
  byId("key-panel").hidden = response.status !== 401;
  if (response.ok) return response;
  const {error} = await response.json().catch(() => ({error: null}));
  throw Object.assign(new Error(error?.message ?? `The server answered ${response.status}.`), {param: error?.param});
}

/** Server-sent events as [name, data]. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (let {value, done} = await reader.read(); !done; {value, done} = await reader.read()) {
    const blocks = (waiting + value).split("\n\n");
    waiting = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]);
      const {event, data} = Object.fromEntries(lines);
      yield [event, JSON.parse(data)];
    }
  }
}

/** What of a part is sent: ids where they are known, so that the model reads what it wrote; its end token stays behind. */
function sentOf(part) {
  if (!isModel(part) || !part.tokens.length) return part.ids ?? [part.text];
  return part.tokens.filter((token) => !token.ends).map((token) => (token.cut ? token.text : token.id));
}

function bodyOf(before, part) {
  const common = {settings: givenSettings(), alternatives: alternativesWanted()};
  if (!isChat()) return {...common, prompt: [...before, part].flatMap(sentOf).filter((one) => one !== ""), fit: true};
  const system = byId("system").value.trim();
  const roles = {person: "user", model: "assistant"};
  const messages = before.map((one) => ({role: roles[one.who], content: textOf(one)}));
  const all = system ? [{role: "system", content: system}, ...messages] : messages;
  return {...common, messages: all, prompt: part.tokens.length ? sentOf(part) : null};
}

// Writing on.

function remember() {
  const text = current();
  text.past.push(text.parts);
  text.future = [];
}

/** Writes behind `before`; `kept` are the tokens that the new part begins with. */
async function write(before, kept = []) {
  if (writing.abort) return;
  const part = {who: "model", text: "", tokens: kept, kept: kept.length, seed: null, settings: {}, router: null, stats: {}, reason: STOPPED};
  const body = bodyOf(before, part);
  if (!givenAreGood()) return;
  remember();
  const text = current();
  text.parts = [...before, part];
  writing.abort = new AbortController();
  told("Waiting for the model …");
  problem(null);
  drawAll();
  const begun = {time: null, count: 0};
  try {
    const options = {method: "POST", body: JSON.stringify(body), signal: writing.abort.signal};
    for await (const [event, data] of eventsOf(await asked("/api/dantinox/generate", options))) {
      if (event === "begin") began(part, before, data);
      if (event === "token") took(part, data, begun);
      if (event === "end") ended(part, data);
      if (event === "error") throw Object.assign(new Error(data.message), {param: data.param});
    }
    told(`${ended.words ?? ""}`);
  } catch (error) {
    if (error.name === "AbortError") told(`Stopped behind ${counted(part.tokens.length - part.kept)}.`);
    else failed(error, text, part);
  } finally {
    writing.abort = null;
    trimEnd(part);
    drawAll();
    keep();
  }
}

const counted = (tokens) => `${whole(tokens)} ${tokens === 1 ? "token" : "tokens"}`;

/** Nothing of the model came: the text is as before, and what the person wrote is where it was written. */
function failed(error, text, part) {
  problem(error.message, error.param);
  told("");
  if (part.tokens.length > part.kept) return;
  const last = text.parts.at(-2);
  text.parts = text.past.pop();
  if (last && last.fresh) {
    byId("draft").value = last.text;
    text.parts = text.parts.filter((one) => one !== last);
  }
}

function began(part, before, data) {
  Object.assign(part, {seed: data.seed, settings: data.settings, router: data.router, vocab: data.vocab_size, promptTokens: data.prompt_tokens});
  writing.use = {tokens: data.prompt_tokens, leftOut: data.left_out};
  if (!isChat()) before.filter((one) => !isModel(one) && !one.ids && one.text).forEach((one, i) => (one.ids = data.texts[i]));
  before.forEach((one) => delete one.fresh);
  told("Writing …");
}

function took(part, {tokens, text, finish_reason: reason}, begun) {
  begun.time ??= performance.now();
  begun.count += tokens.length;
  part.text += text;
  part.tokens = [...part.tokens, ...tokens];
  if (reason) part.reason = reason;
  writing.use.tokens += tokens.length;
  const seconds = (performance.now() - begun.time) / 1000;
  if (seconds > 0.2) part.stats = {...part.stats, decode_tok_per_s: (begun.count - 1) / seconds};
  appendTokens(part, tokens);
}

function ended(part, {stats}) {
  part.stats = stats;
  const why = {eos: "The model ended the text.", stop: "Ended by a stop string.", length: "Ended by the length limit."};
  ended.words = `${counted(part.tokens.length - part.kept)}. ${why[part.reason] ?? ""}`;
}

/** What a stop string took away goes, and an end token is known as such: it is not read when the text goes on. */
function trimEnd(part) {
  const own = part.tokens.slice(part.kept);
  const last = own.at(-1);
  if (last && part.reason === "eos" && last.text === "") last.ends = true;
  if (part.reason === "stop" && own.length) {
    let room = part.text.length;
    const stays = own.flatMap((token) => {
      const fits = token.text.slice(0, room);
      if (token.text && !fits) return [];
      room -= fits.length;
      return [fits === token.text ? token : {...token, text: fits, cut: true}];
    });
    part.tokens = [...part.tokens.slice(0, part.kept), ...stays];
  }
  part.text = textOf(part);
}

function go() {
  if (writing.abort || writing.edited !== null) return;
  const said = byId("draft").value;
  const {parts} = current();
  if (isChat() && !said.trim() && (!parts.length || isModel(parts.at(-1)))) {
    problem("Write a message first.");
    byId("draft").focus();
    return;
  }
  byId("draft").value = "";
  write(said ? [...parts, {who: "person", text: said, fresh: true}] : parts);
}

function retry() {
  const {parts} = current();
  const last = parts.at(-1);
  if (!last || !isModel(last)) return;
  const fixed = byId("setting-seed")?.value;
  write(parts.slice(0, -1), last.tokens.slice(0, last.kept ?? 0)).then(() => {
    if (fixed) told(`${byId("status").textContent} The seed is fixed, so the same request gives the same text.`);
  });
}

/** Goes on behind the selected token, with another in its place. */
function pick(one) {
  if (writing.abort || writing.edited !== null) return;
  const {part: number, place} = state.sample.tokens[state.at].at;
  const {parts} = current();
  const part = parts[number];
  const old = part.tokens[place];
  const rank = (old.alternatives ?? []).findIndex(({id}) => id === one.id);
  const text = one.id === old.id ? old.text : one.text.replace(/\ufffd+$/, "");
  const token = {...old, id: one.id, text, logprob: one.logprob, logprob_sampled: one.logprob_sampled, rank: rank < 0 ? old.rank : rank};
  for (const name of ["ends", "cut", "candidates"]) delete token[name];
  const isNew = one.id !== old.id;
  write(parts.slice(0, number), [...part.tokens.slice(0, place), isNew ? {...token, forced: true, picked: true} : token]);
}

function restore(from, to) {
  const text = current();
  if (writing.abort || !text[from].length) return;
  text[to].push(text.parts);
  text.parts = text[from].pop();
  writing.use = null;
  told("");
  problem(null);
  drawAll();
  keep();
}

// Editing.

function edit(number) {
  if (writing.abort) return;
  const {parts} = current();
  writing.edited = number;
  byId("editor").value = number === "all" ? parts.map(textOf).join("") : textOf(parts[number]);
  drawControls();
  byId("editor").focus();
}

function finishEditing(isTaken) {
  const number = writing.edited;
  const text = byId("editor").value;
  writing.edited = null;
  const {parts} = current();
  const before = number === "all" ? parts.map(textOf).join("") : textOf(parts[number]);
  if (isTaken && text !== before) {
    remember();
    current().parts = number === "all" ? rewritten(parts, text) : parts.with(number, {who: parts[number].who, text, tokens: []});
    writing.use = null;
  }
  drawAll();
  keep();
  byId("edit").focus();
}

/** The parts of another text: up to the first change those that are there, from there on the person's words. */
function rewritten(parts, text) {
  const found = [];
  let done = 0;
  for (const part of parts) {
    const pieces = part.tokens?.length ? part.tokens : [part];
    const changed = pieces.findIndex((piece) => {
      const stays = text.startsWith(piece.text, done);
      if (stays) done += piece.text.length;
      return !stays;
    });
    const isWhole = changed < 0;
    if (isWhole) found.push(part);
    else {
      if (isModel(part) && changed > 0) {
        const tokens = part.tokens.slice(0, changed);
        found.push({...part, tokens, text: tokens.map((token) => token.text).join(""), kept: Math.min(part.kept, changed), reason: STOPPED});
      }
      break;
    }
  }
  if (done < text.length) found.push({who: "person", text: text.slice(done)});
  return found;
}

// Drawing.

/** A token as the shared parts take it: with its surprisal, the router's numbers of its part, and where it stands. */
function viewed(token, part, number, place) {
  const {router} = part;
  const lists = {alternatives: token.alternatives ?? [], candidates: token.candidates ?? []};
  return {...token, ...lists, surprisal: surprisalOf(token.logprob), router, at: {part: number, place}};
}

function sampleOf(parts) {
  const tokens = parts.flatMap((part, number) => (part.tokens ?? []).map((token, place) => viewed(token, part, number, place)));
  const router = parts.findLast((part) => part.router)?.router ?? null;
  return {tokens, router, strategy: tokens.some((token) => token.strategy) ? "entropy" : "chain", vocab_size: writing.about?.vocab_size ?? 0};
}

function nodeOf(token, index) {
  const node = tokenNode(token, index);
  if (token.picked) node.classList.add("picked");
  return node;
}

function drawAll() {
  const {parts} = current();
  const wasLast = state.at >= state.nodes.length - 1;
  state.sample = sampleOf(parts);
  const {tokens} = state.sample;
  state.at = Math.max(0, Math.min(wasLast ? Infinity : state.at, tokens.length - 1));
  state.pointed = null;
  if (!isRouted() && state.shading === "strategy") state.shading = "entropy";
  document.body.classList.toggle("routed", isRouted());
  scale();
  state.nodes = tokens.map(nodeOf);
  const nodes = parts.map((part, number) => state.nodes.filter((_, i) => tokens[i].at.part === number));
  byId("tokens").replaceChildren(...parts.map((part, number) => (isChat() ? turnOf(part, number, nodes[number]) : passageOf(part, nodes[number]))));
  drawColours();
  shade();
  drawNumbers();
  select(state.at);
  drawControls();
  if (wasLast) byId("text").scrollTop = byId("text").scrollHeight;
}

function passageOf(part, nodes) {
  return nodes.length ? listOf(nodes) : element("span", {class: "own"}, part.text);
}

function listOf(nodes) {
  const attributes = {class: "passage", role: "listbox", "aria-label": "Tokens of the model", "aria-orientation": "horizontal"};
  return element("span", attributes, ...nodes);
}

function turnOf(part, number, nodes) {
  const who = isModel(part) ? "Model" : "You";
  const button = element("button", {type: "button", class: "plain", "aria-label": `Edit turn ${number + 1}, ${who}`}, "edit");
  button.addEventListener("click", () => edit(number));
  const head = element("div", {class: "who"}, who, button);
  return element("div", {class: `turn ${part.who}`}, head, passageOf(part, nodes));
}

/** The scales follow the text; small values stay small. */
function scale() {
  const least = {entropy: 3, varentropy: 3, surprisal: 5};
  for (const name of Object.keys(ENDS)) ENDS[name] = Math.max(least[name], endOfScale(name, state.sample.tokens));
}

/** Tokens that have just come, put behind the others. */
function appendTokens(part, tokens) {
  const {parts} = current();
  if (!parts.includes(part)) return; // another text is on the screen
  const number = parts.length - 1;
  const frame = byId("text");
  const isAtEnd = frame.scrollHeight - frame.scrollTop - frame.clientHeight < 60;
  const isFirst = !state.nodes.length;
  if (isFirst || (!isRouted() && tokens.some((token) => token.strategy))) {
    state.at = Math.max(0, state.nodes.length - 1);
    drawAll();
    return;
  }
  const follows = state.at === state.nodes.length - 1;
  const place = part.tokens.length - tokens.length;
  const body = byId("tokens").lastElementChild;
  let passage = isChat() ? body.querySelector(".passage") : body;
  if (!passage?.matches(".passage")) {
    passage = listOf([]);
    const own = isChat() ? body.querySelector(".own") : body;
    own.replaceWith(passage);
  }
  for (const [i, token] of tokens.entries()) {
    const view = viewed(token, part, number, place + i);
    const index = state.nodes.length;
    const node = nodeOf(view, index);
    state.sample.tokens.push(view);
    state.nodes.push(node);
    node.tabIndex = -1;
    node.setAttribute("aria-selected", "false");
    shadeNode(node, index);
    passage.append(node);
  }
  if (follows && tokens.length) {
    mark(state.nodes[state.at], false);
    state.at = state.nodes.length - 1;
    mark(state.nodes[state.at], true);
  }
  if (isAtEnd) frame.scrollTop = frame.scrollHeight;
  drawSoon();
}

let waitingToDraw = null;
function drawSoon() {
  waitingToDraw ??= setTimeout(() => {
    waitingToDraw = null;
    if (!writing.abort) return;
    scale();
    shade();
    drawNumbers();
    drawToken(state.sample.tokens[state.at]);
    drawMarks();
  }, SHOWN_EVERY);
}

function drawNumbers() {
  const {tokens} = state.sample;
  buildStrips();
  drawStrategies();
  if (tokens.length) drawPlots();
  const surprise = mean(valuesOf(tokens, "surprisal").filter(Number.isFinite));
  const last = current().parts.findLast(isModel);
  const context = writing.about?.context ?? 0;
  const used = writing.use?.tokens;
  const facts = [
    ["written by the model", whole(tokens.length), tokens.length === 1 ? " token" : " tokens"],
    ["perplexity", number(surprise === null ? null : 2 ** surprise), ""],
    ["mean entropy", number(mean(valuesOf(tokens, "entropy"))), " bits"],
    ["speed", number(last?.stats?.decode_tok_per_s), " tokens/s"],
    ["first token", number(last?.stats?.first_token_seconds), " s"],
    ["seed", last && known(last.seed) ? String(last.seed) : "–", ""],
  ];
  const pairs = facts.map(([name, value, unit]) => pair(name, element("b", {}, value), unit));
  const meter = element("meter", {min: 0, max: Math.max(1, context), value: used ?? 0, "aria-label": "Context used"});
  const leftOut = writing.use?.leftOut ? `, ${whole(writing.use.leftOut)} at the front left out` : "";
  pairs.push(pair("context", meter, " ", element("b", {}, whole(used)), ` of ${whole(context)} tokens${leftOut}`));
  byId("totals").replaceChildren(...pairs);
}

function drawControls() {
  const {parts, past, future} = current();
  const isBusy = writing.abort !== null;
  const isEditing = writing.edited !== null;
  const can = {
    go: !isBusy && !isEditing && writing.about !== null,
    retry: !isBusy && !isEditing && parts.length > 0 && isModel(parts.at(-1)),
    undo: !isBusy && !isEditing && past.length > 0,
    redo: !isBusy && !isEditing && future.length > 0,
    edit: !isBusy && !isEditing && parts.length > 0 && !isChat(),
    clear: !isBusy && !isEditing && parts.length > 0,
    "save-lines": !isBusy && state.nodes.length > 0,
    "save-report": !isBusy && state.nodes.length > 0,
  };
  for (const [id, is] of Object.entries(can)) byId(id).disabled = !is;
  byId("go").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  byId("edit").hidden = isChat();
  byId("text").hidden = isEditing;
  byId("legend").hidden = isEditing || !state.nodes.length;
  byId("editing").hidden = !isEditing;
  byId("editor-label").textContent = writing.edited === "all" ? "Edit the text: up to the first change its tokens stay as they are" : "Edit the turn: it becomes plain words";
  byId("token").closest(".panel").hidden = !state.nodes.length;
  byId("nothing").hidden = parts.length > 0;
  byId("nothing").textContent = WORDS[writing.mode].nothing;
  byId("draft-label").textContent = WORDS[writing.mode].draft;
  byId("go").textContent = WORDS[writing.mode].go;
  document.body.classList.toggle("writing", isBusy);
  document.body.classList.toggle("empty", !state.nodes.length);
  document.querySelectorAll("#mode input").forEach((radio) => {
    radio.checked = radio.value === writing.mode;
    radio.disabled = isBusy || isEditing || (radio.value === "chat" && !writing.about?.chat);
  });
  document.querySelectorAll(".turn button").forEach((button) => (button.disabled = isBusy || isEditing));
}

function told(text) {
  byId("status").textContent = text;
}

/** One sentence about what went wrong, and the field that it is about. */
function problem(text, param) {
  byId("problem").hidden = text === null;
  byId("problem").textContent = text ?? "";
  document.querySelectorAll("[aria-invalid]").forEach((field) => field.removeAttribute("aria-invalid"));
  if (param) byId(`setting-${param}`)?.setAttribute("aria-invalid", "true");
}

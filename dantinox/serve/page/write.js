"use strict";
// Text generation. A text is a list of parts, each written by the user (`person`) or by the model. After the next part begins, an edit
// replaces a part instead of changing it, so that undo can restore it. A part of the model has the token records that the server sent.

const DRAW_INTERVAL = 200; // milliseconds between drawings of the plots while tokens arrive
const STOPPED = "stopped";
const HINT = "Each generated token is shaded by the uncertainty of the model. Select a token to see its alternatives, and select an alternative to continue from it.";
const WORDS = {
  story: {draft: "Your text", go: "Continue", nothing: `Write the beginning of a text below, and the model continues it.\n${HINT}`},
  chat: {draft: "Your message", go: "Send", nothing: `Send a message below.\n${HINT}`},
};
const NO_CHAT = "Chat is off: this model has no chat template. Start the server with --chat_template to add one.";
const writing = {
  mode: "story",
  texts: {story: {parts: [], past: [], future: []}, chat: {parts: [], past: [], future: []}},
  about: null, // the response of /api/dantinox/about
  abort: null, // the AbortController of the running request
  use: null, // number of tokens in the context, and of prompt tokens that were truncated
  edited: null, // what is being edited: the index of a chat turn, or "all" for a story
};
const current = () => writing.texts[writing.mode];
const isChat = () => writing.mode === "chat";
const isModel = (part) => part.who === "model";
const textOf = (part) => (part.tokens?.length ? part.tokens.map(({text}) => text).join("") : part.text);
const hasChat = () => writing.about?.chat !== false;

// Requests.

function headers() {
  const key = sessionStorage.getItem("dantinox.key");
  return {"Content-Type": "application/json", ...(key && {Authorization: `Bearer ${key}`})};
}

/** Returns the response to a request. If it failed, throws an Error with the server's message and the name of a wrong setting as `param`. */
async function request(path, options = {}) {
  const response = await fetch(path, {...options, headers: headers()}).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached.");
  });
  byId("key-form").hidden = response.status !== 401;
  if (response.ok) return response;
  const {error} = await response.json().catch(() => ({error: null}));
  throw Object.assign(new Error(error?.message ?? `The server responded with status ${response.status}.`), {param: error?.param});
}

/** Yields server-sent events as [name, data]. */
async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (let {value, done} = await reader.read(); !done; {value, done} = await reader.read()) {
    const blocks = (buffer + value).split("\n\n");
    buffer = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]);
      const {event, data} = Object.fromEntries(lines);
      yield [event, JSON.parse(data)];
    }
  }
}

/** Returns the prompt entries of a part: token ids where they are known, so that the model reads the tokens it generated; no EOS token. */
function promptOf(part) {
  if (!isModel(part) || !part.tokens.length) return part.ids ?? [part.text];
  return part.tokens.filter((token) => !token.ends).map((token) => (token.cut ? token.text : token.id));
}

function requestBody(before, part) {
  const common = {settings: chosenSettings(), alternatives: numAlternatives()};
  if (!isChat()) return {...common, prompt: [...before, part].flatMap(promptOf).filter((one) => one !== ""), fit: true};
  const system = byId("system").value.trim();
  const roles = {person: "user", model: "assistant"};
  const messages = before.map((one) => ({role: roles[one.who], content: textOf(one)}));
  const all = system ? [{role: "system", content: system}, ...messages] : messages;
  return {...common, messages: all, prompt: part.tokens.length ? promptOf(part) : null};
}

// Generating.

function pushUndo() {
  const text = current();
  text.past.push(text.parts);
  text.future = [];
}

/** Generates a part after the parts `before`; the new part begins with the tokens `kept`. */
async function generate(before, kept = []) {
  if (writing.abort) return;
  const part = {who: "model", text: "", tokens: kept, kept: kept.length, seed: null, settings: {}, router: null, stats: {}, reason: STOPPED};
  const body = requestBody(before, part);
  if (!checkFields()) return;
  pushUndo();
  const text = current();
  text.parts = [...before, part];
  writing.abort = new AbortController();
  showStatus("Waiting for the model …");
  showProblem(null);
  drawAll();
  const clock = {start: null, count: 0};
  try {
    const options = {method: "POST", body: JSON.stringify(body), signal: writing.abort.signal};
    for await (const [event, data] of readEvents(await request("/api/dantinox/generate", options))) {
      if (event === "begin") onBegin(part, before, data);
      if (event === "token") onTokens(part, data, clock);
      if (event === "end") part.stats = data.stats;
      if (event === "error") throw Object.assign(new Error(data.message), {param: data.param});
    }
    showStatus(summaryOf(part));
  } catch (error) {
    if (error.name === "AbortError") showStatus(`Stopped after ${countTokens(part)}.`);
    else onFailure(error, text, part);
  } finally {
    writing.abort = null;
    trimEnd(part);
    drawAll();
    saveState();
  }
}

function countTokens(part) {
  const count = part.tokens.length - part.kept;
  return `${whole(count)} ${count === 1 ? "token" : "tokens"}`;
}

function summaryOf(part) {
  const ends = {eos: "The model ended the text.", stop: "Ended by a stop string.", length: "Ended by the length limit.", loop: "Ended because the text repeats itself."};
  return `${countTokens(part)}. ${ends[part.reason] ?? ""}`;
}

/** Shows the error. If no token arrived, restores the draft and the text before the request. */
function onFailure(error, text, part) {
  showProblem(error.message, error.param);
  showStatus("");
  if (part.tokens.length > part.kept) return;
  const last = text.parts.at(-2);
  text.parts = text.past.pop();
  if (last && last.fresh) {
    byId("draft").value = last.text;
    text.parts = text.parts.filter((one) => one !== last);
  }
}

function onBegin(part, before, data) {
  Object.assign(part, {seed: data.seed, settings: data.settings, router: data.router, vocab: data.vocab_size, promptTokens: data.prompt_tokens});
  writing.use = {tokens: data.prompt_tokens, leftOut: data.left_out};
  if (!isChat()) before.filter((one) => !isModel(one) && !one.ids && one.text).forEach((one, i) => (one.ids = data.texts[i]));
  before.forEach((one) => delete one.fresh);
  showStatus("Generating …");
}

function onTokens(part, {tokens, text, finish_reason: reason}, clock) {
  clock.start ??= performance.now();
  clock.count += tokens.length;
  part.text += text;
  part.tokens = [...part.tokens, ...tokens];
  if (reason) part.reason = reason;
  writing.use.tokens += tokens.length;
  const seconds = (performance.now() - clock.start) / 1000;
  if (seconds > 0.2) part.stats = {...part.stats, decode_tok_per_s: (clock.count - 1) / seconds};
  appendTokens(part, tokens);
}

/** Truncates the tokens to the server's text, which excludes a stop string. Marks an EOS token, so that no later prompt contains it. */
function trimEnd(part) {
  const added = part.tokens.slice(part.kept);
  const last = added.at(-1);
  if (last && part.reason === "eos" && last.text === "") last.ends = true;
  if (part.reason === "stop" && added.length) {
    let left = part.text.length;
    const trimmed = added.flatMap((token) => {
      const text = token.text.slice(0, left);
      if (token.text && !text) return [];
      left -= text.length;
      return [text === token.text ? token : {...token, text, cut: true}];
    });
    part.tokens = [...part.tokens.slice(0, part.kept), ...trimmed];
  }
  part.text = textOf(part);
}

function go() {
  if (writing.abort || writing.edited !== null) return;
  const draft = byId("draft").value;
  const {parts} = current();
  if (isChat() && !draft.trim() && (!parts.length || isModel(parts.at(-1)))) {
    showProblem("Write a message first.");
    byId("draft").focus();
    return;
  }
  byId("draft").value = "";
  generate(draft ? [...parts, {who: "person", text: draft, fresh: true}] : parts);
}

function retry() {
  const {parts} = current();
  const last = parts.at(-1);
  if (!last || !isModel(last)) return;
  const seed = byId("setting-seed")?.value;
  generate(parts.slice(0, -1), last.tokens.slice(0, last.kept ?? 0)).then(() => {
    if (seed) showStatus(`${byId("status").textContent} The seed is fixed, so the same request gives the same text.`);
  });
}

/** Replaces the selected token by an alternative and continues from there. */
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
  generate(parts.slice(0, number), [...part.tokens.slice(0, place), isNew ? {...token, forced: true, picked: true} : token]);
}

/** Restores the latest text of `from` and adds the current one to `to`: undo from "past" to "future", redo the reverse. */
function restore(from, to) {
  const text = current();
  if (writing.abort || !text[from].length) return;
  text[to].push(text.parts);
  text.parts = text[from].pop();
  showChange();
}

/** Draws and saves the text after a change that does not come from a request. */
function showChange() {
  writing.use = null;
  showStatus("");
  showProblem(null);
  drawAll();
  saveState();
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

function finishEditing(isAccepted) {
  const number = writing.edited;
  const text = byId("editor").value;
  writing.edited = null;
  const {parts} = current();
  const before = number === "all" ? parts.map(textOf).join("") : textOf(parts[number]);
  if (isAccepted && text !== before) {
    pushUndo();
    current().parts = number === "all" ? applyEdit(parts, text) : parts.with(number, {who: parts[number].who, text, tokens: []});
    writing.use = null;
  }
  drawAll();
  saveState();
  byId("edit").focus();
}

/** Returns the parts of an edited text: the existing parts up to the first change, then one part of the user. */
function applyEdit(parts, text) {
  const found = [];
  let done = 0;
  for (const part of parts) {
    const pieces = part.tokens?.length ? part.tokens : [part];
    const changed = pieces.findIndex((piece) => {
      const isEqual = text.startsWith(piece.text, done);
      if (isEqual) done += piece.text.length;
      return !isEqual;
    });
    if (changed >= 0) {
      if (isModel(part) && changed > 0) {
        const tokens = part.tokens.slice(0, changed);
        found.push({...part, tokens, text: tokens.map((token) => token.text).join(""), kept: Math.min(part.kept, changed), reason: STOPPED});
      }
      break;
    }
    found.push(part);
  }
  if (done < text.length) found.push({who: "person", text: text.slice(done)});
  return found;
}

// Drawing.

/** Returns a token as the shared scripts expect it: with its surprisal, the router settings of its part, and its position. */
function tokenView(token, part, number, place) {
  const {router} = part;
  const lists = {alternatives: token.alternatives ?? [], candidates: token.candidates ?? []};
  return {...token, ...lists, surprisal: surprisalOf(token.logprob), router, at: {part: number, place}};
}

function sampleOf(parts) {
  const tokens = parts.flatMap((part, number) => (part.tokens ?? []).map((token, place) => tokenView(token, part, number, place)));
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
  updateScales();
  state.nodes = tokens.map(nodeOf);
  const nodes = parts.map((part, number) => state.nodes.filter((_, i) => tokens[i].at.part === number));
  byId("tokens").replaceChildren(...parts.map((part, number) => (isChat() ? turnNode(part, number, nodes[number]) : passageNode(part, nodes[number]))));
  drawControls();
  drawColors();
  shade();
  drawNumbers();
  select(state.at);
  if (wasLast) byId("text").scrollTop = byId("text").scrollHeight;
}

function passageNode(part, nodes) {
  return nodes.length ? tokenList(nodes) : element("span", {class: "user"}, part.text);
}

function tokenList(nodes) {
  const attributes = {class: "passage", role: "listbox", "aria-label": "Tokens of the model", "aria-orientation": "horizontal"};
  return element("span", attributes, ...nodes);
}

function turnNode(part, number, nodes) {
  const author = isModel(part) ? "Model" : "You";
  const button = element("button", {type: "button", class: "plain", "aria-label": `Edit turn ${number + 1}, ${author}`}, "Edit");
  button.addEventListener("click", () => edit(number));
  const head = element("div", {class: "author"}, author, button);
  return element("div", {class: `turn ${part.who}`}, head, passageNode(part, nodes));
}

/** Sets the scales of the shading to the range from the 10th to the 98th percentile of the text, but at least to `minRange`. The shades
 * are relative to the text, so that its tokens differ even if the model is uncertain everywhere. */
function updateScales() {
  const minRange = {entropy: 1.5, varentropy: 1.5, surprisal: 2.5};
  const {tokens} = state.sample;
  for (const [name, range] of Object.entries(minRange)) {
    const high = Math.max(2 * range, scaleEnd(name, tokens));
    const low = Math.min(quantile(name, tokens, 0.1) ?? 0, high - range);
    scales[name] = {low: low < 0.1 * high ? 0 : Number(low.toPrecision(2)), high};
  }
}

/** Adds the nodes of tokens that have just arrived. */
function appendTokens(part, tokens) {
  const {parts} = current();
  if (!parts.includes(part)) return; // the other mode is shown
  const number = parts.length - 1;
  const frame = byId("text");
  const isAtEnd = frame.scrollHeight - frame.scrollTop - frame.clientHeight < 60;
  const isFirst = !state.nodes.length;
  if (isFirst || (!isRouted() && tokens.some((token) => token.strategy))) {
    state.at = Math.max(0, state.nodes.length - 1);
    drawAll();
    return;
  }
  const isLastSelected = state.at === state.nodes.length - 1;
  const place = part.tokens.length - tokens.length;
  const body = byId("tokens").lastElementChild;
  let passage = isChat() ? body.querySelector(".passage") : body;
  if (!passage?.matches(".passage")) {
    passage = tokenList([]);
    const empty = isChat() ? body.querySelector(".user") : body;
    empty.replaceWith(passage);
  }
  for (const [i, token] of tokens.entries()) {
    const view = tokenView(token, part, number, place + i);
    const index = state.nodes.length;
    const node = nodeOf(view, index);
    state.sample.tokens.push(view);
    state.nodes.push(node);
    node.tabIndex = -1;
    node.setAttribute("aria-selected", "false");
    shadeNode(node, index);
    passage.append(node);
  }
  if (isLastSelected && tokens.length) {
    mark(state.nodes[state.at], false);
    state.at = state.nodes.length - 1;
    mark(state.nodes[state.at], true);
  }
  if (isAtEnd) frame.scrollTop = frame.scrollHeight;
  drawSoon();
}

let drawTimer = null;
function drawSoon() {
  drawTimer ??= setTimeout(() => {
    drawTimer = null;
    if (!writing.abort) return;
    updateScales();
    shade();
    drawNumbers();
    drawToken(state.sample.tokens[state.at]);
    drawMarks();
  }, DRAW_INTERVAL);
}

function drawNumbers() {
  const {tokens} = state.sample;
  buildStrips();
  drawStrategies();
  if (tokens.length) drawPlots();
  const surprisal = mean(valuesOf(tokens, "surprisal").filter(Number.isFinite));
  const last = current().parts.findLast(isModel);
  const context = writing.about?.context ?? 0;
  const used = writing.use?.tokens;
  const facts = [
    ["Tokens", whole(tokens.length), ""],
    ["Perplexity", number(surprisal === null ? null : 2 ** surprisal), ""],
    ["Mean entropy", number(mean(valuesOf(tokens, "entropy"))), " bits"],
    ["Speed", number(last?.stats?.decode_tok_per_s), " tokens/s"],
    ["First token", number(last?.stats?.first_token_seconds), " s"],
    ["Seed", last && known(last.seed) ? String(last.seed) : "–", ""],
  ];
  const pairs = facts.map(([name, value, unit]) => pair(name, element("b", {}, value), unit));
  const meter = element("meter", {min: 0, max: Math.max(1, context), value: used ?? 0, "aria-label": "Context used"});
  const leftOut = writing.use?.leftOut ? `, first ${whole(writing.use.leftOut)} left out` : "";
  const share = known(used) ? [meter, " ", element("b", {}, whole(used)), " of "] : [];
  pairs.push(pair("Context", ...share, `${whole(context)} tokens${leftOut}`));
  byId("totals").replaceChildren(...pairs);
}

function drawControls() {
  const {parts, past, future} = current();
  const isBusy = writing.abort !== null;
  const isEditing = writing.edited !== null;
  const isIdle = !isBusy && !isEditing;
  const hasTokens = state.nodes.length > 0;
  const enabled = {
    go: isIdle && writing.about !== null,
    retry: isIdle && parts.length > 0 && isModel(parts.at(-1)),
    undo: isIdle && past.length > 0,
    redo: isIdle && future.length > 0,
    edit: isIdle && parts.length > 0 && !isChat(),
    clear: isIdle && parts.length > 0,
    copy: parts.length > 0,
    load: isIdle && writing.about !== null,
    "save-lines": !isBusy && hasTokens,
    "save-report": !isBusy && hasTokens,
    "show-token": hasTokens,
    "show-statistics": hasTokens,
  };
  for (const [id, isEnabled] of Object.entries(enabled)) byId(id).disabled = !isEnabled;
  byId("go").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  byId("edit").hidden = isChat();
  byId("text").hidden = byId("shading").hidden = isEditing;
  byId("editing").hidden = !isEditing;
  byId("editor-label").textContent = writing.edited === "all" ? "Edit the text. Tokens before the first change are kept." : "Edit the turn. Its tokens become plain text.";
  const {draft, go: label, nothing} = WORDS[writing.mode];
  byId("nothing").hidden = parts.length > 0;
  byId("nothing").textContent = hasChat() ? nothing : `${nothing}\n${NO_CHAT}`;
  byId("draft-label").textContent = byId("draft").placeholder = draft;
  byId("go").textContent = label;
  document.body.classList.toggle("generating", isBusy);
  document.body.classList.toggle("empty", !hasTokens);
  if (!hasTokens && document.body.dataset.panel !== "settings") openPanel(isNarrow.matches ? null : "settings");
  document.querySelectorAll("#mode input").forEach((radio) => {
    radio.checked = radio.value === writing.mode;
    radio.disabled = !isIdle || (radio.value === "chat" && !writing.about?.chat);
  });
  byId("chat-reason").textContent = byId("chat-label").title = hasChat() ? "" : NO_CHAT;
  document.querySelectorAll(".turn button").forEach((button) => (button.disabled = !isIdle));
}

function showStatus(text) {
  byId("status").textContent = text;
}

/** Shows one sentence about an error, or hides it (null), and marks the field of the setting `param`. */
function showProblem(text, param) {
  byId("problem").hidden = text === null;
  byId("problem").textContent = text ?? "";
  document.querySelectorAll("[aria-invalid]").forEach((field) => field.removeAttribute("aria-invalid"));
  if (param) byId(`setting-${param}`)?.setAttribute("aria-invalid", "true");
}

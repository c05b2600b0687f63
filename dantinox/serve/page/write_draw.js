"use strict";
// Draws the text with its tokens, the numbers, and the state of the controls.

const DRAW_INTERVAL = 200; // milliseconds between drawings of the plots while tokens arrive
const HINT = "Each generated token is shaded by the uncertainty of the model. Select a token to see its alternatives, and select an alternative to continue from it.";
const WORDS = {
  story: {draft: "Your text", go: "Continue", nothing: `Write the beginning of a text below, and the model continues it.\n${HINT}`},
  chat: {draft: "Your message", go: "Send", nothing: `Send a message below.\n${HINT}`},
};
const NO_CHAT = "Chat is off: this model has no chat template. Start the server with --chat_template to add one.";

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

/** Returns whether the tokens from `place` begin another section of a reply, such as its reasoning, than the token before them. */
function hasNewSection(part, place) {
  const kinds = kindsOf(part);
  return kinds.slice(place).some((kind) => kind !== kinds[place - 1]);
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
  if (isChat() && place > 0 && hasNewSection(part, place)) {
    drawAll();
    return;
  }
  const body = byId("tokens").lastElementChild;
  let passage = isChat() ? [...body.querySelectorAll(".passage")].at(-1) : body;
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
    retry: isIdle && !comparing.isOpen && parts.length > 0 && isModel(parts.at(-1)),
    undo: isIdle && past.length > 0,
    redo: isIdle && future.length > 0,
    edit: isIdle && !comparing.isOpen && parts.length > 0 && !isChat(),
    clear: isIdle && parts.length > 0,
    copy: parts.length > 0,
    compare: isIdle && writing.about !== null,
    load: isIdle && writing.about !== null,
    save: !isBusy && parts.length > 0,
    "show-token": hasTokens,
    "show-statistics": hasTokens,
  };
  for (const [id, isEnabled] of Object.entries(enabled)) byId(id).disabled = !isEnabled;
  byId("go").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  byId("edit").hidden = isChat();
  byId("text").hidden = byId("shading").hidden = isEditing || comparing.isOpen;
  byId("comparison").hidden = !comparing.isOpen;
  byId("compare").setAttribute("aria-pressed", String(comparing.isOpen));
  byId("editing").hidden = !isEditing;
  byId("editor-label").textContent = writing.edited === "all" ? "Edit the text. Tokens before the first change are kept." : "Edit the turn. Its tokens become plain text.";
  const {draft, go: label, nothing} = WORDS[writing.mode];
  byId("nothing").hidden = parts.length > 0;
  byId("nothing").textContent = hasChat() ? nothing : `${nothing}\n${NO_CHAT}`;
  byId("draft-label").textContent = byId("draft").placeholder = draft;
  byId("go").textContent = comparing.isOpen ? "Compare" : label;
  byId("model-choice").disabled = isBusy;
  document.body.classList.toggle("generating", isBusy);
  document.body.classList.toggle("empty", !hasTokens);
  if (!hasTokens && document.body.dataset.panel !== "settings") openPanel(isNarrow.matches ? null : "settings");
  document.querySelectorAll("#mode input").forEach((radio) => {
    radio.checked = radio.value === writing.mode;
    radio.disabled = !isIdle || (radio.value === "chat" && !writing.about?.chat);
  });
  byId("chat-reason").textContent = byId("chat-label").title = hasChat() ? "" : NO_CHAT;
  document.querySelectorAll(".turn button, .keep").forEach((button) => (button.disabled = !isIdle));
}

function showStatus(text) {
  byId("status").textContent = text;
}

/** Shows one sentence about an error, or hides it (null), and marks the field of the setting or of the field of the body `param`. */
function showProblem(text, param) {
  byId("problem").hidden = text === null;
  byId("problem").textContent = text ?? "";
  document.querySelectorAll("[aria-invalid]").forEach((field) => field.removeAttribute("aria-invalid"));
  const field = param && byId(FIELD_OF[param.split(".")[0]] ?? `setting-${param}`);
  field?.setAttribute("aria-invalid", "true");
}

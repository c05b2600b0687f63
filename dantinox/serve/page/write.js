"use strict";
// Generating, continuing from an alternative, undo and redo, and editing.

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
  const ends = {eos: "The model ended the text.", stop: "Ended by a stop string.", length: "Ended by the length limit."};
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

"use strict";
// Generating, continuing from an alternative, undo and redo, and editing.

// Generating.

function pushUndo() {
  const text = current();
  text.past.push(text.parts);
  text.future = [];
}

/** Generates a part after the parts `before`; the new part begins with the tokens `kept`, which `model` has generated. */
async function generate(before, kept = [], model = chosenModel()) {
  if (writing.abort || !checkFields()) return;
  const part = newPart(kept, model);
  const body = requestBody(before, part);
  part.model = chosenModel();
  pushUndo();
  const text = current();
  text.parts = [...before, part];
  writing.abort = new AbortController();
  showStatus("Waiting for the model …");
  showProblem(null);
  drawAll();
  try {
    await receive(part, body, writing.abort.signal, (data) => onBegin(before, part, data), (data) => onTokens(part, data));
    showStatus(summaryOf(part));
  } catch (error) {
    const isStopped = error.name === "AbortError";
    showStatus(isStopped ? `Stopped after ${countTokens(part)}.` : "");
    if (!isStopped) showProblem(error.message, error.param);
    if (part.tokens.length === part.kept) takeBack(text);
  } finally {
    writing.abort = null;
    drawAll();
    saveState();
  }
}

/** Restores the draft and the text before a request that generated nothing. */
function takeBack(text) {
  const last = text.parts.at(-2);
  text.parts = text.past.pop();
  if (last?.fresh) byId("draft").value ||= last.text;
}

function onBegin(before, {model}, {prompt_tokens: tokens, left_out: leftOut, texts}) {
  writing.use = {tokens, leftOut};
  if (!isChat()) {
    const isUser = (one) => one.text && !isModel(one) && !(one.ids && baseOf(one.model) === baseOf(model));
    if (texts.length === before.filter(isUser).length) before.filter(isUser).forEach((one, i) => Object.assign(one, {ids: texts[i], model}));
  }
  showStatus("Generating …");
}

function onTokens(part, {tokens}) {
  writing.use.tokens += tokens.length;
  current().parts.forEach((one) => delete one.fresh);
  appendTokens(part, tokens);
}

function go() {
  if (writing.abort || writing.edited !== null || !writing.about || !checkFields()) return;
  const draft = byId("draft").value;
  const {parts} = current();
  if (isChat() && !draft.trim() && (!parts.length || isModel(parts.at(-1)))) {
    showProblem("Write a message first.");
    byId("draft").focus();
    return;
  }
  if (comparing.isOpen) return compareSides();
  byId("draft").value = "";
  generate(draft ? [...parts, {who: "person", text: draft, fresh: true}] : parts);
}

function stop() {
  writing.abort?.abort();
}

function retry() {
  const {parts} = current();
  const last = parts.at(-1);
  if (!last || !isModel(last)) return;
  const seed = byId("setting-seed")?.value;
  generate(parts.slice(0, -1), last.tokens.slice(0, last.kept ?? 0), last.model).then(() => {
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
  generate(parts.slice(0, number), [...part.tokens.slice(0, place), isNew ? {...token, forced: true, picked: true} : token], part.model);
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
    const {who, call, name} = parts[number] ?? {};
    current().parts = number === "all" ? applyEdit(parts, text) : parts.with(number, {who, text, tokens: [], ...(who === "tool" && {call, name})});
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

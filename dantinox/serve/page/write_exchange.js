"use strict";
// Other files: the page's own JSON with all data of a text, plain text, Markdown, and the stories of Kobold Lite.

const FORMAT = "dantinox-text";
const INPUT = "\n{{[INPUT]}}\n"; // Kobold Lite's marks of the turns of a chat
const OUTPUT = "\n{{[OUTPUT]}}\n";
const KOBOLD_FIELDS = {memory: "the memory", authorsnote: "the author's note", worldinfo: "the world info", images: "images"}; // not loaded

// Saving.

const joined = (parts) => parts.map(textOf).join("");
const turnsOf = (parts, mark) => parts.map((part) => `${mark(authorOf(part))}\n\n${visibleText(part).trim()}\n`).join("\n");

/** Returns the text of a part without its reasoning and the notation of tool calls; the calls follow as JSON. */
function visibleText(part) {
  if (!part.message) return textOf(part);
  const calls = (part.message.tool_calls ?? []).map(({function: {name, arguments: values}}) => `${name}(${values})`);
  return [part.message.content, ...calls].filter(Boolean).join("\n\n");
}

function ownFile() {
  const parts = current().parts.map(({fresh, ...part}) => part);
  return JSON.stringify({format: FORMAT, version: 1, mode: writing.mode, model: writing.about.model, settings: currentPreset(), system: byId("system").value, parts});
}

function koboldFile() {
  const pieces = current().parts.map((part) => (isChat() ? `${isModel(part) ? OUTPUT : INPUT}${visibleText(part).trim()}` : textOf(part)));
  const [prompt, ...actions] = pieces;
  const story = {gamestarted: true, prompt, memory: isChat() ? byId("system").value : "", authorsnote: "", anotetemplate: "", actions, actions_metadata: {}, worldinfo: [], wifolders_d: {}, wifolders_l: []};
  return JSON.stringify(isChat() ? {...story, savedsettings: {opmode: 4}} : story);
}

const KINDS = { // of saved files: the ending, the media type, and the text
  json: ["json", "application/json", ownFile],
  text: ["txt", "text/plain", () => (isChat() ? turnsOf(current().parts, (author) => `${author}:`) : joined(current().parts))],
  markdown: ["md", "text/markdown", () => (isChat() ? turnsOf(current().parts, (author) => `## ${author}`) : joined(current().parts))],
  kobold: ["json", "application/json", koboldFile],
  lines: ["jsonl", "application/jsonl", () => linesOf(documentsOf(current().parts))],
  report: ["html", "text/html", () => reportOf(documentsOf(current().parts))],
};

async function save(kind) {
  const [ending, type, text] = KINDS[kind];
  const name = (writing.about?.model ?? "text").replace(/[^\w.-]+/g, "_");
  try {
    download(`${name}-${writing.mode}${kind === "kobold" ? "-kobold" : ""}.${ending}`, type, await text());
    byId("save-dialog").close();
  } catch (error) {
    byId("save-dialog").close();
    showProblem(error.message);
  }
}

// Loading. Every reader returns {mode, parts, notes, preset}; it throws an Error if the file is wrong.

/** Returns the content of a file by its form: the page's JSON, a story of Kobold Lite, JSON Lines, or plain text. */
function contentOf(name, text) {
  if (/\.(txt|md|text|markdown)$/i.test(name)) return textContent(text);
  let whole = null;
  try {
    whole = JSON.parse(text);
  } catch {
    return linesContent(text); // more than one line, or no JSON at all
  }
  if (whole?.format === FORMAT) return ownContent(whole);
  if (typeof whole?.prompt === "string" && Array.isArray(whole.actions)) return koboldContent(whole);
  return linesContent(text);
}

function textContent(text) {
  if (!text) throw new Error("it is empty");
  return {mode: "story", parts: [{who: "person", text}], notes: []};
}

function linesContent(text) {
  const {parts, skipped} = partsOf(text);
  const notes = skipped ? [`${whole(skipped)} more samples were skipped.`] : [];
  const isSameVocabulary = parts.every((part) => !isModel(part) || part.vocab === writing.about.vocab_size);
  return {parts: isSameVocabulary ? parts : withoutTokens(parts), notes: isSameVocabulary ? notes : [OTHER_VOCABULARY, ...notes]};
}
const OTHER_VOCABULARY = "Its tokens belong to another vocabulary: only the plain text was loaded.";

function ownContent({version, mode, model, parts, settings, system}) {
  if (version !== 1) throw new Error(`its version is ${version}, and this page reads version 1`);
  if (!["story", "chat"].includes(mode) || !Array.isArray(parts) || !parts.every(isPart)) throw new Error("its parts are not those of a text");
  const isSame = parts.every((part) => !isModel(part) || !part.tokens.length || baseOf(part.model ?? model) === baseOf(chosenModel()) || part.vocab === writing.about.vocab_size);
  const preset = cleanPresets({file: settings}).file;
  return {mode, parts: isSame ? parts : withoutTokens(parts), preset, system: typeof system === "string" ? system : "", notes: isSame ? [] : [OTHER_VOCABULARY]};
}

function isPart(part) {
  const isText = ["person", "model", "tool"].includes(part?.who) && typeof part.text === "string";
  const isList = (list, fits) => list === undefined || list === null || (Array.isArray(list) && list.every(fits));
  const isWord = (one) => Number.isInteger(one?.id) && typeof one.text === "string";
  const isToken = (token) => isWord(token) && [undefined, ...STRATEGIES].includes(token.strategy) && isList(token.alternatives, isWord) && isList(token.candidates, isWord);
  const calls = part?.message?.tool_calls;
  const isCall = (call) => typeof call?.id === "string" && typeof call.function?.name === "string" && typeof call.function.arguments === "string";
  return isText && isList(part.ids, Number.isInteger) && isList(calls, isCall) && (isModel(part) ? Array.isArray(part.tokens) && part.tokens.every(isToken) : isList(part.tokens, () => false));
}

/** Returns the text of a story of Kobold Lite: `prompt` and `actions`. If it has marks of turns, it becomes a chat, and its memory the system message. */
function koboldContent({prompt, actions, memory, ...rest}) {
  if (!actions.every((action) => typeof action === "string")) throw new Error("its actions are not all text");
  const text = [prompt, ...actions].join("");
  const turns = text.split(/\n?\{\{\[(INPUT|OUTPUT)\]\}\}\n?/);
  const isConversation = turns.length > 1 && Boolean(writing.about.chat);
  const left = Object.entries({...rest, ...(!isConversation && {memory})}).filter(([name, value]) => KOBOLD_FIELDS[name] && value?.length);
  const notes = left.length ? [`Not loaded: ${left.map(([name]) => KOBOLD_FIELDS[name]).join(", ")}.`] : [];
  if (!isConversation) {
    if (!text) throw new Error("it has no text");
    return {mode: "story", notes, parts: [prompt, ...actions].filter(Boolean).map((one, i) => (i % 2 ? {who: "model", text: one, tokens: []} : {who: "person", text: one}))};
  }
  const parts = [];
  if (turns[0].trim()) parts.push({who: "person", text: turns[0]});
  for (let i = 1; i < turns.length; i += 2) {
    if (turns[i + 1].trim()) parts.push(turns[i] === "INPUT" ? {who: "person", text: turns[i + 1]} : {who: "model", text: turns[i + 1], tokens: []});
  }
  if (!parts.length) throw new Error("it has no text");
  return {mode: "chat", parts, notes, system: typeof memory === "string" ? memory : ""};
}

/** Replaces the text with that of a file; undo restores it. A wrong file changes nothing. */
async function load(file) {
  const before = {mode: writing.mode, parts: null};
  try {
    const {mode = writing.mode, parts, notes, preset, system} = contentOf(file.name, await file.text());
    if (mode === "chat" && !writing.about.chat) throw new Error("it is a chat, and this model has no chat template");
    if (comparing.isOpen) toggleComparison(false);
    writing.mode = mode;
    before.parts = current().parts;
    pushUndo();
    current().parts = parts;
    showChange();
    settingsChanged();
    showStatus([`${file.name} was loaded.`, ...notes, ...loadSystem(system), ...loadPreset(file.name, preset)].join(" "));
  } catch (error) {
    if (before.parts) {
      current().parts = current().past.pop();
      writing.mode = before.mode;
      drawAll();
    }
    showProblem(`${file.name} cannot be loaded: ${error.message.replace(/\.$/, "")}.`);
  }
}

/** Fills the empty system message; one that the user has written stays. Returns what to say. */
function loadSystem(system) {
  const field = byId("system");
  if (!system || field.value === system) return [];
  if (field.value.trim()) return ["Its system message was not loaded, because there is one."];
  field.value = system;
  saveState();
  return [];
}

/** Saves the settings of a file as a preset, so that the present ones are not lost. Returns what to say. */
function loadPreset(file, preset) {
  if (!preset || (!Object.keys(preset.settings).length && !preset.order)) return [];
  const all = ownPresets();
  const same = Object.entries(all).find(([, one]) => JSON.stringify(one) === JSON.stringify(preset));
  const name = same?.[0] ?? freeName(file.replace(/\.\w+$/, ""), all);
  if (!same && !storePresets({...all, [name]: preset})) return [];
  drawPresets();
  return [`Its settings are the preset ${name}.`];
}

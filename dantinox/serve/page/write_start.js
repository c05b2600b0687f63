"use strict";
// The state that the browser stores across reloads, the panels, and the handlers of keys and buttons.

const STORAGE_KEY = "dantinox.write";
const PANELS = ["token", "settings", "statistics"];
const isNarrow = matchMedia("(max-width: 839px)"); // panels are sheets; the style sheet has the same width

// Storage.

/** Stores the texts, with numbers rounded to 9 digits, and the settings. If the storage is full, omits the alternatives of the tokens. */
function saveState() {
  if (!writing.about) return;
  const serialize = (withAlternatives) => {
    const replacer = (name, value) => {
      if (name === "fresh" || (!withAlternatives && LISTS[name])) return undefined;
      return typeof value === "number" && !Number.isInteger(value) ? Number(value.toPrecision(9)) : value;
    };
    const texts = {story: writing.texts.story.parts, chat: writing.texts.chat.parts};
    const {theme} = document.documentElement.dataset;
    const more = {draft: byId("draft").value, shading: state.shading, theme};
    return JSON.stringify({version: 1, model: writing.about.model, chosen: chosenModel(), mode: writing.mode, texts, settings: savedSettings(), ...more}, replacer);
  };
  for (const withAlternatives of [true, false]) {
    try {
      localStorage.setItem(STORAGE_KEY, serialize(withAlternatives));
      if (!withAlternatives) showStatus(`${byId("status").textContent} The storage of the browser is full: a reload loses the alternatives of the tokens.`);
      return;
    } catch {
      // The storage is full: try without the alternatives.
    }
  }
  showStatus(`${byId("status").textContent} The storage of the browser is full: a reload loses the text, unless you save it to a file.`);
}

function storedState() {
  try {
    const found = JSON.parse(localStorage.getItem(STORAGE_KEY));
    return found?.version === 1 ? found : {};
  } catch {
    return {};
  }
}

/** Returns the parts as plain text with their tool calls, without their tokens. */
function withoutTokens(parts) {
  return parts.map(({tokens, ids, message, call, name, who, ...part}) => {
    const rest = {...(message && {message}), ...(who === "tool" && {call, name})};
    return {who, text: textOf({...part, tokens}), ...(who === "model" && {tokens: []}), ...rest};
  });
}

/** Restores texts, draft and settings. If the model has changed, the stored token ids are not those of its vocabulary, and only plain text remains. */
function restoreState(found) {
  const isSameModel = found.model === writing.about.model;
  for (const mode of ["story", "chat"]) {
    const parts = found.texts?.[mode] ?? [];
    writing.texts[mode].parts = isSameModel ? parts : withoutTokens(parts);
  }
  writing.mode = writing.about.chat && found.mode !== "story" ? "chat" : "story";
  if (SHADINGS.includes(found.shading)) state.shading = found.shading;
  if (writing.models.some(({id}) => id === found.chosen)) byId("model-choice").value = found.chosen;
  byId("draft").value ||= found.draft ?? "";
  restoreSettings(found.settings ?? {});
}

// Panels.

/** Shows one panel (null: none): as a sheet above the composer on a narrow screen, in the side column on a wide one. */
function openPanel(name) {
  document.body.dataset.panel = name ?? "";
  for (const one of PANELS) byId(`show-${one}`).setAttribute("aria-expanded", String(one === name));
  if (name === "token" && state.nodes.length) reveal(state.nodes[state.at]);
}

/** Closes the open sheet and moves the focus back to the element that opened it. Returns whether a sheet was open. */
function closeSheet() {
  const {panel} = document.body.dataset;
  if (!isNarrow.matches || !panel) return false;
  openPanel(null);
  (panel === "token" ? state.nodes[state.at] : byId(`show-${panel}`))?.focus();
  return true;
}

function togglePanel(name) {
  if (isNarrow.matches && document.body.dataset.panel === name) return openPanel(null);
  openPanel(name);
  byId(`${name}-panel`).scrollTop = 0;
  byId(`${name}-panel`).focus();
}

// Modes, keys and buttons.

function openSaving() {
  const isEmpty = !state.nodes.length; // these two formats have only tokens of the model
  for (const kind of ["lines", "report"]) document.querySelector(`[data-save="${kind}"]`).disabled = isEmpty;
  byId("save-dialog").showModal();
}

function setMode(mode) {
  writing.mode = mode;
  comparing.isOpen = false;
  writing.use = null;
  state.at = 0;
  showStatus("");
  showProblem(null);
  drawAll();
  settingsChanged();
}

function clearText() {
  pushUndo();
  current().parts = [];
  comparing.isOpen = false;
  showChange();
  byId("draft").focus();
}

function onEscape() {
  if (document.querySelector(":popover-open, dialog[open]")) return; // the browser closes them
  if (writing.edited !== null) finishEditing(false);
  else if (writing.abort) stop();
  else if (closeSheet()) return;
  else if (comparing.isOpen) toggleComparison(false);
  else if (byId("token").contains(document.activeElement)) state.nodes[state.at]?.focus();
}

function listenToKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") onEscape();
    if (event.key === "?" && !event.target.closest("input, textarea, select, dialog")) byId("help").showModal();
    const isSubmit = event.key === "Enter" && (event.ctrlKey || event.metaKey) && !event.isComposing;
    if (!isSubmit) return;
    event.preventDefault();
    if (writing.edited !== null) finishEditing(true);
    else go();
  });
  byId("tokens").addEventListener("keydown", (event) => {
    const isEnter = event.key === "Enter" && !event.ctrlKey && !event.metaKey;
    if (!event.target.closest(".token") || !(isEnter || Object.hasOwn(MOVES, event.key))) return;
    openPanel("token");
    if (!isEnter) return;
    event.preventDefault();
    byId("token").querySelector(".pick")?.focus();
  });
  byId("tokens").addEventListener("click", (event) => event.target.closest(".token") && openPanel("token"));
}

function listenToButtons() {
  const actions = {
    go, retry, copy, stop,
    undo: () => restore("past", "future"),
    redo: () => restore("future", "past"),
    edit: () => edit("all"),
    clear: clearText,
    edited: () => finishEditing(true),
    unedited: () => finishEditing(false),
    reset: resetSettings,
    compare: () => toggleComparison(),
    "close-comparison": () => toggleComparison(false),
    load: () => byId("file").click(),
    save: openSaving,
    "show-help": () => byId("help").showModal(),
    ...Object.fromEntries(PANELS.map((name) => [`show-${name}`, () => togglePanel(name)])),
  };
  for (const [id, action] of Object.entries(actions)) byId(id).addEventListener("click", () => action());
  document.querySelectorAll("dialog .dismiss").forEach((button) => button.addEventListener("click", () => button.closest("dialog").close()));
  document.querySelectorAll("[data-save]").forEach((button) => button.addEventListener("click", () => save(button.dataset.save)));
  document.querySelectorAll(".close").forEach((button) => button.addEventListener("click", closeSheet));
  byId("actions").addEventListener("click", () => byId("actions").matches(":popover-open") && byId("actions").hidePopover());
  for (const [id, action] of [["file", load], ["preset-file", importPresets]]) {
    byId(id).addEventListener("change", async ({target}) => {
      if (target.files.length) await action(target.files[0]);
      target.value = ""; // the same file can be opened again
    });
  }
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem("dantinox.key", byId("key").value);
    connect();
  });
  byId("mode").addEventListener("change", (event) => setMode(event.target.value));
  byId("chat-label").addEventListener("click", () => !hasChat() && showStatus(NO_CHAT));
  byId("settings").addEventListener("change", () => (showProblem(null), settingsChanged()));
  byId("search").addEventListener("input", searchSettings);
  byId("model-choice").addEventListener("change", saveState);
  byId("draft").addEventListener("change", saveState);
  byId("colors").addEventListener("change", saveState);
  byId("theme").addEventListener("click", saveState);
  isNarrow.addEventListener("change", () => openPanel(isNarrow.matches ? null : "settings"));
  addEventListener("pagehide", () => {
    writing.abort?.abort();
    saveState();
  });
}

/** Shows the name of the model, or a choice if the server has several models or adapters. */
function drawModels() {
  const names = writing.models.map(({id}) => id);
  byId("model-choice").replaceChildren(...names.map((name) => element("option", {value: name}, name)));
  if (names.includes(writing.about.model)) byId("model-choice").value = writing.about.model;
  byId("model-choice").hidden = names.length < 2;
  byId("model-name").hidden = names.length > 1;
}

/** Loads the description of the server. No text can be generated before it arrives. */
async function connect() {
  try {
    const [about] = await Promise.all([request("/api/dantinox/about").then((response) => response.json()), loadModels()]);
    writing.about = about;
  } catch (error) {
    showProblem(error.message);
    return;
  }
  showProblem(null);
  document.title = `${writing.about.model} – DantinoX`;
  byId("model-name").textContent = writing.about.model;
  drawModels();
  buildSettings();
  restoreState(storedState());
  drawAll();
  settingsChanged();
}

document.addEventListener("DOMContentLoaded", () => {
  const {theme} = storedState();
  if (theme) document.documentElement.dataset.theme = theme;
  state.sample = sampleOf([]);
  state.pick = pick;
  openPanel(isNarrow.matches ? null : "settings");
  listen();
  listenToKeys();
  listenToButtons();
  drawAll();
  drawTheme();
  connect();
});

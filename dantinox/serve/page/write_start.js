"use strict";
// What is kept over a reload, and what the keys and buttons do.

/** Numbers as they are shown, and the texts. Where the browser has no room for the alternatives they are left out. */
function keep() {
  if (!writing.about) return;
  const kept = (withAlternatives) => {
    const shorter = (name, value) => {
      if (name === "fresh" || (!withAlternatives && LISTS[name])) return undefined;
      return typeof value === "number" && !Number.isInteger(value) ? Number(value.toPrecision(9)) : value;
    };
    const texts = {story: writing.texts.story.parts, chat: writing.texts.chat.parts};
    const {theme} = document.documentElement.dataset;
    const more = {draft: byId("draft").value, shading: state.shading, theme, open: !byId("settings-panel").hidden};
    return JSON.stringify({version: 1, model: writing.about.model, mode: writing.mode, texts, settings: writtenSettings(), ...more}, shorter);
  };
  for (const withAlternatives of [true, false]) {
    try {
      localStorage.setItem(KEPT, kept(withAlternatives));
      if (!withAlternatives) told(`${byId("status").textContent} Too long to keep the alternatives over a reload.`);
      return;
    } catch {
      // no room: without the alternatives
    }
  }
  told(`${byId("status").textContent} Too long to be kept over a reload: save it.`);
}

/** What was kept, where this page wrote it. Ids are those of another vocabulary when the model has changed: they are left out. */
function kept() {
  try {
    const found = JSON.parse(localStorage.getItem(KEPT));
    return found?.version === 1 ? found : {};
  } catch {
    return {};
  }
}

function asWords(parts) {
  return parts.map((part) => ({who: part.who, text: textOf(part), ...(isModel(part) && {tokens: []})}));
}

function readKept(found) {
  const isSame = found.model === writing.about.model;
  for (const mode of ["story", "chat"]) {
    const parts = found.texts?.[mode] ?? [];
    writing.texts[mode].parts = isSame ? parts : asWords(parts);
  }
  writing.mode = writing.about.chat && found.mode !== "story" ? "chat" : "story";
  if (SHADINGS.includes(found.shading)) state.shading = found.shading;
  byId("draft").value ||= found.draft ?? "";
  readSettings(found.settings ?? {});
}

function setMode(mode) {
  writing.mode = mode;
  writing.use = null;
  state.at = 0;
  told("");
  problem(null);
  drawAll();
  settingsChanged();
}

function clearText() {
  remember();
  current().parts = [];
  writing.use = null;
  told("");
  problem(null);
  drawAll();
  keep();
  byId("draft").focus();
}

function listenToKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && writing.abort) writing.abort.abort();
    else if (event.key === "Escape" && writing.edited !== null) finishEditing(false);
    const isSent = event.key === "Enter" && (event.ctrlKey || event.metaKey) && !event.isComposing;
    if (!isSent) return;
    event.preventDefault();
    if (writing.edited !== null) finishEditing(true);
    else go();
  });
  byId("tokens").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.ctrlKey || event.metaKey || !event.target.closest(".token")) return;
    event.preventDefault();
    byId("token").querySelector(".pick")?.focus();
  });
  byId("token").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !writing.abort) state.nodes[state.at]?.focus();
  });
}

function listenToButtons() {
  const actions = {
    go, retry,
    stop: () => writing.abort?.abort(),
    undo: () => restore("past", "future"),
    redo: () => restore("future", "past"),
    edit: () => edit("all"),
    clear: clearText,
    edited: () => finishEditing(true),
    unedited: () => finishEditing(false),
    toggle: () => {
      openSettings(byId("settings-panel").hidden);
      if (!byId("settings-panel").hidden) byId("settings-panel").scrollIntoView({block: "nearest"});
      keep();
    },
    reset: resetSettings,
    "save-lines": () => exported("lines"),
    "save-report": () => exported("report"),
  };
  for (const [id, action] of Object.entries(actions)) byId(id).addEventListener("click", () => action());
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem("dantinox.key", byId("key").value);
    connect();
  });
  byId("mode").addEventListener("change", (event) => setMode(event.target.value));
  byId("settings").addEventListener("change", () => (problem(null), settingsChanged()));
  byId("draft").addEventListener("change", keep);
  byId("colours").addEventListener("change", keep);
  byId("theme").addEventListener("click", keep);
  addEventListener("pagehide", () => {
    writing.abort?.abort();
    keep();
  });
}

/** Asks the server what it is; until it has answered nothing can be written. */
async function connect() {
  try {
    writing.about = await (await asked("/api/dantinox/about")).json();
  } catch (error) {
    problem(error.message);
    return;
  }
  problem(null);
  document.title = `${writing.about.model} – DantinoX`;
  byId("model").textContent = writing.about.model;
  buildSettings();
  readKept(kept());
  drawAll();
  settingsChanged();
}

document.addEventListener("DOMContentLoaded", () => {
  const {theme, open} = kept();
  if (theme) document.documentElement.dataset.theme = theme;
  state.sample = sampleOf([]);
  state.pick = pick;
  openSettings(open ?? matchMedia("(min-width: 840px)").matches);
  listen();
  listenToKeys();
  listenToButtons();
  drawAll();
  drawTheme();
  connect();
});

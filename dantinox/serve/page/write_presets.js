"use strict";
// Presets: named values of the settings. The page has some, and the browser stores those of the user. A preset replaces all settings
// except those of `KEPT`.

const PRESET_KEY = "dantinox.presets";
const PLAIN = {strategy: "chain", temperature: 1, top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1};
const PRESETS = {
  "Server defaults": {about: "The settings of the run or of the server.", settings: {}},
  Greedy: {about: "Always the most likely token: the same text every time.", settings: {...PLAIN, temperature: 0}},
  Precise: {about: "Low temperature and a small nucleus, for facts and code.", settings: {...PLAIN, temperature: 0.3, top_p: 0.9}},
  Balanced: {about: "Varied, with unlikely tokens removed by min_p.", settings: {...PLAIN, temperature: 0.8, min_p: 0.05}},
  Creative: {about: "High temperature; min_p removes what does not fit.", settings: {...PLAIN, temperature: 1.2, min_p: 0.03}},
  Storyteller: {
    about: "DRY prevents repeated phrases, XTC skips the most likely tokens.",
    settings: {...PLAIN, temperature: 1, min_p: 0.03, dry_multiplier: 0.8, xtc_probability: 0.5, xtc_threshold: 0.1},
  },
  "Mirostat 2": {about: "Holds the surprisal of the text at 5 bits per token.", settings: {...PLAIN, mirostat: 2, mirostat_tau: 5, mirostat_eta: 0.1}},
  "Top n sigma": {about: "Keeps the tokens within one standard deviation of the best one.", settings: {...PLAIN, temperature: 1.2, top_n_sigma: 1}},
  "Entropy router": {about: "Chooses the sampler for each token by the model's uncertainty.", settings: {strategy: "entropy"}},
};
const KEPT = ["seed", "max_new_tokens", "stop", "keep_stop", "stop_token_ids", "ignore_eos", "min_tokens"]; // not part of a preset
const isInPreset = ({name}) => !KEPT.includes(name);

function ownPresets() {
  try {
    return cleanPresets(JSON.parse(localStorage.getItem(PRESET_KEY)));
  } catch {
    return {};
  }
}

/** Returns the valid presets of an object: name → {settings, order}. */
function cleanPresets(found) {
  const isPreset = ([name, preset]) => name && !PRESETS[name] && typeof preset?.settings === "object" && preset.settings !== null;
  const clean = ([name, {settings, order}]) => [name, {settings, order: Array.isArray(order) ? order : null}];
  return Object.fromEntries(Object.entries(found ?? {}).filter(isPreset).map(clean));
}

const presetNames = () => [...Object.keys(PRESETS), ...Object.keys(ownPresets())];
const presetNamed = (name) => PRESETS[name] ?? ownPresets()[name] ?? PRESETS["Server defaults"];

function storePresets(presets) {
  try {
    localStorage.setItem(PRESET_KEY, JSON.stringify(presets));
    return true;
  } catch {
    showProblem("The storage of the browser is full: export the presets to a file to keep them.");
    return false;
  }
}

/** Returns the settings of a request with a preset: its values, and the present values of `KEPT`. */
function settingsOfPreset(name) {
  const {settings, order} = presetNamed(name);
  const kept = Object.entries(chosenSettings()).filter(([key]) => KEPT.includes(key));
  const known = Object.entries(settings).filter(([key]) => settingNamed(key) || key === "preset");
  return {...Object.fromEntries([...known, ...kept]), ...(order && {sampler_order: order})};
}

/** Writes a preset to the fields. */
function applyPreset(name) {
  const {settings, order} = presetNamed(name);
  for (const setting of writing.about.settings.filter(isInPreset)) {
    const field = byId(`setting-${setting.name}`);
    if (field) field.value = fieldText(setting, settings[setting.name]);
  }
  byId("preset").value = settings.preset ?? "";
  customOrder.steps = order ?? null;
  showProblem(null);
  settingsChanged();
}

/** Returns the present settings as a preset. */
function currentPreset() {
  const settings = Object.fromEntries(Object.entries(chosenSettings()).filter(([name]) => name !== "sampler_order" && isInPreset({name})));
  return {settings, order: customOrder.steps};
}

/** Returns the name of the preset that equals the settings, or "". */
function matchingPreset() {
  const serialize = ({settings, order}) => JSON.stringify([Object.entries(settings).sort(([a], [b]) => (a < b ? -1 : 1)), order ?? null]);
  const now = serialize(currentPreset());
  return presetNames().find((name) => serialize(presetNamed(name)) === now) ?? "";
}

// Fields.

function presetFields() {
  const choice = element("select", {id: "preset-choice", "aria-describedby": "preset-about"});
  choice.addEventListener("change", () => applyPreset(choice.value));
  const name = element("input", {id: "preset-name", class: "field", type: "text", maxlength: 60, autocomplete: "off"});
  const button = (id, label, action) => {
    const node = element("button", {id, type: "button"}, label);
    node.addEventListener("click", action);
    return node;
  };
  const save = button("preset-save", "Save", () => savePreset(name.value.trim()));
  const more = [
    button("preset-delete", "Delete", deletePreset),
    button("preset-import", "Import", () => byId("preset-file").click()),
    button("preset-export", "Export", exportPresets),
  ];
  const own = element("details", {id: "own-presets"}, element("summary", {}, "Save or share presets"), element("label", {for: "preset-name"}, "Name"), element("div", {class: "row"}, name, save), element("div", {class: "row more"}, ...more));
  const head = element("div", {class: "setting wide"}, element("label", {for: "preset-choice"}, "Preset"), choice, element("span", {id: "preset-about", class: "help"}));
  return element("div", {id: "presets"}, head, own);
}

function drawPresets() {
  const choice = byId("preset-choice");
  const group = (label, names) => element("optgroup", {label}, ...names.map((name) => element("option", {value: name}, name)));
  const own = Object.keys(ownPresets());
  const custom = element("option", {value: "", disabled: "", hidden: ""}, "custom");
  choice.replaceChildren(custom, group("Built in", Object.keys(PRESETS)), ...(own.length ? [group("Yours", own)] : []));
  const found = matchingPreset();
  choice.value = found;
  byId("preset-about").textContent = found ? (presetNamed(found).about ?? "Your preset.") : "These settings are no preset.";
  byId("preset-delete").disabled = !own.includes(found);
  byId("preset-export").disabled = !own.length;
}

function savePreset(name) {
  if (!name || PRESETS[name]) {
    showProblem(name ? `${name} is a preset of the page: choose another name.` : "Write a name for the preset first.");
    byId("preset-name").focus();
    return;
  }
  if (!checkFields()) return;
  if (storePresets({...ownPresets(), [name]: currentPreset()})) {
    showProblem(null);
    showStatus(`The preset ${name} was saved in this browser.`);
  }
  byId("preset-name").value = "";
  drawPresets();
}

function deletePreset() {
  const name = byId("preset-choice").value;
  const {[name]: removed, ...rest} = ownPresets();
  if (removed && storePresets(rest)) showStatus(`The preset ${name} was deleted. Its values are still in the fields.`);
  drawPresets();
  byId("preset-choice").focus();
}

function exportPresets() {
  download("presets.json", "application/json", JSON.stringify({format: "dantinox-presets", version: 1, presets: ownPresets()}, null, 1));
}

/** Adds the presets of a file. Existing ones of the same name stay: the new one gets a number. */
async function importPresets(file) {
  try {
    const {format, version, presets} = JSON.parse(await file.text());
    if (format !== "dantinox-presets" || version !== 1) throw new Error("it has another format");
    const found = Object.entries(cleanPresets(presets));
    if (!found.length) throw new Error("it has no preset");
    const all = ownPresets();
    for (const [name, preset] of found) all[freeName(name, all)] = preset;
    if (storePresets(all)) showStatus(`${found.length} ${found.length === 1 ? "preset was" : "presets were"} imported.`);
    drawPresets();
  } catch (error) {
    showProblem(`${file.name} is not a file of presets: ${error.message}.`);
  }
}

function freeName(name, taken) {
  let free = name;
  for (let i = 2; taken[free] || PRESETS[free]; i += 1) free = `${name} ${i}`;
  return free;
}

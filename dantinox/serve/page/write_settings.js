"use strict";
// Form fields for the settings of a request, built from the server's description of each setting. An empty field keeps the server's value.

const MAIN = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "dry_multiplier", "xtc_probability", "xtc_threshold", "max_new_tokens", "seed"];
const SLIDERS = { // [first, last, step, the position that means "off"]; the field beside the slider takes all values
  temperature: [0, 2, 0.05],
  top_p: [0, 1, 0.01, 1],
  top_k: [0, 200, 1, 0],
  min_p: [0, 0.5, 0.01, 0],
  repetition_penalty: [1, 1.5, 0.01, 1],
  dry_multiplier: [0, 2, 0.05, 0],
  xtc_probability: [0, 1, 0.05, 0],
  xtc_threshold: [0, 0.5, 0.01],
  max_new_tokens: [0, 2048, 16],
};
const GROUPS = [
  ["End of the text", ({name}) => ["stop", "keep_stop", "stop_token_ids", "ignore_eos", "min_tokens"].includes(name)],
  ["Repetition", ({steps}) => steps.some((step) => stepNamed(step).group === "penalty")],
  ["Bans and biases", ({steps}) => steps.some((step) => stepNamed(step).group === "edit")],
  ["Other samplers", ({section, name}) => section === "generation" && !["preset", "sampler_order"].includes(name)],
  ["Entropy router", ({section, name}) => section === "router" || name === "strategy"],
];
const TITLES = {max_new_tokens: "Max tokens", repetition_penalty: "Repetition", dry_multiplier: "DRY", xtc_probability: "XTC", top_p: "Top-p", top_k: "Top-k", min_p: "Min-p", strategy: "Sampler", dry_breakers: "DRY breakers", eta_cutoff: "Eta cutoff"};
const STRATEGY = {chain: "sampling steps", entropy: "entropy router"};
const LAST_STEPS = ["mirostat", "adaptive_p"]; // at the end of every order
const customOrder = {steps: null}; // names of the sampling steps in the order that the user has set
const stepNamed = (name) => writing.about.steps.find((step) => step.name === name);
const settingNamed = (name) => writing.about.settings.find((setting) => setting.name === name);
const titleOf = (name) => TITLES[name] ?? sentenceCase(name.replaceAll("_", " ")).replace(/^Dry /, "DRY ").replace(/^Xtc /, "XTC ");

function shorten(value) {
  if (value === null) return "off";
  if (typeof value === "number") return String(value);
  if (Array.isArray(value)) return value.length ? `${value.length} entries` : "none";
  if (typeof value === "object") return Object.keys(value).length ? `${Object.keys(value).length} entries` : "none";
  return typeof value === "boolean" ? (value ? "yes" : "no") : String(value);
}

function rangeOf({low, above, high, below}) {
  const bounds = [known(low) && `from ${low}`, known(above) && `above ${above}`, known(high) && high < 2 ** 31 - 1 && `to ${high}`, known(below) && `below ${below}`];
  return bounds.filter(Boolean).join(" ");
}

function fieldOf(setting) {
  const {name, type, value, choices} = setting;
  const common = {id: `setting-${name}`, "aria-describedby": `help-${name}`};
  if (type === "choice" || type === "boolean") {
    const options = type === "boolean" ? [["true", "yes"], ["false", "no"]] : choices.map((one) => [JSON.stringify(one), STRATEGY[one] ?? String(one)]);
    const served = element("option", {value: ""}, `default: ${type === "choice" ? (STRATEGY[value] ?? value) : shorten(value)}`);
    return element("select", common, served, ...options.map(([json, label]) => element("option", {value: json}, label)));
  }
  if (type === "list" || type === "map") return element("textarea", {...common, class: "field", rows: 2, placeholder: shorten(value), spellcheck: "false"});
  const attributes = type === "text" ? {type: "text"} : {type: "number", step: type === "integer" ? 1 : "any", inputmode: type === "integer" ? "numeric" : "decimal"};
  const bounds = {...(known(setting.low) && {min: setting.low}), ...(known(setting.high) && {max: setting.high})};
  return element("input", {...common, ...attributes, ...bounds, class: "field", placeholder: name === "seed" && value === null ? "random" : shorten(value), autocomplete: "off"});
}

function settingRow(setting) {
  const {name, type, help} = setting;
  const format = {list: " One entry per line.", map: " One entry per line: token=number."}[type] ?? "";
  const range = rangeOf(setting);
  const text = `${sentenceCase(help)}.${format}${range && ` Range: ${range}.`}`;
  const label = element("label", {for: `setting-${name}`, title: text}, titleOf(name));
  const note = element("span", {id: `help-${name}`, class: "help"}, text);
  return element("div", {class: `setting${["list", "map"].includes(type) || name === "strategy" ? " wide" : ""}`, "data-of": name}, label, fieldOf(setting), note);
}

/** Returns the row of a field that is not a setting of the server. */
function extraRow(id, label, field, help) {
  field.id = id;
  field.setAttribute("aria-describedby", `help-${id}`);
  return element("div", {class: "setting"}, element("label", {for: id}, label), field, element("span", {id: `help-${id}`, class: "help"}, help));
}

/** Returns the row of a setting with a slider. An empty field leaves the slider at the server's value. */
function sliderRow(setting) {
  const row = settingRow(setting);
  const {name} = setting;
  const [min, max, step] = SLIDERS[name];
  const top = name === "max_new_tokens" ? Math.min(max, writing.about.context) : max;
  const field = row.querySelector("input");
  const slider = element("input", {id: `slider-${name}`, type: "range", min, max: top, step, "aria-hidden": "true", tabindex: -1}); // the number field has the keys
  slider.addEventListener("input", () => {
    field.value = slider.value;
    row.classList.add("is-set");
  });
  field.addEventListener("input", () => drawSlider(setting));
  row.classList.add("with-slider");
  field.before(slider);
  return row;
}

function drawSlider({name, value}) {
  const text = byId(`setting-${name}`).value;
  const off = SLIDERS[name][3];
  byId(`slider-${name}`).value = text.trim() === "" ? (value ?? off ?? 0) : text;
}

/** Builds all fields from the server's description. */
function buildSettings() {
  const {settings, alternatives} = writing.about;
  const rest = new Map(settings.map((setting) => [setting.name, setting]));
  const take = (name) => {
    const setting = rest.get(name);
    rest.delete(name);
    return SLIDERS[name] ? sliderRow(setting) : settingRow(setting);
  };
  const main = MAIN.filter((name) => rest.has(name)).map(take);
  const count = element("input", {type: "number", min: 0, max: alternatives, step: 1, class: "field", placeholder: "10"});
  main.push(extraRow("num-alternatives", "Alternatives", count, `Number of alternatives reported with each token, at most ${alternatives}.`));
  const groups = GROUPS.map(([name, belongs]) => {
    const rows = [...rest.values()].filter(belongs).map((setting) => take(setting.name));
    return element("details", {}, element("summary", {}, `${name} `, element("span", {class: "count"})), ...rows);
  });
  const [system, ...more] = chatFields();
  byId("settings").replaceChildren(presetFields(), system, element("div", {class: "main-settings"}, ...main), ...more, orderGroup(), ...groups);
  drawOrder();
}

/** Shows the settings whose name or help contains all words of the search; an empty search shows all and closes the groups. */
function searchSettings() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (row) => words.every((word) => `${row.textContent} ${row.dataset.of ?? ""}`.toLowerCase().includes(word));
  byId("settings").classList.toggle("searching", words.length > 0);
  byId("settings").querySelectorAll(".setting").forEach((row) => row.classList.toggle("no-match", !matches(row)));
  byId("settings").querySelectorAll("details").forEach((group) => {
    group.open = words.length > 0;
    group.classList.toggle("no-match", !group.querySelector(".setting:not(.no-match)"));
  });
  const count = byId("settings").querySelectorAll(".setting:not(.no-match)").length;
  byId("found").textContent = words.length ? `${whole(count)} found` : "";
}

// The order of the sampling steps.

function orderGroup() {
  const names = Object.keys(writing.about.orders).map((name) => element("option", {value: name}, name));
  const served = element("option", {value: ""}, "default");
  const custom = element("option", {value: "own", disabled: "", hidden: ""}, "custom");
  const help = "The program whose order of sampling steps applies; their values do not change. The arrows set a custom order.";
  const row = extraRow("preset", "Order as in", element("select", {}, served, ...names, custom), help);
  row.querySelector("select").addEventListener("change", () => {
    customOrder.steps = null;
    drawOrder();
  });
  return element("details", {id: "order-group"}, element("summary", {}, "Order of the steps ", element("span", {class: "count"})), row, element("ol", {class: "order", id: "order"}));
}

/** Returns the steps in their current order, with the two steps of mirostat and of p-less as one. For an order of Kobold codes, this is the preset's order. */
function currentOrder() {
  if (customOrder.steps) return customOrder.steps;
  const chosen = byId("preset").value;
  const served = settingNamed("sampler_order").value;
  const names = chosen || !served || typeof served[0] === "number" ? writing.about.orders[chosen || settingNamed("preset").value] : served;
  return [...new Set(names.map((name) => name.replace(/^(mirostat|p_less)_.*/, "$1")))];
}

/** Draws the list of steps; `focus` is the step and the direction of the button to focus. */
function drawOrder(focus = null) {
  byId("preset").value = customOrder.steps ? "own" : byId("preset").value === "own" ? "" : byId("preset").value;
  const order = currentOrder();
  const chosen = chosenSettings();
  const isOn = (name) => (writing.about.steps.find((step) => step.name.startsWith(name))?.on ?? []).some((key) => key in chosen && JSON.stringify(chosen[key]) !== JSON.stringify(settingNamed(key)?.default));
  const items = order.map((name, i) => {
    const moveButton = (offset, arrow) => {
      const button = element("button", {type: "button", "aria-label": `Move ${name} ${offset < 0 ? "earlier" : "later"}`}, arrow);
      button.disabled = LAST_STEPS.includes(name) || !order[i + offset] || LAST_STEPS.includes(order[i + offset]);
      button.addEventListener("click", () => {
        const moved = order.filter((one) => one !== name);
        moved.splice(i + offset, 0, name);
        customOrder.steps = moved;
        drawOrder([name, offset]);
        settingsChanged();
      });
      return button;
    };
    return element("li", {class: isOn(name) ? "on" : "", "data-step": name}, element("span", {}, titleOf(name)), moveButton(-1, "↑"), moveButton(1, "↓"));
  });
  byId("order").replaceChildren(...items);
  if (focus) {
    const buttons = [...byId("order").querySelectorAll(`[data-step="${focus[0]}"] button`)];
    const first = buttons[focus[1] < 0 ? 0 : 1];
    (first.disabled ? buttons.find((button) => !button.disabled) : first)?.focus();
  }
}

// Reading the fields.

/** Returns the text of a field for a value of its setting; undefined gives an empty field. */
function fieldText({name, type}, value) {
  if (value === undefined || value === null) return "";
  if (type === "choice" || type === "boolean") return JSON.stringify(value);
  if (Array.isArray(value)) return value.map((one) => String(one).replaceAll("\n", "\\n")).join("\n");
  return String(value);
}

function valueOf({name, type}) {
  const text = byId(`setting-${name}`).value;
  if (text.trim() === "") return undefined;
  if (type === "number" || type === "integer") return Number(text);
  if (type === "choice" || type === "boolean") return JSON.parse(text);
  if (type === "text") return /^\d+$/.test(text) ? Number(text) : text;
  const lines = text.split("\n").filter((line) => line !== "").map((line) => line.replaceAll("\\n", "\n"));
  if (name === "stop" || type === "map" || name === "sequence_bias") return lines;
  return lines.map((line) => (/^\d+$/.test(line) ? Number(line) : line));
}

/** Returns the settings whose fields are not empty, by name. */
function chosenSettings() {
  if (!writing.about) return {};
  const all = writing.about.settings.filter(({name}) => byId(`setting-${name}`));
  const chosen = Object.fromEntries(all.map((setting) => [setting.name, valueOf(setting)]).filter(([, value]) => value !== undefined));
  if (customOrder.steps) chosen.sampler_order = customOrder.steps;
  else if (byId("preset").value) chosen.preset = byId("preset").value;
  return chosen;
}

function numAlternatives() {
  const text = byId("num-alternatives").value;
  return text === "" ? 10 : Math.max(0, Math.min(writing.about.alternatives, Math.round(Number(text))));
}

/** Returns whether all numbers are in their ranges and all definitions are valid; otherwise shows the first one that is not. */
function checkFields() {
  const wrong = [...byId("settings").querySelectorAll("input")].find((field) => !field.checkValidity());
  if (!wrong) return checkDefinitions();
  const label = byId("settings").querySelector(`label[for="${wrong.id}"]`).textContent;
  showProblem(`${label}: ${wrong.validationMessage}`, wrong.id.replace("setting-", ""));
  showField(wrong);
  return false;
}

function checkDefinitions() {
  try {
    formatFields();
    if (isChat()) toolFields();
    return true;
  } catch (error) {
    showProblem(error.message, error.param);
    showField(byId(FIELD_OF[error.param]));
    return false;
  }
}

function showField(field) {
  openPanel("settings");
  const group = field.closest("details");
  if (group) group.open = true;
  field.focus();
}

function settingsChanged() {
  const chosen = chosenSettings();
  byId("settings").querySelectorAll(".setting[data-of]").forEach((row) => row.classList.toggle("is-set", row.dataset.of in chosen));
  byId("settings").querySelectorAll("details:has(.count)").forEach((group) => {
    const count = group.querySelectorAll(".is-set").length + (group.id === "order-group" && ("preset" in chosen || "sampler_order" in chosen) ? 1 : 0);
    group.querySelector(".count").textContent = count ? `(${count} set)` : "";
  });
  writing.about.settings.filter(({name}) => SLIDERS[name]).forEach(drawSlider);
  drawChatFields();
  drawOrder();
  drawPresets();
  saveState();
}

const RESET = "[id^=setting-], #num-alternatives, #preset"; // texts that the user has written are kept

function resetSettings() {
  byId("settings").querySelectorAll(RESET).forEach((field) => (field.value = ""));
  customOrder.steps = null;
  showProblem(null);
  settingsChanged();
}

const UNSAVED = /^(slider-|preset-)/; // derived from other fields

function savedSettings() {
  const fields = [...byId("settings").querySelectorAll("input, select, textarea")].filter((field) => field.value !== "" && field.value !== "own" && !UNSAVED.test(field.id));
  return {fields: Object.fromEntries(fields.map((field) => [field.id, field.value])), order: customOrder.steps};
}

function restoreSettings({fields, order}) {
  customOrder.steps = order ?? null;
  for (const [id, value] of Object.entries(fields ?? {})) {
    const field = byId(id);
    if (field && byId("settings").contains(field) && typeof value === "string") field.value = value;
  }
}

"use strict";
// The settings of a request: fields made from what the server says of each. An empty field is as the server has it.

const MAIN = ["strategy", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens", "seed"];
const GROUPS = [
  ["The end", ({name}) => ["stop", "keep_stop", "stop_token_ids", "ignore_eos", "min_tokens"].includes(name)],
  ["Repetition", ({steps}) => steps.some((step) => stepOf(step).group === "penalty")],
  ["Words and bans", ({steps}) => steps.some((step) => stepOf(step).group === "edit")],
  ["Other samplers", ({section, name}) => section === "generation" && !["preset", "sampler_order"].includes(name)],
  ["Router", ({section}) => section === "router"],
];
const TITLES = {max_new_tokens: "Length", strategy: "Chosen by", seed: "Seed", temperature: "Temperature"};
const STRATEGY = {chain: "the chain of samplers", entropy: "the entropy router"};
const stepOf = (name) => writing.about.steps.find((step) => step.name === name);
const orderOf = {own: null}; // names of steps where the person has moved them

const title = (name) => TITLES[name] ?? name.replaceAll("_", " ");

function short(value) {
  if (value === null) return "off";
  if (typeof value === "number") return String(value);
  if (Array.isArray(value)) return value.length ? `${value.length} given` : "none";
  if (typeof value === "object") return Object.keys(value).length ? `${Object.keys(value).length} given` : "none";
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
    const served = element("option", {value: ""}, `as served: ${type === "choice" ? (STRATEGY[value] ?? value) : short(value)}`);
    return element("select", common, served, ...options.map(([json, label]) => element("option", {value: json}, label)));
  }
  if (type === "list" || type === "map") return element("textarea", {...common, class: "field", rows: 2, placeholder: short(value), spellcheck: "false"});
  const attributes = type === "text" ? {type: "text"} : {type: "number", step: type === "integer" ? 1 : "any", inputmode: type === "integer" ? "numeric" : "decimal"};
  const bounds = {...(known(setting.low) && {min: setting.low}), ...(known(setting.high) && {max: setting.high})};
  const field = element("input", {...common, ...attributes, ...bounds, class: "field", placeholder: name === "seed" && value === null ? "fresh" : short(value), autocomplete: "off"});
  return field;
}

function settingRow(setting) {
  const {name, type, help} = setting;
  const lines = {list: " One a line.", map: " A line each: token=number."}[type] ?? "";
  const range = rangeOf(setting);
  const text = `${help}.${lines}${range && ` Allowed: ${range}.`}`;
  const label = element("label", {for: `setting-${name}`}, title(name));
  const note = element("span", {id: `help-${name}`, class: "help"}, text);
  return element("div", {class: `setting${["list", "map"].includes(type) || name === "strategy" ? " wide" : ""}`, "data-of": name}, label, fieldOf(setting), note);
}

function ownRow(id, label, field, help) {
  field.id = id;
  field.setAttribute("aria-describedby", `help-${id}`);
  return element("div", {class: "setting"}, element("label", {for: id}, label), field, element("span", {id: `help-${id}`, class: "help"}, help));
}

/** All fields; called once what the server has is known. */
function buildSettings() {
  const {settings, alternatives} = writing.about;
  const left = new Map(settings.map((setting) => [setting.name, setting]));
  const take = (name) => {
    const setting = left.get(name);
    left.delete(name);
    return settingRow(setting);
  };
  const main = MAIN.filter((name) => left.has(name)).map(take);
  const count = element("input", {type: "number", min: 0, max: alternatives, step: 1, class: "field", placeholder: "10"});
  main.push(ownRow("alternatives-wanted", "Alternatives", count, `reported with each token, at most ${alternatives}.`));
  const system = element("textarea", {id: "system", class: "field", rows: 2});
  const spoken = element("div", {class: "setting wide", id: "system-row"}, element("label", {for: "system"}, "System message"), system);
  const groups = GROUPS.map(([name, belongs]) => {
    const rows = [...left.values()].filter(belongs).map((setting) => take(setting.name));
    return element("details", {}, element("summary", {}, `${name} `, element("span", {class: "count"})), ...rows);
  });
  byId("settings").replaceChildren(spoken, ...main, orderGroup(), ...groups);
  drawOrder();
}

// The order of the steps.

function orderGroup() {
  const names = Object.keys(writing.about.orders).map((name) => element("option", {value: name}, name));
  const served = element("option", {value: ""}, "as served");
  const own = element("option", {value: "own", disabled: "", hidden: ""}, "an order of your own");
  const preset = ownRow("preset", "Preset", element("select", {}, served, ...names, own), "Whose order the steps run in; it sets no values. The arrows make an order of your own.");
  preset.querySelector("select").addEventListener("change", () => {
    orderOf.own = null;
    drawOrder();
  });
  return element("details", {id: "order-group"}, element("summary", {}, "Order ", element("span", {class: "count"})), preset, element("ol", {class: "order", id: "order"}));
}

function served(name) {
  return writing.about.settings.find((setting) => setting.name === name).value;
}

/** The steps that run, mirostat as one; served orders of Kobold's codes are shown as their preset's. */
function orderNow() {
  if (orderOf.own) return orderOf.own;
  const chosen = byId("preset").value;
  const given = served("sampler_order");
  const names = chosen || !given || typeof given[0] === "number" ? writing.about.orders[chosen || served("preset")] : given;
  return [...new Set(names.map((name) => (name.startsWith("mirostat") ? "mirostat" : name)))];
}

function drawOrder(focus = null) {
  byId("preset").value = orderOf.own ? "own" : byId("preset").value === "own" ? "" : byId("preset").value;
  const order = orderNow();
  const given = givenSettings();
  const isOn = (name) => (writing.about.steps.find((step) => step.name.startsWith(name))?.on ?? []).some((key) => key in given && JSON.stringify(given[key]) !== JSON.stringify(defaultOf(key)));
  const items = order.map((name, i) => {
    const move = (way, sign) => {
      const button = element("button", {type: "button", "aria-label": `Move ${name} ${way < 0 ? "earlier" : "later"}`}, sign);
      button.disabled = name === "mirostat" || !order[i + way] || order[i + way] === "mirostat";
      button.addEventListener("click", () => {
        const moved = order.filter((one) => one !== name);
        moved.splice(i + way, 0, name);
        orderOf.own = moved;
        drawOrder([name, way]);
        settingsChanged();
      });
      return button;
    };
    return element("li", {class: isOn(name) ? "on" : "", "data-step": name}, element("span", {}, name.replaceAll("_", " ")), move(-1, "↑"), move(1, "↓"));
  });
  byId("order").replaceChildren(...items);
  if (focus) {
    const buttons = [...byId("order").querySelectorAll(`[data-step="${focus[0]}"] button`)];
    const first = buttons[focus[1] < 0 ? 0 : 1];
    (first.disabled ? buttons.find((button) => !button.disabled) : first)?.focus();
  }
}

const defaultOf = (name) => writing.about.settings.find((setting) => setting.name === name)?.default;

// What is given.

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

function givenSettings() {
  if (!writing.about) return {};
  const all = writing.about.settings.filter(({name}) => byId(`setting-${name}`));
  const given = Object.fromEntries(all.map((setting) => [setting.name, valueOf(setting)]).filter(([, value]) => value !== undefined));
  if (orderOf.own) given.sampler_order = orderOf.own;
  else if (byId("preset").value) given.preset = byId("preset").value;
  return given;
}

function alternativesWanted() {
  const text = byId("alternatives-wanted").value;
  return text === "" ? 10 : Math.max(0, Math.min(writing.about.alternatives, Math.round(Number(text))));
}

/** Whether the browser finds all numbers in their ranges; the first that is not is shown. */
function givenAreGood() {
  const wrong = [...byId("settings").querySelectorAll("input")].find((field) => !field.checkValidity());
  if (!wrong) return true;
  const label = byId("settings").querySelector(`label[for="${wrong.id}"]`).textContent;
  problem(`${label}: ${wrong.validationMessage}`, wrong.id.replace("setting-", ""));
  openSettings(true);
  const group = wrong.closest("details");
  if (group) group.open = true;
  wrong.focus();
  return false;
}

function settingsChanged() {
  const given = givenSettings();
  byId("settings").querySelectorAll(".setting[data-of]").forEach((row) => row.classList.toggle("is-set", row.dataset.of in given));
  byId("settings").querySelectorAll("details").forEach((group) => {
    const count = group.querySelectorAll(".is-set").length + (group.id === "order-group" && ("preset" in given || "sampler_order" in given) ? 1 : 0);
    group.querySelector(".count").textContent = count ? `(${count} set)` : "";
  });
  byId("system-row").hidden = !isChat();
  drawOrder();
  keep();
}

function resetSettings() {
  byId("settings").querySelectorAll("input, select, textarea:not(#system)").forEach((field) => (field.value = ""));
  orderOf.own = null;
  settingsChanged();
}

function openSettings(isOpen) {
  byId("settings-panel").hidden = !isOpen;
  byId("toggle").setAttribute("aria-expanded", String(isOpen));
}

function writtenSettings() {
  const fields = [...byId("settings").querySelectorAll("input, select, textarea")].filter((field) => field.value !== "" && field.value !== "own");
  return {fields: Object.fromEntries(fields.map((field) => [field.id, field.value])), order: orderOf.own};
}

function readSettings({fields, order}) {
  orderOf.own = order ?? null;
  for (const [id, value] of Object.entries(fields ?? {})) {
    const field = byId(id);
    if (field && byId("settings").contains(field)) field.value = value;
  }
}

"use strict";
// Shared by the report and the server's web page: the text shaded by token, and the selection of a token. Everything is drawn from one
// state: the sample, the selected token, the token under the pointer, the shading, and the handler of a click on an alternative.
// Generated text enters the page only as text nodes.

const DATA = JSON.parse(document.getElementById("data").textContent);
const NO_TOP_K = 2 ** 30; // a top_k of at least this value is disabled
const STRATEGIES = DATA.strategies;
const GLYPH = Object.fromEntries(STRATEGIES.map((name, s) => [name, DATA.glyphs[s]]));
const METRICS = {
  entropy: ["Entropy H", "bits"],
  varentropy: ["Varentropy V", "bits²"],
  surprisal: ["Surprisal", "bits"],
  attn_entropy: ["Attention entropy", "bits"],
  attn_varentropy: ["Attention varentropy", "bits²"],
  attn_agreement: ["Agreement of heads", ""],
  attn_disagreement: ["Disagreement of heads", ""],
  interaction_strength: ["Interaction strength", ""],
  temperature: ["Temperature T", ""],
};
const ENDED = {eos: "ended by the EOS token", stop: "ended by a stop string", length: "ended by the length limit", loop: "ended because the text repeats itself"};
const SHADINGS = ["entropy", "varentropy", "surprisal", "strategy"];
const state = {sample: null, nodes: [], at: 0, pointed: null, shading: "entropy", pick: null};
const scales = {entropy: {low: 0, high: 1}, varentropy: {low: 0, high: 1}, surprisal: {low: 0, high: 1}}; // of the shading
const byId = (id) => document.getElementById(id);
const isRouted = () => state.sample.strategy === "entropy";

// Numbers.

const known = (value) => value !== null && value !== undefined;
const probabilityOf = (logprob) => (known(logprob) ? Math.exp(logprob) : 0);
const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
const deviation = (values) => Math.sqrt(mean(values.map((value) => (value - mean(values)) ** 2)));
const largest = (values) => values.reduce((most, value) => (value > most && value < Infinity ? value : most), 0);
const valuesOf = (tokens, name) => tokens.map((token) => token[name]).filter(known);

const [TWO, THREE] = [2, 3].map((digits) => new Intl.NumberFormat("en", {maximumSignificantDigits: digits}));
const WHOLE = new Intl.NumberFormat("en", {maximumFractionDigits: 0});
const whole = (x) => (known(x) ? WHOLE.format(x) : "–");

function number(x) {
  if (!known(x)) return "–";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  const text = size && size < 1e-4 ? x.toExponential(0) : (size < 0.1 ? TWO : size < 1000 ? THREE : WHOLE).format(x);
  return text.replaceAll("-", "−");
}

function percent(p) {
  if (p === 0 || p === 1) return `${100 * p} %`;
  if (p < 1e-5) return "<0.001 %";
  if (p > 0.9999) return ">99.99 %";
  const decimals = p < 1e-3 ? 3 : p < 0.01 || p > 0.99 ? 2 : 1;
  return `${(100 * p).toFixed(decimals)} %`;
}

function formatMetric(name, x) {
  const unit = METRICS[name][1];
  return `${number(x)}${unit && " "}${unit}`;
}

function roundUp(x) {
  const unit = 10 ** Math.floor(Math.log10(x));
  return unit * [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find((step) => step >= x / unit - 1e-9);
}

/** Returns a quantile of the finite values of a metric, undefined if there are none. */
function quantile(name, tokens, share) {
  const values = valuesOf(tokens, name).filter(Number.isFinite);
  values.sort((a, b) => a - b);
  return values[Math.min(values.length - 1, Math.floor(share * values.length))];
}

/** Returns the upper end of a scale that compares tokens: the 98th percentile of their finite values, rounded up. */
function scaleEnd(name, tokens) {
  const top = quantile(name, tokens, 0.98);
  return top > 0 ? roundUp(top) : 1;
}

const sentenceCase = (text) => text[0].toUpperCase() + text.slice(1);
const surprisalOf = (logprob) => (known(logprob) ? Math.max(0, -logprob / Math.LN2) : Infinity);

// Elements. Control characters and characters that change the writing direction are shown as symbols.

const INVISIBLE = /[\u0000-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/;

function symbolOf(character) {
  const code = character.codePointAt(0);
  if (character === "\n") return "↵";
  if (character === "\t") return "⇥";
  return code < 32 ? String.fromCodePoint(0x2400 + code) : `‹${code.toString(16).padStart(4, "0")}›`;
}

function visible(text) {
  if (text === "") return "◌";
  const shown = text.replace(new RegExp(INVISIBLE, "g"), symbolOf);
  return shown.replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));
}

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function tableOf(kind, caption, columns, rows) {
  const titles = columns.map((text) => element("th", {scope: "col"}, text));
  const parts = [element("thead", {}, element("tr", {}, ...titles)), element("tbody", {}, ...rows)];
  return element("table", {class: kind}, element("caption", {}, caption), ...parts);
}

function rowOf(name, ...cells) {
  return element("tr", {}, element("th", {scope: "row"}, name), ...cells.map((cell) => element("td", {}, cell)));
}

function pair(name, ...values) {
  return element("div", {}, element("dt", {}, name), element("dd", {}, ...values));
}

function strategyLabel(name) {
  return element("span", {class: `strategy ${name}`}, element("b", {"aria-hidden": "true"}, GLYPH[name]), ` ${name}`);
}

// The text.

function tokenNode(token, i) {
  const word = visible(token.text).replaceAll("↵", "line break");
  const label = [word, token.strategy, token.forced && "forced", `entropy ${formatMetric("entropy", token.entropy)}`].filter(Boolean).join(", ");
  const node = element("span", {class: "token", role: "option", "aria-label": label});
  mark(node, false);
  if (token.text === "") node.append(element("i", {}, "◌"));
  for (const part of token.text.split(new RegExp(`(${INVISIBLE.source})`)).filter(Boolean)) {
    if (INVISIBLE.test(part)) node.append(element("i", {}, symbolOf(part)), "\n\t".includes(part) ? part : "");
    else node.append(part);
  }
  if (token.strategy) {
    node.classList.add(token.strategy);
    node.dataset.glyph = GLYPH[token.strategy];
  }
  node.classList.toggle("forced", Boolean(token.forced));
  node.index = i;
  return node;
}

function shade() {
  byId("text").dataset.shading = state.shading;
  state.nodes.forEach(shadeNode);
  drawLegend();
}

function shadeNode(node, i) {
  const {shading, sample} = state;
  if (!(shading in scales)) return;
  const {low, high} = scales[shading];
  const share = Math.round(100 * Math.max(0, Math.min(1, ((sample.tokens[i][shading] ?? 0) - low) / (high - low))));
  node.style.setProperty("--share", `${share}%`);
}

function drawLegend() {
  const {shading} = state;
  const scale = element("span", {class: "scale"}, ...(shading in scales ? ramp(shading) : ["Colored by strategy"]));
  const names = isRouted() ? STRATEGIES.map(strategyLabel) : [];
  if (state.sample.tokens.some((token) => token.forced)) names.push(element("span", {class: "forced"}, "not sampled"));
  byId("legend").replaceChildren(scale, element("span", {class: "names"}, ...names));
}

function ramp(name) {
  const {low, high} = scales[name];
  const labels = [low ? `≤ ${number(low)}` : "0", number((low + high) / 2), `≥ ${formatMetric(name, high)}`].map((text) => element("span", {}, text));
  return [element("span", {class: "ramp"}), element("span", {class: "ticks"}, ...labels)];
}

// Selecting.

function select(i, focus = false) {
  const {nodes, sample} = state;
  if (nodes.length) {
    mark(nodes[state.at], false);
    state.at = Math.max(0, Math.min(nodes.length - 1, i));
    mark(nodes[state.at], true);
    const section = nodes[state.at].closest("details");
    if (focus && section) section.open = true; // a token in a closed section cannot have the focus
    reveal(nodes[state.at]);
    if (focus) nodes[state.at].focus({preventScroll: true});
  }
  drawToken(sample.tokens[state.at]);
  drawMarks();
}

function mark(node, isSelected) {
  node.tabIndex = isSelected ? 0 : -1;
  node.setAttribute("aria-selected", isSelected);
}

/** Scrolls the text, but not the page, until the token is visible. Parts that come into view change their height in the next frame. */
function reveal(node, frames = 3) {
  const frame = byId("text").getBoundingClientRect();
  const box = node.getBoundingClientRect();
  const isVisible = box.top > frame.top + 8 && box.bottom < frame.bottom - 16;
  if (!isVisible) byId("text").scrollTop += box.top - frame.top - frame.height / 2;
  if (frames) requestAnimationFrame(() => node === state.nodes[state.at] && reveal(node, frames - 1));
}

function point(i) {
  if (i === state.pointed) return;
  state.nodes[state.pointed]?.classList.remove("pointed");
  state.nodes[i]?.classList.add("pointed");
  state.pointed = i;
  drawMarks();
}

/** Returns the token of the line above (step -1) or below (step 1) whose left edge is nearest to the left edge of token i. */
function acrossLines(i, step) {
  const {nodes} = state;
  const distance = (j) => Math.abs(nodes[j].offsetLeft - nodes[i].offsetLeft);
  let j = i;
  while (nodes[j] && nodes[j].offsetTop === nodes[i].offsetTop) j += step;
  let best = nodes[j] ? j : j - step;
  for (const line = nodes[best].offsetTop; nodes[j]?.offsetTop === line; j += step) {
    if (distance(j) < distance(best)) best = j;
  }
  return best;
}

const MOVES = {
  ArrowLeft: () => state.at - 1,
  ArrowRight: () => state.at + 1,
  ArrowUp: () => acrossLines(state.at, -1),
  ArrowDown: () => acrossLines(state.at, 1),
  PageUp: () => state.at - 50,
  PageDown: () => state.at + 50,
  Home: () => 0,
  End: () => state.nodes.length - 1,
};

function onKey(event, focus) {
  const isOtherKey = event.ctrlKey || event.altKey || event.metaKey || !Object.hasOwn(MOVES, event.key);
  if (isOtherKey || !state.nodes.length) return;
  event.preventDefault();
  select(MOVES[event.key](), focus);
}

// Around the text.

function drawColors() {
  const choices = SHADINGS.filter((name) => name !== "strategy" || isRouted()).map((name) => {
    const radio = element("input", {type: "radio", name: "shading", value: name});
    radio.checked = name === state.shading;
    return element("label", {}, radio, element("span", {}, sentenceCase(name)));
  });
  byId("colors").replaceChildren(byId("colors").firstElementChild, ...choices);
}

function isDark() {
  const {theme} = document.documentElement.dataset;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function drawTheme() {
  byId("theme").textContent = isDark() ? "Light theme" : "Dark theme";
  drawPlots();
}

function listen() {
  const index = (event) => event.target.closest(".token")?.index ?? null;
  const tokens = byId("tokens");
  tokens.addEventListener("click", (event) => index(event) !== null && select(index(event), true));
  tokens.addEventListener("pointerover", (event) => point(index(event)));
  tokens.addEventListener("pointerleave", () => point(null));
  tokens.addEventListener("keydown", (event) => onKey(event, true));
  byId("colors").addEventListener("change", (event) => {
    state.shading = event.target.value;
    shade();
  });
  byId("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    drawTheme();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawTheme);
  listenToPlots();
}


"use strict";
// Comparison: the same prompt with the same seed, continued with two choices of settings and models, and the differences of their tokens.

const MAX_DIFF = 4e6; // the most pairs of tokens for which the exact differences are computed
const CURRENT = "Current settings";
const comparing = {
  isOpen: false,
  before: [], // the parts before the continuations
  sides: [newSide(CURRENT), newSide("Greedy")],
};

/** Returns one side: the name of its preset, its model (null: the chosen one), its response and the error that ended it. */
function newSide(preset) {
  return {preset, model: null, part: null, problem: null, nodes: [], about: ""};
}

function toggleComparison(isOpen = !comparing.isOpen) {
  comparing.isOpen = isOpen;
  showStatus("");
  showProblem(null);
  drawComparison();
  drawControls();
  byId("draft").focus();
}

/** Generates both sides at the same time. */
async function compareSides() {
  const draft = byId("draft").value;
  const {parts} = current();
  comparing.before = draft ? [...parts, {who: "person", text: draft}] : parts;
  const chosen = chosenSettings().seed;
  const seed = chosen ?? crypto.getRandomValues(new Uint32Array(1))[0];
  writing.abort = new AbortController();
  showProblem(null);
  showStatus("Generating both …");
  for (const side of comparing.sides) Object.assign(side, {part: newPart([], side.model ?? chosenModel()), problem: null, nodes: [], about: ""});
  drawComparison();
  drawControls();
  await Promise.all(comparing.sides.map((side) => generateSide(side, seed)));
  writing.abort = null;
  markDifferences();
  drawComparison();
  drawControls();
  showStatus(differenceText());
}

async function generateSide(side, seed) {
  const {part} = side;
  const settings = side.preset === CURRENT ? chosenSettings() : settingsOfPreset(side.preset);
  try {
    const body = requestBody(comparing.before, part, {...settings, seed}, part.model);
    await receive(part, body, writing.abort.signal, () => {}, ({tokens}) => appendSide(side, tokens));
    side.about = summaryOf(part);
  } catch (error) {
    if (error.name === "AbortError") side.about = `Stopped after ${countTokens(part)}.`;
    else side.problem = error.message;
  }
}

/** Makes a continuation the next part of the text. */
function keep({part}) {
  byId("draft").value = "";
  pushUndo();
  current().parts = [...comparing.before, part];
  comparing.isOpen = false;
  for (const side of comparing.sides) Object.assign(side, {part: null, nodes: []});
  state.at = Infinity;
  showChange();
  showStatus("The continuation was added to the text.");
  byId("draft").focus();
}

// Differences.

/** Returns for each token of two texts whether it is missing in the other text, by their longest common subsequence. */
function differences(a, b) {
  let first = 0;
  while (first < a.length && first < b.length && a[first] === b[first]) first += 1;
  const [restA, restB] = [a.slice(first), b.slice(first)];
  const marks = [a, b].map((ids) => ids.map((_, i) => i >= first));
  if (restA.length * restB.length > MAX_DIFF) return marks;
  const width = restB.length + 1;
  const lengths = new Uint16Array((restA.length + 1) * width); // of the common subsequence of the rests from i and j
  for (let i = restA.length - 1; i >= 0; i -= 1) {
    for (let j = restB.length - 1; j >= 0; j -= 1) {
      const skip = Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
      lengths[i * width + j] = restA[i] === restB[j] ? lengths[(i + 1) * width + j + 1] + 1 : skip;
    }
  }
  for (let [i, j] = [0, 0]; i < restA.length && j < restB.length; ) {
    if (restA[i] === restB[j]) {
      marks[0][first + i] = marks[1][first + j] = false;
      [i, j] = [i + 1, j + 1];
    } else if (lengths[(i + 1) * width + j] >= lengths[i * width + j + 1]) i += 1;
    else j += 1;
  }
  return marks;
}

const textsOf = ({part}) => part?.tokens.map(({text}) => text) ?? [];

function markDifferences() {
  const marks = differences(...comparing.sides.map(textsOf));
  comparing.sides.forEach((side, i) => (side.marks = marks[i]));
}

function differenceText() {
  const [a, b] = comparing.sides.map(textsOf);
  if (!a.length || !b.length) return "";
  const first = a.findIndex((text, i) => text !== b[i]);
  if (first < 0 && a.length === b.length) return "Both continuations are equal.";
  const equal = first < 0 ? Math.min(a.length, b.length) : first;
  const start = equal ? `The first ${equal === 1 ? "token is" : `${whole(equal)} tokens are`} equal.` : "The first tokens differ.";
  return `${start} Tokens that the other side does not have are underlined.`;
}

// Drawing.

function pieceNode(token, isDifferent) {
  const node = element("span", {class: isDifferent ? "piece differs" : "piece", title: `${percent(probabilityOf(token.logprob))}, entropy ${formatMetric("entropy", token.entropy)}`});
  node.append(token.text);
  return node;
}

/** Adds tokens that have just arrived to a side. While tokens arrive, those after the first difference are marked. */
function appendSide(side, tokens) {
  const [texts, others] = [side, comparing.sides.find((one) => one !== side)].map(textsOf);
  const first = texts.findIndex((text, i) => i < others.length && text !== others[i]);
  for (const token of tokens) {
    const node = pieceNode(token, first >= 0 && side.nodes.length >= first);
    side.nodes.push(node);
    side.body?.append(node);
  }
}

function drawComparison() {
  if (!comparing.isOpen) return;
  byId("columns").replaceChildren(...comparing.sides.map(sideNode));
  byId("keep-hint").hidden = comparing.sides.some(({part}) => part);
}

function selectOf(id, label, names, value, onChange) {
  const field = element("select", {id}, ...names.map((name) => element("option", {value: name}, name)));
  field.value = names.includes(value) ? value : names[0];
  field.addEventListener("change", () => onChange(field.value));
  return element("div", {class: "choice"}, element("label", {for: id}, label), field);
}

function sideNode(side, number) {
  const letter = "AB"[number];
  const presets = selectOf(`side-preset-${number}`, "Settings", [CURRENT, ...presetNames()], side.preset, (name) => (side.preset = name));
  const names = writing.models.map(({id}) => id);
  const models = names.length > 1 ? [selectOf(`side-model-${number}`, "Model", names, side.model ?? chosenModel(), (name) => (side.model = name))] : [];
  const {part, problem} = side;
  side.nodes = (part?.tokens ?? []).map((token, i) => pieceNode(token, side.marks?.[i]));
  side.body = element("p", {class: "continuation", tabindex: 0, role: "region", "aria-label": `Continuation ${letter}`}, ...side.nodes);
  const head = element("div", {class: "side-head"}, element("h3", {}, letter), presets, ...models);
  const node = element("div", {class: "side"}, head);
  if (part) node.append(side.body);
  if (problem) node.append(element("p", {class: "problem"}, problem));
  if (part?.tokens.length && !writing.abort) node.append(element("p", {class: "status"}, `${side.about} ${numbersOf(part)}`), keepButton(side, letter));
  return node;
}

function keepButton(side, letter) {
  const button = element("button", {type: "button", class: "keep"}, `Keep ${letter}`);
  button.addEventListener("click", () => keep(side));
  return button;
}

function numbersOf({tokens, stats}) {
  const surprisal = mean(tokens.map((token) => surprisalOf(token.logprob)).filter(Number.isFinite));
  const speed = stats.decode_tok_per_s;
  const facts = [`Perplexity ${number(surprisal === null ? null : 2 ** surprisal)}`, `mean entropy ${number(mean(valuesOf(tokens, "entropy")))} bits`];
  return `${facts.join(", ")}${known(speed) ? `, ${number(speed)} tokens/s` : ""}.`;
}

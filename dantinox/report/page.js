// The report, which shows one complete sample at a time.

const PART_TOKENS = 100;

/** Rebuilds the tokens of a sample from its columns. */
function unpack(sample) {
  const {columns, lists} = sample;
  const read = {alternatives: 0, candidates: 0};
  const listed = (kind, i) => {
    const {count, word, ...numbers} = lists[kind];
    const first = read[kind];
    read[kind] += count[i];
    return word.slice(first, read[kind]).map((place, at) => {
      const [id, text] = DATA.words[place];
      return {id, text, ...Object.fromEntries(Object.keys(numbers).map((name) => [name, numbers[name][first + at]]))};
    });
  };
  sample.tokens = columns.word.map((word, i) => {
    const token = Object.fromEntries(Object.keys(columns).map((name) => [name, columns[name][i]]));
    [token.id, token.text] = DATA.words[word];
    token.surprisal = surprisalOf(token.logprob);
    return Object.assign(token, {alternatives: listed("alternatives", i), candidates: listed("candidates", i)});
  });
}

function drawText() {
  const {sample} = state;
  state.nodes = sample.tokens.map(tokenNode);
  byId("prompt").textContent = sample.prompt;
  const nothing = element("em", {role: "option", "aria-selected": "false"}, "No token was generated.");
  byId("tokens").replaceChildren(...(state.nodes.length ? partsOf(state.nodes) : [nothing]));
  shade();
}

/** Groups the tokens of a long text into parts of whole lines; the browser lays out only the parts in view. */
function partsOf(nodes) {
  const parts = [[]];
  nodes.forEach((node, i) => {
    parts.at(-1).push(node);
    if (parts.at(-1).length >= PART_TOKENS && state.sample.tokens[i].text.endsWith("\n")) parts.push([]);
  });
  const [first, ...others] = parts.filter((part) => part.length); // the first line continues the prompt
  return [...first, ...others.map((part) => element("span", {class: "part", role: "presentation"}, ...part))];
}

// Header and footer.

function drawTotals() {
  const {tokens, stats, finish_reason: reason, seed} = state.sample;
  const surprisal = mean(valuesOf(tokens, "surprisal"));
  const entropies = valuesOf(tokens, "entropy");
  const facts = [
    ["Perplexity", number(surprisal === null ? null : 2 ** surprisal), "under the model"],
    ["Mean surprisal", number(surprisal), "bits"],
    ["Mean entropy", number(mean(entropies)), entropies.length ? `± ${number(deviation(entropies))} bits` : "bits"],
    ["Mean varentropy", number(mean(valuesOf(tokens, "varentropy"))), "bits²"],
    ["Length", whole(tokens.length), `tokens, ${ENDED[reason] ?? reason}`],
    ["Speed", number(stats.decode_tok_per_s), "tokens/s"],
    ["Time", number(stats.seconds), `s, first token ${number(stats.first_token_seconds)} s`],
    ["Seed", String(seed), ""],
  ];
  byId("totals").replaceChildren(...facts.map(([name, value, unit]) => pair(name, element("b", {}, value), ` ${unit}`)));
}

function fillPairs(id, numbers, nullText) {
  const shown = (value) => (typeof value === "number" ? number(value) : value === null ? nullText : JSON.stringify(value));
  const pairs = Object.entries(numbers ?? {}).map(([name, value]) => pair(name, shown(value)));
  byId(id).replaceChildren(...pairs);
  byId(id).closest("details").hidden = pairs.length === 0;
}

function show(sample) {
  Object.assign(state, {sample, at: 0, pointed: null});
  if (!isRouted() && state.shading === "strategy") state.shading = "entropy";
  document.body.classList.toggle("routed", isRouted());
  drawColors();
  drawTotals();
  drawText();
  buildStrips();
  drawStrategies();
  fillPairs("settings", sample.settings, "none");
  fillPairs("router", sample.router, "no bound");
  drawTheme();
  select(0);
}

function start() {
  const count = DATA.samples.length;
  const names = DATA.samples.map(({seed, tokens}, s) => `${s + 1} of ${count}, seed ${seed}, ${whole(tokens.length)} tokens`);
  byId("sample").append(...names.map((name, s) => element("option", {value: s}, name)));
  byId("chooser").hidden = count < 2;
  listen();
  byId("sample").addEventListener("change", (event) => show(DATA.samples[event.target.value]));
  show(DATA.samples[0]);
}

DATA.samples.forEach(unpack);
for (const name of Object.keys(scales)) scales[name].high = scaleEnd(name, DATA.samples.flatMap(({tokens}) => tokens));
document.addEventListener("DOMContentLoaded", start);

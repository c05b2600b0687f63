// The report: samples that are complete, one of them on the screen.

// A sample, its columns made into tokens again.

function unpack(sample) {
  const {columns, lists} = sample;
  const taken = {alternatives: 0, candidates: 0};
  const listed = (kind, i) => {
    const {count, word, ...numbers} = lists[kind];
    const first = taken[kind];
    taken[kind] += count[i];
    return word.slice(first, taken[kind]).map((place, at) => {
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
  const nothing = element("em", {role: "option", "aria-selected": "false"}, "no token was generated");
  byId("tokens").replaceChildren(...(state.nodes.length ? state.nodes : [nothing]));
  shade();
}

// Around the text.

function drawTotals() {
  const {tokens, stats, finish_reason: reason, seed} = state.sample;
  const surprise = mean(valuesOf(tokens, "surprisal"));
  const facts = [
    ["perplexity", number(surprise === null ? null : 2 ** surprise), "under the model"],
    ["mean surprisal", number(surprise), "bits"],
    ["mean entropy", number(mean(valuesOf(tokens, "entropy"))), "bits"],
    ["mean varentropy", number(mean(valuesOf(tokens, "varentropy"))), "bits²"],
    ["length", whole(tokens.length), `tokens, ${ENDED[reason] ?? reason}`],
    ["speed", number(stats.decode_tok_per_s), "tokens/s"],
    ["time", number(stats.seconds), `s, first token ${number(stats.first_token_seconds)} s`],
    ["seed", String(seed), ""],
  ];
  byId("totals").replaceChildren(...facts.map(([name, value, unit]) => pair(name, element("b", {}, value), ` ${unit}`)));
}

function fillPairs(id, numbers, none) {
  const shown = (value) => (typeof value === "number" ? number(value) : value === null ? none : JSON.stringify(value));
  const pairs = Object.entries(numbers ?? {}).map(([name, value]) => pair(name, shown(value)));
  byId(id).replaceChildren(...pairs);
  byId(id).closest("details").hidden = pairs.length === 0;
}

function show(sample) {
  Object.assign(state, {sample, at: 0, pointed: null});
  if (!isRouted() && state.shading === "strategy") state.shading = "entropy";
  document.body.classList.toggle("routed", isRouted());
  drawColours();
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
for (const name of Object.keys(ENDS)) ENDS[name] = endOfScale(name, DATA.samples.flatMap(({tokens}) => tokens));
document.addEventListener("DOMContentLoaded", start);

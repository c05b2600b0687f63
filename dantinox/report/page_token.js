// The selected token: its probabilities, its alternatives, the rules that chose its strategy, and its metrics.

function drawToken(token) {
  const routed = token?.strategy ? [rules, candidates, parameters] : [];
  const views = [headOf, probabilities, alternatives, ...routed, metrics, ...(token?.heads ? [heads] : [])];
  const nothing = element("p", {class: "note"}, "Nothing was generated.");
  byId("token").replaceChildren(...(token ? views.map((view) => view(token)) : [nothing]));
}

function headOf(token) {
  const place = `Token ${whole(state.at + 1)} of ${whole(state.nodes.length)}, id ${token.id}`;
  const head = element("div", {class: "head"}, element("span", {class: "big"}, visible(token.text)));
  if (token.strategy) head.append(strategyLabel(token.strategy));
  head.append(element("span", {class: "place"}, place));
  return head;
}

function probabilities(token) {
  const fact = (value, meaning) => element("div", {}, element("b", {}, value), element("span", {}, meaning));
  const possible = `${whole(token.survivors)} possible ${token.survivors === 1 ? "token" : "tokens"}`;
  const facts = element("div", {class: "probabilities"},
    fact(percent(probabilityOf(token.logprob)), `before sampling, rank ${whole(token.rank + 1)} of ${whole(state.sample.vocab_size)}`),
    fact(known(token.logprob_sampled) ? percent(probabilityOf(token.logprob_sampled)) : "impossible", `after sampling, ${possible}`),
  );
  if (token.forced) facts.append(element("p", {class: "note"}, "Forced: this token was not sampled."));
  return facts;
}

// Alternatives.

function alternatives(token) {
  const listed = token.alternatives.some(({id}) => id === token.id) ? token.alternatives : [...token.alternatives, token];
  const all = listed.map((one) => ({...one, before: probabilityOf(one.logprob), after: probabilityOf(one.logprob_sampled)}));
  const end = Math.min(1, roundUp(Math.max(1e-6, ...all.flatMap(({before, after}) => [before, after]))));
  const rows = all.map((one) => alternativeRow(one, end, one.id === token.id));
  const others = state.sample.vocab_size - all.length;
  if (others > 0) rows.push(restRow(others, all));
  const head = ["Token", `0 to ${number(100 * end)} %`, "Before", "After"];
  const action = state.pick ? ": select one to continue from here with it" : "";
  return tableOf("alternatives", `Alternatives before and after sampling${action}`, head, rows);
}

function alternativeRow(one, end, isChosen) {
  const {text, before, after} = one;
  const [light, strong] = [element("i", {class: "before"}), element("i", {class: "after"})];
  const bars = element("div", {class: "bars", "aria-hidden": "true"}, light, strong);
  [before, after].forEach((p, b) => (bars.children[b].style.width = `${Math.min(100, (100 * p) / end)}%`));
  const removed = element("span", {class: "muted", role: "img", "aria-label": "removed"}, "×");
  const name = state.pick ? pickButton(one) : visible(text);
  return chosenRow(isChosen, "chosen", name, bars, percent(before), after > 0 ? percent(after) : removed);
}

function pickButton(one) {
  const button = element("button", {type: "button", class: "pick", title: "Continue from here with this token"}, visible(one.text));
  button.addEventListener("click", () => state.pick(one));
  return button;
}

function chosenRow(isChosen, word, ...cells) {
  const row = rowOf(...cells);
  if (isChosen) row.className = "is-chosen";
  if (isChosen) row.firstElementChild.append(element("span", {class: "note"}, ` ${word}`));
  return row;
}

/** Returns a row with the total probability of the unlisted tokens; empty where this could be a rounding error of the listed ones. */
function restRow(count, listed) {
  const shares = ["before", "after"].map((key) => 1 - listed.reduce((sum, one) => sum + one[key], 0));
  const row = rowOf(`${whole(count)} others`, "", ...shares.map((share) => (share < 5e-4 ? "" : percent(share))));
  row.className = "muted";
  return row;
}

// The candidates of an adaptive token in the order of their draws. Among equal scores, the first was chosen.

function candidates(token) {
  if (!token.candidates.length) return "";
  const chosen = token.candidates.findIndex(({id}) => id === token.id);
  const rows = token.candidates.map(({text, logprob, score}, c) =>
    chosenRow(c === chosen, "chosen", visible(text), percent(probabilityOf(logprob)), known(score) ? number(score) : "none"),
  );
  return tableOf("candidates", "Candidates in the order of their draws: the highest score is chosen", ["Token", "Before", "Score"], rows);
}

// The strategy: every rule with the margins of its conditions.

function rules(token) {
  const applied = STRATEGIES.indexOf(token.strategy);
  const rows = DATA.rules.flatMap(([name, conditions], r) =>
    conditions.map((condition, c) => {
      const row = element("tr", {class: r === applied ? "applied" : r > applied ? "late" : ""}, ...conditionCells(token, condition));
      if (c === 0) row.prepend(element("th", {scope: "rowgroup", rowspan: conditions.length}, strategyLabel(name)));
      return row;
    }),
  );
  const last = rowOf(strategyLabel("adaptive"), "if no rule holds");
  last.className = applied === DATA.rules.length ? "applied" : "late";
  last.lastElementChild.setAttribute("colspan", 3);
  last.lastElementChild.className = "left";
  const head = ["Strategy", "Condition", "", "Margin"];
  const all = element("div", {}, tableOf("rules", "Rules in order: the first rule that holds applies", head, [...rows, last]));
  const expected = strategyOf(token, routerOf(token));
  const mismatch = `These rules choose ${expected}, but the trace has ${token.strategy}.`;
  if (expected !== token.strategy) all.append(element("p", {class: "note"}, mismatch));
  return all;
}

function conditionCells(token, [metric, relation, threshold]) {
  const bound = routerOf(token)[threshold];
  const {holds, margin} = compare(token[metric], relation, bound);
  const [kind, word, tick] = holds ? ["yes", "holds", "✓"] : ["no", "fails", "✗"];
  const comparison = ` ${metric === "entropy" ? "H" : "V"} ${number(token[metric])} ${relation} ${number(bound ?? Infinity)}`;
  return [
    element("td", {class: "left"}, element("span", {class: kind, role: "img", "aria-label": word}, tick), comparison),
    element("td", {"aria-hidden": "true"}, gauge(metric, relation, bound, token[metric])),
    element("td", {}, `${margin > 0 ? "+" : ""}${formatMetric(metric, margin)}`),
  ];
}

/** Returns the axis of the map as a line: the range where the condition holds is shaded, and a dot marks the value. */
function gauge(metric, relation, bound, value) {
  const {at} = axisOf(metric, 0, 100);
  const place = known(bound) ? at(bound) : 100;
  const [zone, dot] = [element("i", {class: "zone"}), element("i", {class: "dot"})];
  Object.assign(zone.style, relation === "<" ? {left: 0, width: `${place}%`} : {left: `${place}%`, right: 0});
  dot.style.left = `${at(value)}%`;
  return element("span", {class: "track"}, zone, dot);
}

// Numbers.

function parameters(token) {
  const router = routerOf(token);
  const k = (value) => (value >= NO_TOP_K ? "off" : whole(value));
  return tableOf("numbers", "Sampling parameters", ["", "Used", "Base"], [
    rowOf("Temperature", token.temperature === 0 ? "0: argmax" : number(token.temperature), number(router.base_temperature)),
    rowOf("top_p", number(token.top_p), number(router.base_top_p)),
    rowOf("top_k", k(token.top_k), k(router.base_top_k)),
    rowOf("min_p", token.min_p === 0 ? "off" : number(token.min_p), number(router.base_min_p)),
    rowOf("Candidates", token.strategy === "adaptive" ? `best of ${whole(router.candidates)}` : "1", whole(router.candidates)),
  ]);
}

function metrics(token) {
  const most = {entropy: token.entropy / Math.log2(state.sample.vocab_size), attn_entropy: token.attn_entropy_norm};
  const names = Object.keys(METRICS).filter((name) => name !== "temperature" && known(token[name]));
  const share = (name) => (known(most[name]) ? percent(most[name]) : "");
  const rows = names.map((name) => rowOf(METRICS[name][0], formatMetric(name, token[name]), share(name)));
  return tableOf("numbers", "Metrics", ["", "Value", "Of max"], rows);
}

// The attention of every head: one map per statistic, with a row for each layer and a column for each head.

const HEADS = {
  entropy: ["Entropy", "bits"],
  varentropy: ["Varentropy", "bits²"],
  agreement: ["Agreement", ""],
  strength: ["Strength", ""],
};

function heads(token) {
  const title = element("h3", {}, "Attention: layers from top to bottom, heads from left to right");
  return element("div", {class: "heads"}, title, ...Object.keys(HEADS).map((name) => headMap(name, token.heads[name])));
}

function headMap(name, rows) {
  const [title, unit] = HEADS[name];
  const values = rows.flat();
  const most = largest(values);
  const facts = `mean ${number(mean(values))}, largest ${number(most)}${unit && " "}${unit}`;
  const cells = element("div", {class: "cells", role: "img", "aria-label": `${title} of ${rows.length} layers of ${rows[0].length} heads: ${facts}`});
  cells.style.gridTemplateColumns = `repeat(${rows[0].length}, 1fr)`;
  rows.forEach((row, layer) => row.forEach((value, head) => cells.append(headCell(value, most, `layer ${layer}, head ${head}: ${number(value)}`))));
  return element("figure", {}, cells, element("figcaption", {}, element("b", {}, title), ` ${facts}`));
}

function headCell(value, most, meaning) {
  const cell = element("i", {title: meaning});
  cell.style.opacity = most > 0 ? Math.max(0, value / most) : 0;
  return cell;
}

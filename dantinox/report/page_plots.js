// The plots. Canvases hold the data and are drawn once per size and theme; markers that follow the pointer are elements on top.

const STRIPS = ["entropy", "varentropy", "surprisal", "attn_entropy", "temperature"];
const TICKS = [0, 0.1, 0.5, 1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000];
const EDGE = {left: 44, right: 14, top: 12, bottom: 36};
const FONT = "10px system-ui, sans-serif";

const colors = new Map();

/** Returns a color variable of the style sheet in the current theme, in a form that a canvas accepts. */
function colorOf(name) {
  if (!colors.has(name)) {
    const {style} = byId("theme");
    style.setProperty("outline-color", `var(--${name})`);
    colors.set(name, getComputedStyle(byId("theme")).outlineColor);
    style.removeProperty("outline-color");
  }
  return colors.get(name);
}

function prepareCanvas(canvas) {
  const scale = window.devicePixelRatio || 1;
  const {clientWidth: width, clientHeight: height} = canvas;
  Object.assign(canvas, {width: Math.round(width * scale), height: Math.round(height * scale)});
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return {context, width, height};
}

function drawPlots() {
  if (!state.nodes.length) return;
  colors.clear();
  for (const canvas of byId("strips").querySelectorAll("canvas")) drawStrip(canvas, canvas.dataset.of);
  drawMap();
  drawMarks();
}

// Strips over position.

const stripEnd = (name) => roundUp(largest(valuesOf(state.sample.tokens, name)) || 1);

function buildStrips() {
  const {tokens} = state.sample;
  const names = STRIPS.filter((name) => valuesOf(tokens, name).length);
  const canvas = (name) => element("canvas", {"data-of": name, "aria-hidden": "true"});
  const rows = names.flatMap((name) => {
    const label = element("div", {class: "name"}, METRICS[name][0], element("span", {class: "value", "data-of": name}));
    const ends = element("span", {class: "ends"}, element("span", {}, number(stripEnd(name))), element("span", {}, "0"));
    return [label, ends, canvas(name)];
  });
  if (isRouted()) rows.push(element("div", {class: "name"}, "Strategy"), canvas("strategy"));
  const axis = ["1", "Position (tokens)", whole(tokens.length)].map((text) => element("span", {}, text));
  const lines = [element("i", {id: "strip-hover", class: "faint"}), element("i", {id: "strip-at"})];
  byId("strips").replaceChildren(...rows, element("div", {class: "axis"}, ...axis), element("div", {class: "cursor"}, ...lines));
  byId("strips").setAttribute("aria-valuemax", tokens.length);
  byId("strips").closest(".panel").hidden = tokens.length === 0;
}

/** Returns the tokens of each bar. If there are more tokens than bars of 3 pixels, a bar has several tokens. */
function barsOf(tokens, width) {
  const count = Math.min(tokens.length, Math.max(1, Math.floor(width / 3)));
  const edge = (bar) => Math.floor((bar * tokens.length) / count);
  return Array.from({length: count}, (_, bar) => tokens.slice(edge(bar), edge(bar + 1)));
}

/** Draws for each bar the mean of its tokens and, in a lighter color, their maximum; for strategies, their shares. */
function drawStrip(canvas, name) {
  const {context, width, height} = prepareCanvas(canvas);
  const bars = barsOf(state.sample.tokens, width);
  const wide = width / bars.length;
  const draw = (bar, color, share) => {
    context.fillStyle = colorOf(color);
    context.fillRect(bar * wide, height * (1 - share), wide >= 5 ? wide - 1 : wide + 0.25, height * share);
  };
  const drawShares = (names, bar) => names.sort().forEach((of, n) => draw(bar, of, 1 - n / names.length));
  if (name === "strategy") return bars.map((tokens) => valuesOf(tokens, name)).forEach(drawShares);
  const end = stripEnd(name);
  bars.forEach((tokens, bar) => {
    const values = valuesOf(tokens, name).map((value) => Math.min(value, end));
    draw(bar, "data-light", largest(values) / end);
    draw(bar, "data", mean(values) / end);
  });
}

// The map of entropy and varentropy. With square-root axes the small thresholds stay visible next to the large values.

/** Returns whether `value relation bound` holds, and the margin. A bound of null is infinite. */
function compare(value, relation, bound) {
  const margin = relation === "<" ? (bound ?? Infinity) - value : value - (bound ?? Infinity);
  return {holds: margin > 0, margin};
}

/** Returns the router settings that chose a token's strategy; each part of a text has its own. */
const routerOf = (token) => token.router ?? state.sample.router;

function strategyOf(metrics, router) {
  const holds = ([metric, relation, threshold]) => compare(metrics[metric], relation, router[threshold]).holds;
  return (DATA.rules.find(([, conditions]) => conditions.every(holds)) ?? ["adaptive"])[0];
}

function axisOf(metric, from, to) {
  const {router, tokens} = state.sample;
  const conditions = DATA.rules.flatMap(([, both]) => both).filter(([of]) => of === metric);
  const bounds = [...new Set(conditions.map(([, , threshold]) => router?.[threshold]))].filter(known).sort((a, b) => a - b);
  const end = Math.max(1, 1.04 * largest(valuesOf(tokens, metric)), 1.3 * largest(bounds));
  const at = (x) => from + (to - from) * Math.sqrt(Math.min(1, Math.max(0, x ?? 0) / end));
  return {bounds, end, at, edges: [0, ...bounds.filter((bound) => bound > 0), end]};
}

function mapAxes() {
  const {clientWidth: width, clientHeight: height} = byId("map");
  return {x: axisOf("entropy", EDGE.left, width - EDGE.right), y: axisOf("varentropy", height - EDGE.bottom, EDGE.top)};
}

function drawMap() {
  const {context, width, height} = prepareCanvas(byId("map"));
  const axes = mapAxes();
  const regions = isRouted() ? regionsOf(axes) : [];
  for (const {name, left, top, wide, tall} of regions) {
    context.fillStyle = colorOf(`${name}-tint`);
    context.fillRect(left, top, wide, tall);
  }
  drawAxes(context, axes, width, height);
  drawPoints(context, axes);
  STRATEGIES.forEach((name) => nameRegion(context, name, regions.filter((region) => region.name === name)));
}

function regionsOf({x, y}) {
  return x.edges.slice(1).flatMap((right, i) =>
    y.edges.slice(1).map((top, j) => {
      const [left, bottom] = [x.edges[i], y.edges[j]];
      const name = strategyOf({entropy: (left + right) / 2, varentropy: (bottom + top) / 2}, state.sample.router);
      return {name, left: x.at(left), top: y.at(top), wide: x.at(right) - x.at(left), tall: y.at(bottom) - y.at(top)};
    }),
  );
}

function nameRegion(context, name, regions) {
  if (!regions.length) return;
  const {left, top, wide, tall} = regions.reduce((best, one) => (one.wide * one.tall > best.wide * best.tall ? one : best));
  Object.assign(context, {font: `600 ${FONT}`, textAlign: "left", lineWidth: 3, lineJoin: "round", strokeStyle: colorOf("panel")});
  const long = `${GLYPH[name]} ${name}`;
  const label = context.measureText(long).width + 8 < wide ? long : GLYPH[name];
  const y = top + Math.min(15, tall / 2 + 4);
  context.strokeText(label, left + 5, y);
  context.fillStyle = colorOf(`${name}-ink`);
  context.fillText(label, left + 5, y);
}

/** Returns ticks at least `spacing` pixels apart; thresholds have priority over round numbers. */
function ticksOf({bounds, end, at}, spacing) {
  const ticks = [];
  for (const value of [...bounds, ...TICKS]) {
    if (value <= end && ticks.every((other) => Math.abs(at(other) - at(value)) >= spacing)) ticks.push(value);
  }
  return ticks;
}

function drawAxes(context, {x, y}, width, height) {
  const {left, top} = EDGE;
  const [right, bottom] = [width - EDGE.right, height - EDGE.bottom];
  const [line, muted, ink] = ["line", "muted", "ink"].map(colorOf);
  const rule = (color, ...box) => Object.assign(context, {fillStyle: color}).fillRect(...box);
  const write = (text, px, py, isBold) =>
    Object.assign(context, {fillStyle: isBold ? ink : muted, font: isBold ? `600 ${FONT}` : FONT}).fillText(text, px, py);
  x.bounds.forEach((bound) => rule(muted, x.at(bound), top, 0.75, bottom - top));
  y.bounds.forEach((bound) => rule(muted, left, y.at(bound), right - left, 0.75));
  rule(line, left, bottom, right - left, 1);
  rule(line, left, top, 1, bottom - top);
  context.textAlign = "right";
  ticksOf(y, 13).forEach((value) => write(number(value), left - 5, y.at(value) + 3, y.bounds.includes(value)));
  context.textAlign = "center";
  ticksOf(x, 24).forEach((value) => write(number(value), x.at(value), bottom + 13, x.bounds.includes(value)));
  write("Entropy H (bits, square-root scale)", (left + right) / 2, height - 6);
  context.save();
  context.translate(10, (top + bottom) / 2);
  context.rotate(-Math.PI / 2);
  write("Varentropy V (bits²)", 0, 0);
  context.restore();
}

function drawPoints(context, {x, y}) {
  context.save();
  Object.assign(context, {font: FONT, textAlign: "center", textBaseline: "middle", globalAlpha: 0.65});
  for (const strategy of [undefined, ...STRATEGIES]) {
    context.fillStyle = colorOf(strategy ?? "data");
    const points = state.sample.tokens.filter((token) => token.strategy === strategy);
    points.forEach((token) => context.fillText(GLYPH[strategy] ?? "•", x.at(token.entropy), y.at(token.varentropy)));
  }
  context.restore();
}

function nearestPoint({offsetX, offsetY}) {
  const {x, y} = mapAxes();
  const distanceTo = (token) => Math.hypot(x.at(token.entropy) - offsetX, y.at(token.varentropy) - offsetY);
  const distances = state.sample.tokens.map(distanceTo);
  const best = distances.reduce((least, distance, i) => (distance < distances[least] ? i : least), 0);
  return distances[best] < 24 ? best : null;
}

// Markers of the selected token and of the token under the pointer.

function drawMarks() {
  const {tokens} = state.sample;
  if (!tokens.length) return;
  const i = state.pointed ?? state.at;
  byId("strips").querySelectorAll(".value").forEach((node) => {
    node.textContent = formatMetric(node.dataset.of, tokens[i][node.dataset.of]);
  });
  byId("reading").replaceChildren(`Token ${whole(i + 1)} `, element("b", {}, visible(tokens[i].text)));
  byId("strips").setAttribute("aria-valuenow", state.at + 1);
  byId("strips").setAttribute("aria-valuetext", `Token ${state.at + 1}, ${state.nodes[state.at].getAttribute("aria-label")}`);
  const {x, y} = mapAxes();
  for (const [name, token] of [["at", state.at], ["hover", state.pointed]]) {
    const [line, ring] = [byId(`strip-${name}`), byId(`map-${name}`)];
    line.hidden = ring.hidden = token === null;
    if (token === null) continue;
    line.style.left = `${(100 * (token + 0.5)) / tokens.length}%`;
    ring.style.transform = `translate(${x.at(tokens[token].entropy)}px, ${y.at(tokens[token].varentropy)}px)`;
  }
}

function positionAt(event) {
  const {tokens} = state.sample;
  const box = byId("strips").querySelector(".cursor").getBoundingClientRect();
  const i = Math.floor((tokens.length * (event.clientX - box.left)) / box.width);
  return i < 0 ? null : Math.min(i, tokens.length - 1);
}

function listenToPlots() {
  const listenTo = (plot, tokenAt) => {
    plot.addEventListener("pointermove", (event) => point(tokenAt(event)));
    plot.addEventListener("pointerleave", () => point(null));
    plot.addEventListener("click", (event) => tokenAt(event) !== null && select(tokenAt(event)));
  };
  listenTo(byId("strips"), positionAt);
  listenTo(byId("map"), nearestPoint);
  byId("strips").addEventListener("keydown", (event) => onKey(event, false));
  new ResizeObserver(drawPlots).observe(byId("map").parentElement);
}

// The counts of the strategies, and of the transitions between them.

function drawStrategies() {
  const {tokens} = state.sample;
  byId("strategies").hidden = !isRouted();
  if (!isRouted()) return;
  const count = (name) => tokens.filter((token) => token.strategy === name).length;
  const parts = STRATEGIES.filter(count).map((name) => {
    const part = element("span", {class: name}, count(name) > 0.03 * tokens.length ? GLYPH[name] : "");
    part.style.flexGrow = count(name);
    return part;
  });
  const head = ["Strategy", "Tokens", "Share", ...STRATEGIES.map((name) => `→ ${GLYPH[name]}`)];
  const rows = STRATEGIES.map((name) => strategyRow(name, count(name)));
  const caption = "Columns with → count the strategy of the next token, shaded by their share of the row. Select a strategy to go to its next token.";
  byId("shares").replaceChildren(...parts);
  byId("transitions").replaceChildren(tableOf("strategy-table", caption, head, rows));
}

function strategyRow(name, count) {
  const {tokens} = state.sample;
  const jump = element("button", {type: "button", class: "plain"}, strategyLabel(name));
  jump.disabled = count === 0;
  jump.addEventListener("click", () => {
    const after = tokens.findIndex((token, i) => i > state.at && token.strategy === name);
    select(after < 0 ? tokens.findIndex((token) => token.strategy === name) : after);
  });
  const row = rowOf(jump, whole(count), percent(tokens.length ? count / tokens.length : 0));
  for (const other of STRATEGIES) {
    const times = tokens.filter((token, i) => token.strategy === other && tokens[i - 1]?.strategy === name).length;
    const cell = element("td", {class: "shaded", "aria-label": `${times} followed by ${other}`}, whole(times));
    cell.style.setProperty("--share", `${Math.round((100 * times) / Math.max(1, count))}%`);
    row.append(cell);
  }
  return row;
}

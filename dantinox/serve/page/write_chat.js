"use strict";
// Tools, the format of the answer, and how a turn of a chat is drawn: its reasoning, its answer, and its tool calls.

// Each format of an answer: its label, an example, the check that throws an Error, and the fields of the request.
const parseObject = (text) => {
  const value = parseJSON(text);
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw new Error("it must be a JSON object");
  return value;
};
const FORMATS = {
  text: {label: "any text"},
  json: {label: "any JSON object", fields: () => ({response_format: {type: "json_object"}})},
  schema: {
    label: "JSON schema",
    example: '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}',
    fields: (text) => ({response_format: {type: "json_schema", json_schema: {schema: parseObject(text)}}}),
  },
  regex: {label: "regular expression", example: "(yes|no)", fields: (text) => ({guided_regex: text})},
  gbnf: {label: "grammar (GBNF)", example: 'root ::= "yes" | "no"', fields: (text) => ({grammar: text})},
  lark: {label: "grammar (Lark)", example: 'start: "yes" | "no"', fields: (text) => ({guided_grammar: text})},
};
const TOOL_EXAMPLE = '[{"name": "weather", "description": "Returns the weather of a city.", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]';
const CHOICES = {auto: "the model decides", required: "at least one call", none: "no calls"};
const EFFORTS = ["none", "minimal", "low", "medium", "high"];
const FIELD_OF = {tools: "tools", tool_choice: "tool-choice", reasoning_effort: "effort", response_format: "format", guided_regex: "format", grammar: "format", guided_grammar: "format", lora: "model-choice", model: "model-choice"};

function parseJSON(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`it is not JSON (${error.message})`);
  }
}

// Fields.

function labeled(id, label, field, attributes = {}) {
  field.id = id;
  return element("div", {class: "setting wide", ...attributes}, element("label", {for: id}, label), field);
}

const optionsOf = (choices) => Object.entries(choices).map(([value, label]) => element("option", {value}, label));

/** Returns the groups of fields for the system message, tools, and the format of the answer. */
function chatFields() {
  const area = (rows, placeholder) => element("textarea", {class: "field code", rows, placeholder, spellcheck: "false", autocomplete: "off"});
  const system = element("textarea", {class: "field", rows: 2});
  const tools = area(5, TOOL_EXAMPLE);
  const choice = element("select", {}, ...optionsOf(CHOICES));
  const efforts = Object.fromEntries(EFFORTS.map((name) => [name, name]));
  const effort = element("select", {}, element("option", {value: ""}, "default of the model"), ...optionsOf(efforts));
  const formats = element("select", {}, ...optionsOf(Object.fromEntries(Object.entries(FORMATS).map(([name, {label}]) => [name, label]))));
  const count = () => element("span", {class: "count"});
  const help = element("p", {class: "help"}, "A list of tools in OpenAI's format. When the model calls one, a box for its result appears below the call.");
  return [
    labeled("system", "System message", system, {id: "system-row"}),
    element("details", {id: "tools-group"}, element("summary", {}, "Tools ", count()), help, labeled("tools", "Definitions (JSON)", tools), labeled("tool-choice", "Calls", choice)),
    labeled("effort", "Reasoning effort", effort, {id: "effort-row"}),
    element("details", {id: "format-group"}, element("summary", {}, "Format of the answer ", count()), labeled("format-kind", "Format", formats), labeled("format", "Definition", area(4, ""))),
  ];
}

/** Updates the fields of this file after a change. */
function drawChatFields() {
  const {example} = FORMATS[byId("format-kind").value || "text"];
  byId("format").placeholder = example ?? "";
  byId("format").parentElement.hidden = !example;
  for (const id of ["system-row", "tools-group"]) byId(id).hidden = !isChat();
  byId("effort-row").hidden = !isChat() || !writing.about.markers?.reasoning;
  const tools = byId("tools").value.trim() !== "";
  byId("tools-group").querySelector(".count").textContent = tools ? "(set)" : "";
  byId("format-group").querySelector(".count").textContent = byId("format-kind").value === "text" ? "" : "(set)";
}

/** Returns the fields of the body for the format of the answer.
 *
 * Throws an Error with the `param` "format" if its definition is wrong. */
function formatFields() {
  const {fields, example, label} = FORMATS[byId("format-kind").value || "text"];
  const text = byId("format").value.trim();
  if (!fields) return {};
  try {
    if (example && !text) throw new Error("it is empty");
    return fields(text);
  } catch (error) {
    throw Object.assign(new Error(`Format of the answer, ${label}: ${error.message}.`), {param: "response_format"});
  }
}

/** Returns the fields of the body for the tools. A function without the wrapper `{"type": "function"}` gets it.
 *
 * Throws an Error with the `param` "tools" if the definitions are wrong. */
function toolFields() {
  const effort = byId("effort").value;
  const common = effort && writing.about.markers?.reasoning ? {reasoning_effort: effort} : {};
  const text = byId("tools").value.trim();
  if (!text) return common;
  try {
    const found = [parseJSON(text)].flat();
    const tools = found.map((tool) => {
      const wrapped = tool?.function ? tool : {type: "function", function: tool};
      if (typeof wrapped.function?.name !== "string") throw new Error("each tool must be an object with a name");
      return wrapped;
    });
    return {...common, tools, tool_choice: byId("tool-choice").value || "auto"};
  } catch (error) {
    throw Object.assign(new Error(`Tools: ${error.message}.`), {param: "tools"});
  }
}

// Turns.

const opened = new WeakMap(); // part → the kinds of its sections that the user has opened

/** Returns the kind of each token of a reply, "answer", "reasoning" or "call", by the markers around reasoning and tool calls. */
function kindsOf(part) {
  const {reasoning, calls} = writing.about?.markers ?? {};
  const reasons = reasoning ? [{...reasoning, kind: "reasoning"}] : [];
  const marked = [...reasons, ...(part.hasTools && calls ? calls.begin.map((begin) => ({begin, end: calls.end, kind: "call"})) : [])];
  const text = textOf(part);
  let open = part.isOpen ? reasons[0] : undefined;
  const edges = [[0, open?.kind ?? "answer"]]; // [first character, kind]
  for (let at = 0; at >= 0; ) {
    if (open) {
      const place = open.end ? text.indexOf(open.end, at) : -1;
      at = place < 0 ? -1 : place + open.end.length;
      if (at >= 0) edges.push([at, "answer"]);
      open = undefined;
    } else {
      const places = marked.map((one) => [text.indexOf(one.begin, at), one]).filter(([place]) => place >= 0);
      const [place, first] = places.sort((a, b) => a[0] - b[0])[0] ?? [-1];
      if (first) edges.push([place, first.kind]);
      at = first ? place + first.begin.length : -1;
      open = first;
    }
  }
  let [edge, start, last] = [0, 0, "answer"];
  return part.tokens.map((token) => {
    while (edges[edge + 1]?.[0] <= start) edge += 1;
    start += token.text.length;
    const isSpace = edges[edge][1] === "answer" && !token.text.trim(); // after a marker it belongs to the notation
    last = isSpace ? last : edges[edge][1];
    return last;
  });
}

/** Returns the sections of a reply as [kind, nodes]: consecutive tokens of one kind. */
function sectionsOf(part, nodes) {
  const sections = [];
  kindsOf(part).forEach((kind, i) => {
    if (sections.at(-1)?.[0] !== kind) sections.push([kind, []]);
    sections.at(-1)[1].push(nodes[i]);
  });
  return sections;
}

const SECTIONS = {reasoning: "Reasoning", call: "Tool call as the model wrote it"};

function sectionNode(part, [kind, nodes]) {
  const list = tokenList(nodes);
  if (kind === "answer") return list;
  const details = element("details", {class: "section"}, element("summary", {}, `${SECTIONS[kind]}, ${whole(nodes.length)} tokens`), list);
  const kinds = opened.get(part) ?? new Set();
  details.open = kinds.has(kind);
  details.addEventListener("toggle", () => {
    kinds[details.open ? "add" : "delete"](kind);
    opened.set(part, kinds);
  });
  return details;
}

function turnNode(part, number, nodes) {
  const author = authorOf(part);
  const button = element("button", {type: "button", class: "plain", "aria-label": `Edit turn ${number + 1}, ${author}`}, "Edit");
  button.addEventListener("click", () => edit(number));
  const body = nodes.length ? sectionsOf(part, nodes).map((section) => sectionNode(part, section)) : [element("span", {class: "user"}, part.text)];
  const calls = part.message?.tool_calls ?? [];
  const isLast = number === current().parts.length - 1;
  return element("div", {class: `turn ${part.who}`}, element("div", {class: "author"}, author, button), ...body, ...calls.map(callNode), isLast && calls.length ? resultForm(calls) : "");
}

/** Returns a tool call with one row for each argument. */
function callNode({function: {name, arguments: text}}) {
  let values = null;
  try {
    values = JSON.parse(text);
  } catch {
    // An incomplete call is shown as it is.
  }
  const isObject = typeof values === "object" && values !== null && !Array.isArray(values);
  const rows = isObject ? Object.entries(values).map(([key, value]) => pair(key, typeof value === "string" ? value : JSON.stringify(value, null, 1))) : [pair("arguments", text)];
  return element("div", {class: "call"}, element("b", {}, `Calls ${name}`), element("dl", {}, ...rows));
}

/** Returns the form for the results of tool calls. What is typed is kept when the turn is drawn again. */
const typed = {};
function resultForm(calls) {
  const fields = calls.map(({id, function: {name}}, i) => {
    const field = element("textarea", {class: "field code", rows: 2, spellcheck: "false"});
    field.value = typed[id] ?? "";
    field.addEventListener("input", () => (typed[id] = field.value));
    const row = labeled(`result-${i}`, `Result of ${name}`, field);
    row.className = "result";
    return row;
  });
  const form = element("form", {class: "results"}, ...fields, element("button", {type: "submit", class: "main"}, calls.length > 1 ? "Send results" : "Send result"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const results = calls.map(({id, function: {name}}) => ({who: "tool", call: id, name, text: typed[id] ?? ""}));
    generate([...current().parts, ...results]);
  });
  return form;
}

"use strict";
// The texts of the page, and the requests that it sends to the server. A text is a list of parts, each written by the user (`person`), by
// the model, or by a tool. After the next part begins, an edit replaces a part instead of changing it, so that undo can restore it. A part of
// the model has the token records that the server sent and, in a chat, the message that the server read from them.

const STOPPED = "stopped";
const LOAD_INTERVAL = 1000; // milliseconds between requests to a server that is loading its model
const writing = {
  mode: "story",
  texts: {story: {parts: [], past: [], future: []}, chat: {parts: [], past: [], future: []}},
  about: null, // the response of /api/dantinox/about
  models: [], // the models of /v1/models: {id, base}, where adapters have the base of their model
  abort: null, // the AbortController of the running request
  use: null, // number of tokens in the context, and of prompt tokens that were truncated
  edited: null, // what is being edited: the index of a chat turn, or "all" for a story
};
const current = () => writing.texts[writing.mode];
const isChat = () => writing.mode === "chat";
const isModel = (part) => part.who === "model";
const textOf = (part) => (part.tokens?.length ? part.tokens.map(({text}) => text).join("") : part.text);
const hasChat = () => writing.about?.chat !== false;
const authorOf = (part) => ({person: "You", model: "Model", tool: `Result of ${part.name ?? "a tool"}`})[part.who];

// HTTP.

function headers() {
  const key = sessionStorage.getItem("dantinox.key");
  return {"Content-Type": "application/json", ...(key && {Authorization: `Bearer ${key}`})};
}

/** Returns the response to a request. If it failed, throws an Error with the server's message and the name of a wrong setting as `param`. */
async function request(path, options = {}) {
  const response = await fetch(path, {...options, headers: headers()}).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached.");
  });
  byId("key-form").hidden = response.status !== 401;
  if (response.ok) return response;
  const {error} = await response.json().catch(() => ({error: null}));
  throw Object.assign(new Error(error?.message ?? `The server responded with status ${response.status}.`), {param: error?.param, status: response.status});
}

/** Sends a request; while the model is still loading, waits and repeats it. */
async function requestWhenReady(path, options) {
  for (;;) {
    try {
      return await request(path, options);
    } catch (error) {
      const health = error.status === 503 ? await fetch("/health").then((response) => response.json()).catch(() => null) : null;
      if (health?.status !== "loading") throw error;
      showStatus("The model is loading …");
      await pause(LOAD_INTERVAL, options.signal);
    }
  }
}

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => reject(signal.reason));
  });
}

/** Yields server-sent events as [name, data]. */
async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (let {value, done} = await reader.read(); !done; {value, done} = await reader.read()) {
    const blocks = (buffer + value).split("\n\n");
    buffer = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]);
      const {event, data} = Object.fromEntries(lines);
      yield [event, JSON.parse(data)];
    }
  }
}

// Models.

/** Loads the names of the models and adapters; a server without them, or a key that may not list them, leaves only its own model. */
async function loadModels() {
  try {
    const {data} = await (await request("/v1/models")).json();
    writing.models = data.map(({id, root, parent}) => ({id, base: parent ?? root ?? id}));
  } catch {
    writing.models = [];
  }
}

const chosenModel = () => byId("model-choice").value || writing.about.model;
const baseOf = (model) => writing.models.find(({id}) => id === model)?.base ?? model ?? writing.about.model;

// The body of a request.

/** Returns the prompt entries of a part: token ids where they are known, so that the model reads the tokens it generated; no EOS token.
 * For another model than the one that generated them, returns the text. */
function promptOf(part, model) {
  const isOther = baseOf(part.model) !== baseOf(model);
  if (!isModel(part) || !part.tokens.length) return (!isOther && part.ids) || [part.text];
  return part.tokens.filter((token) => !token.ends).map((token) => (isOther || token.cut ? token.text : token.id));
}

/** Returns a part as a message in OpenAI's format. */
function messageOf(part) {
  if (part.who === "tool") return {role: "tool", tool_call_id: part.call, content: part.text};
  if (!isModel(part)) return {role: "user", content: part.text};
  return part.message ?? {role: "assistant", content: textOf(part)};
}

/** Returns the body that generates `part` after the parts `before`, with these settings and this model. */
function requestBody(before, part, settings = chosenSettings(), model = chosenModel()) {
  const beginning = promptOf(part, model).filter((one) => one !== "");
  const common = {settings, alternatives: numAlternatives(), ...(model !== writing.about.model && {model}), ...formatFields()};
  if (!isChat()) {
    const prompt = before.flatMap((one) => promptOf(one, model)).filter((one) => one !== "");
    return {...common, prompt: [...prompt, ...beginning], answer_at: prompt.length, fit: true};
  }
  const system = byId("system").value.trim();
  const messages = [...(system ? [{role: "system", content: system}] : []), ...before.map(messageOf)];
  return {...common, ...toolFields(), messages, prompt: beginning.length ? beginning : null};
}

// The response.

function newPart(kept = [], model = chosenModel()) {
  return {who: "model", text: "", tokens: kept, kept: kept.length, model, seed: null, settings: {}, router: null, stats: {}, reason: STOPPED};
}

/** Sends a request and adds the response to `part`; calls `onBegin` and `onTokens` with the data of these events. */
async function receive(part, body, signal, onBegin, onTokens) {
  const clock = {start: null, count: 0};
  part.hasTools = Boolean(body.tools);
  const options = {method: "POST", body: JSON.stringify(body), signal};
  try {
    for await (const [event, data] of readEvents(await requestWhenReady("/api/dantinox/generate", options))) {
      if (event === "begin") {
        const {seed, settings, router, vocab_size: vocab, prompt_tokens: promptTokens, reasoning_is_open: isOpen} = data;
        Object.assign(part, {seed, settings, router, vocab, promptTokens, isOpen});
        onBegin(data);
      }
      if (event === "token") {
        addTokens(part, data, clock);
        onTokens(data);
      }
      if (event === "end") Object.assign(part, {stats: data.stats, ...(data.messages && {message: data.messages[0]})});
      if (event === "error") throw Object.assign(new Error(data.message), {param: data.param});
    }
  } finally {
    trimEnd(part);
  }
}

function addTokens(part, {tokens, text, finish_reason: reason}, clock) {
  clock.start ??= performance.now();
  clock.count += tokens.length;
  part.text += text;
  part.tokens = [...part.tokens, ...tokens];
  if (reason) part.reason = reason;
  const seconds = (performance.now() - clock.start) / 1000;
  if (seconds > 0.2) part.stats = {...part.stats, decode_tok_per_s: (clock.count - 1) / seconds};
}

/** Truncates the tokens to the server's text, which excludes a stop string. Marks an EOS token, so that no later prompt contains it. */
function trimEnd(part) {
  const added = part.tokens.slice(part.kept);
  const last = added.at(-1);
  if (last && part.reason === "eos" && last.text === "") last.ends = true;
  if (part.reason === "stop" && added.length) {
    let left = part.text.length;
    const trimmed = added.flatMap((token) => {
      const text = token.text.slice(0, left);
      if (token.text && !text) return [];
      left -= text.length;
      return [text === token.text ? token : {...token, text, cut: true}];
    });
    part.tokens = [...part.tokens.slice(0, part.kept), ...trimmed];
  }
  part.text = textOf(part);
}

function countTokens(part) {
  const count = part.tokens.length - part.kept;
  return `${whole(count)} ${count === 1 ? "token" : "tokens"}`;
}

function summaryOf(part) {
  const ends = {eos: "The model ended the text.", stop: "Ended by a stop string.", length: "Ended by the length limit.", loop: "Ended because the text repeats itself."};
  return `${countTokens(part)}. ${ends[part.reason] ?? ""}`;
}

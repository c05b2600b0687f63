"use strict";
// The texts of the page, and the requests that it sends to the server. A text is a list of parts, each written by the user (`person`) or by the model. After the next part begins, an edit
// replaces a part instead of changing it, so that undo can restore it. A part of the model has the token records that the server sent.

const STOPPED = "stopped";
const HINT = "Each generated token is shaded by the uncertainty of the model. Select a token to see its alternatives, and select an alternative to continue from it.";
const WORDS = {
  story: {draft: "Your text", go: "Continue", nothing: `Write the beginning of a text below, and the model continues it.\n${HINT}`},
  chat: {draft: "Your message", go: "Send", nothing: `Send a message below.\n${HINT}`},
};
const NO_CHAT = "Chat is off: this model has no chat template. Start the server with --chat_template to add one.";
const writing = {
  mode: "story",
  texts: {story: {parts: [], past: [], future: []}, chat: {parts: [], past: [], future: []}},
  about: null, // the response of /api/dantinox/about
  abort: null, // the AbortController of the running request
  use: null, // number of tokens in the context, and of prompt tokens that were truncated
  edited: null, // what is being edited: the index of a chat turn, or "all" for a story
};
const current = () => writing.texts[writing.mode];
const isChat = () => writing.mode === "chat";
const isModel = (part) => part.who === "model";
const textOf = (part) => (part.tokens?.length ? part.tokens.map(({text}) => text).join("") : part.text);
const hasChat = () => writing.about?.chat !== false;

// Requests.

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
  throw Object.assign(new Error(error?.message ?? `The server responded with status ${response.status}.`), {param: error?.param});
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

/** Returns the prompt entries of a part: token ids where they are known, so that the model reads the tokens it generated; no EOS token. */
function promptOf(part) {
  if (!isModel(part) || !part.tokens.length) return part.ids ?? [part.text];
  return part.tokens.filter((token) => !token.ends).map((token) => (token.cut ? token.text : token.id));
}

function requestBody(before, part) {
  const common = {settings: chosenSettings(), alternatives: numAlternatives()};
  if (!isChat()) return {...common, prompt: [...before, part].flatMap(promptOf).filter((one) => one !== ""), fit: true};
  const system = byId("system").value.trim();
  const roles = {person: "user", model: "assistant"};
  const messages = before.map((one) => ({role: roles[one.who], content: textOf(one)}));
  const all = system ? [{role: "system", content: system}, ...messages] : messages;
  return {...common, messages: all, prompt: part.tokens.length ? promptOf(part) : null};
}

"use strict";
// JSON Lines, as `--trace` writes them, and reports, as `--report` writes them; copying.

const LISTS = {alternatives: ["id", "text", "logprob", "logprob_sampled"], candidates: ["id", "text", "logprob", "score"]};
const PAGE_FIELDS = ["ends", "cut", "picked"]; // fields of a token that only this page uses
const UNSAFE = /[\u007f-\u009f\u2028\u2029]/g;

/** Returns a trace document for each part of the model; the text before the part is its prompt. */
function documentsOf(parts) {
  let before = "";
  return parts.flatMap((part) => {
    const prompt = before;
    before += textOf(part);
    if (!isModel(part) || !part.tokens.length) return [];
    const tokens = part.tokens.map((token) => Object.fromEntries(Object.entries(token).filter(([name]) => !PAGE_FIELDS.includes(name))));
    const {seed, reason, settings, router, stats} = part;
    const sizes = {prompt_tokens: part.promptTokens ?? 0, new_tokens: tokens.length, ...stats};
    return [{prompt, text: textOf(part), seed, finish_reason: reason, strategy: router ? "entropy" : "chain", settings, router, stats: sizes, vocab_size: part.vocab ?? 0, tokens}];
  });
}

function linesOf(documents) {
  const line = (record) => JSON.stringify(record).replace(UNSAFE, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);
  const lines = documents.flatMap((document, sample) => [
    line({kind: "sample", sample, ...document, tokens: document.tokens.length}),
    ...document.tokens.map((token, step) => {
      const lists = Object.entries(LISTS).filter(([kind]) => token[kind]).map(([kind, names]) => [kind, token[kind].map((one) => names.map((name) => one[name]))]);
      const place = {kind: "token", sample, step, position: document.stats.prompt_tokens + step};
      return line({...place, ...token, ...Object.fromEntries(lists)});
    }),
  ]);
  return `${lines.join("\n")}\n`;
}

/** Returns the documents in the format of the report: columns, and one table of distinct tokens that the columns refer to. */
function reportData(documents) {
  const words = [];
  const places = new Map();
  const wordOf = ({id, text}) => {
    const key = JSON.stringify([id, text]);
    if (!places.has(key)) {
      places.set(key, words.length);
      words.push([id, text]);
    }
    return places.get(key);
  };
  const rounded = (value, digits = 5) => (typeof value === "number" ? Number(value.toPrecision(digits)) : (value ?? null));
  const listColumns = (tokens, kind) => {
    const lists = tokens.map((token) => token[kind] ?? []);
    const all = lists.flat();
    const numbers = LISTS[kind].slice(2).map((name) => [name, all.map((one) => rounded(one[name]))]);
    return {count: lists.map((list) => list.length), word: all.map(wordOf), ...Object.fromEntries(numbers)};
  };
  const samples = documents.map(({tokens, ...document}) => {
    const plain = [...new Set(tokens.flatMap(Object.keys))].filter((name) => !["id", "text", ...Object.keys(LISTS)].includes(name));
    const digits = (name) => (["entropy", "varentropy"].includes(name) ? 9 : 5);
    const columns = plain.map((name) => [name, tokens.map((token) => rounded(token[name], digits(name)))]);
    const lists = Object.fromEntries(Object.keys(LISTS).map((kind) => [kind, listColumns(tokens, kind)]));
    return {...document, columns: {word: tokens.map(wordOf), ...Object.fromEntries(columns)}, lists};
  });
  return {words, samples};
}

/** Returns the report: the server's empty page with the data inserted. `<` is escaped, so the data cannot end its script element. */
async function reportOf(documents) {
  const page = await (await request("/page/report.html")).text();
  const data = JSON.stringify(reportData(documents)).slice(1, -1).replaceAll("<", "\\u003c");
  return page.replace('"words":[],"samples":[]', () => data);
}

function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], {type}));
  const link = element("a", {href: address, download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

// Loading.

/** Returns the parts of JSON Lines, and the number of skipped samples, whose prompt does not continue the text before them.
 *
 * Throws an Error if a line is not JSON, or if a record lacks a field of a trace. */
function partsOf(lines) {
  const records = lines.split("\n").filter((line) => line.trim()).map((line) => JSON.parse(line));
  const parts = [];
  let before = "";
  let skipped = 0;
  for (const {kind, sample, prompt, text, tokens: count, finish_reason: reason, ...rest} of records) {
    if (kind !== "sample") continue;
    if (typeof prompt !== "string" || typeof text !== "string") throw new Error("a sample has no text");
    if (!prompt.startsWith(before)) {
      skipped += 1;
      continue;
    }
    if (prompt.length > before.length) parts.push({who: "person", text: prompt.slice(before.length)});
    const tokens = records.filter((one) => one.kind === "token" && one.sample === sample).map(loadToken);
    if (tokens.length !== count) throw new Error("tokens are missing");
    const last = tokens.at(-1);
    if (last && reason === "eos" && last.text === "") last.ends = true;
    if (last && reason === "stop") last.cut = true; // a stop string may have truncated it
    const {seed, settings, router, stats, vocab_size: vocab} = rest;
    parts.push({who: "model", text, tokens, kept: 0, seed, settings, router, stats: stats ?? {}, reason, vocab, promptTokens: stats?.prompt_tokens});
    before = prompt + textOf(parts.at(-1));
  }
  if (!parts.length) throw new Error("it has no sample");
  return {parts, skipped};
}

function loadToken({kind, sample, step, position, ...token}) {
  const isToken = Number.isInteger(token.id) && typeof token.text === "string" && [undefined, ...STRATEGIES].includes(token.strategy);
  if (!isToken) throw new Error("a token has no id, no text or an unknown strategy");
  for (const [name, fields] of Object.entries(LISTS)) {
    if (token[name]) token[name] = token[name].map((values) => Object.fromEntries(fields.map((field, i) => [field, values[i]])));
  }
  return token;
}

// Copying.

/** Copies the text. Pages that are not on localhost or HTTPS have no clipboard API: the text is selected, and the selection copied. */
async function copy() {
  const {parts} = current();
  const text = isChat() ? parts.map((part) => `${authorOf(part)}: ${visibleText(part).trim()}`).join("\n\n") : joined(parts);
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = element("textarea", {class: "hidden"});
    field.value = text;
    document.body.append(field);
    field.select();
    const isCopied = document.execCommand("copy");
    field.remove();
    if (!isCopied) return showProblem("The browser does not allow copying.");
  }
  showStatus(`Copied ${whole(text.length)} characters.`);
}

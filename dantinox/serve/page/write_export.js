"use strict";
// A text as files: JSON Lines as `--trace` writes them, and the report as `--report` does.

const LISTS = {alternatives: ["id", "text", "logprob", "logprob_sampled"], candidates: ["id", "text", "logprob", "score"]};
const OF_PAGE = ["ends", "cut", "picked"]; // what this page notes at a token
const UNSAFE = /[\u007f-\u009f\u2028\u2029]/g;

/** A document for each part of the model: what stood before it is its prompt. */
function documentsOf(parts) {
  let before = "";
  return parts.flatMap((part) => {
    const prompt = before;
    before += textOf(part);
    if (!isModel(part) || !part.tokens.length) return [];
    const tokens = part.tokens.map((token) => Object.fromEntries(Object.entries(token).filter(([name]) => !OF_PAGE.includes(name))));
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

/** The documents as the report's page keeps them: columns, and a table of the words that all share. */
function packed(documents) {
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
  const shortened = (value, digits = 5) => (typeof value === "number" ? Number(value.toPrecision(digits)) : (value ?? null));
  const listed = (tokens, kind) => {
    const lists = tokens.map((token) => token[kind] ?? []);
    const all = lists.flat();
    const numbers = LISTS[kind].slice(2).map((name) => [name, all.map((one) => shortened(one[name]))]);
    return {count: lists.map((list) => list.length), word: all.map(wordOf), ...Object.fromEntries(numbers)};
  };
  const samples = documents.map(({tokens, ...document}) => {
    const plain = [...new Set(tokens.flatMap(Object.keys))].filter((name) => !["id", "text", ...Object.keys(LISTS)].includes(name));
    const digits = (name) => (["entropy", "varentropy"].includes(name) ? 9 : 5);
    const columns = plain.map((name) => [name, tokens.map((token) => shortened(token[name], digits(name)))]);
    const lists = Object.fromEntries(Object.keys(LISTS).map((kind) => [kind, listed(tokens, kind)]));
    return {...document, columns: {word: tokens.map(wordOf), ...Object.fromEntries(columns)}, lists};
  });
  return {words, samples};
}

/** The report: the server's empty page with the data put in, in which no `<` can end the element that holds it. */
async function reportOf(documents) {
  const page = await (await asked("/page/report.html")).text();
  const data = JSON.stringify(packed(documents)).slice(1, -1).replaceAll("<", "\\u003c");
  return page.replace('"words":[],"samples":[]', () => data);
}

function save(name, kind, text) {
  const address = URL.createObjectURL(new Blob([text], {type: kind}));
  const link = element("a", {href: address, download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

async function exported(format) {
  const documents = documentsOf(current().parts);
  const name = `${(writing.about?.model ?? "text").replace(/[^\w.-]+/g, "_")}-${writing.mode}`;
  try {
    if (format === "lines") save(`${name}.jsonl`, "application/jsonl", linesOf(documents));
    else save(`${name}.html`, "text/html", await reportOf(documents));
  } catch (error) {
    problem(error.message);
  }
}

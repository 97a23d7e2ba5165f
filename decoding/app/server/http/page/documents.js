// The documents, side by side: opened by the server, and fitted to the context.

const RESERVED_PART = 8;   // 1/8 of the context is reserved for questions and answers
const MIN_RESERVED = 256;  // tokens

// Each {id, name, file | kept, text, characters, tokens, notes, error, part, offer}. Its `text` is
// null until it is open, `tokens` until they are counted; of a text of more than twice the context
// the server sends only the beginning, and the number of `characters` of all. `part` {length,
// tokens} is what is used of it, null for all; `offer` is the same, until the reader has decided.
let documents = [];
let opening = null;  // {own, controller}: the document that is being opened
let isOpening = false;
let isFitted = true;
let lastId = Date.now();

const nextId = () => (lastId += 1);
const isOpen = (each) => each.text !== null && each.tokens !== null;
const isUsed = (each) => isOpen(each) && !each.error && !each.offer;
const used = () => documents.filter(isUsed);
const usedTokens = (each) => (each.part ?? each).tokens;
const prefixTokens = () => used().reduce((sum, each) => sum + usedTokens(each), 0);
const reserved = () => Math.max(MIN_RESERVED, Math.floor(server.context / RESERVED_PART));
const unopened = () => documents.find((each) => !each.error && !isOpen(each));
const undecided = () => documents.find((each) => each.offer && !each.error);

// Adds documents that have a file, or the id of one that is kept on the server's disk.
function addDocuments(added) {
  const empty = {text: null, tokens: null, notes: [], error: "", part: null, offer: null};
  documents.push(...added.map((fields) => ({id: nextId(), ...empty, ...fields})));
  documentsChanged();
}

const addFiles = (files) => addDocuments([...files].map((file) => ({name: file.name, file})));

function removeDocument(own) {
  const index = documents.indexOf(own);
  documents = documents.filter((each) => each !== own);
  if (opening?.own === own) opening.controller.abort();
  const refit = () => fitAgain(own.error ? documents.length : index);
  offerUndo(`${own.name} is removed.`, () => {
    documents.splice(index, 0, own);
    refit();
  });
  refit();
}

// Decides again what fits, from a document on: there may be more room, or less.
function fitAgain(first = 0) {
  for (const each of documents.slice(first)) each.part = each.offer = null;
  documentsChanged();
}

function openAgain(own) {
  own.error = "";
  documentsChanged();
}

function documentsChanged() {
  isFitted = false;
  readingError = "";
  save("documents", documents);
  openNext();
}

// Opens one document after the other, fits all of them, and goes on with what waits for that.
async function openNext() {
  renderSoon();
  if (isOpening || server.state !== "open") return;
  isOpening = true;
  try {
    for (let own = unopened(); own || !isFitted; own = unopened()) {
      if (own) await attempt(own, openDocument);
      else await fit();
    }
  } catch {
    isFitted = false;  // it was postponed
  }
  isOpening = false;
  advance();
}

// Runs a step for a document; an error of it is shown there, unless it is the server's.
async function attempt(own, step) {
  opening = {own, controller: new AbortController()};
  try {
    await step(own, opening.controller.signal);
  } catch (error) {
    if (error.name === "AbortError") return;  // it is removed
    if (await isPostponed(error)) throw error;
    own.error = error.message;
    if (!(error instanceof Unreachable)) own.file = null;
  } finally {
    opening = null;
  }
  save("documents", documents);
  renderSoon();
}

async function openDocument(own, signal) {
  if (own.text === null) {
    await own.file?.slice(0, 1).arrayBuffer().catch(() => {  // a folder, or changed since
      throw new Error("The browser cannot read this file: choose it again.");
    });
    const path = own.kept ? `/documents/${encodeURIComponent(own.kept)}`
      : `/documents?name=${encodeURIComponent(own.name)}`;
    const headers = {"Content-Type": "application/octet-stream"};
    const {text, tokens, notes = [], characters = text.length} =
      await requestJson(path, own.kept ? {signal}
        : {method: "POST", headers, body: own.file, signal});
    Object.assign(own, {text, characters, tokens, notes, file: null});
  }
  own.tokens ??= await countTokens(own.text);
}

// Offers a part of the documents that do not fit beside those before them.
async function fit() {
  isFitted = true;
  let room = server.context - reserved();
  for (const each of documents.filter(isOpen)) {
    await attempt(each, (own) => fitDocument(own, room));
    if (isUsed(each)) room -= usedTokens(each);
  }
}

async function fitDocument(own, room) {
  if (own.error || own.offer?.room === room) return;
  if (usedTokens(own) <= room) {
    own.offer = null;
    return;
  }
  own.tokens = await countTokens(own.text);  // until now an upper bound
  own.part = null;
  own.offer = own.tokens > room ? await largestPart(own, room) : null;
}

// Returns the length of the first part of a text that has at most `room` tokens, and its tokens.
async function largestPart({text, tokens}, room) {
  let length = text.length;
  while (length && tokens > room) {
    length = Math.floor(length * Math.min(0.98, Math.max(0, 0.99 * room / tokens)));
    if (/[\ud800-\udbff]/.test(text[length - 1])) length -= 1;  // no half of a character
    tokens = length ? await countTokens(text.slice(0, length)) : 0;
  }
  return {length, tokens, room};
}

function acceptPart(own) {
  [own.part, own.offer] = [own.offer, null];
  documentsChanged();
}

// Returns what a conversation begins with. Of a single document that is its text alone, as on the
// command line, so that each continues from the KV that the other has left on disk.
function documentsPrefix() {
  const textOf = ({text, part}) => (part ? text.slice(0, part.length) : text);
  const all = used().map((each) => [each.name, textOf(each)]);
  if (all.length === 1) return `${all[0][1]}\n\n`;
  return all.map(([name, text]) => `# ${name}\n\n${text}\n\n`).join("");
}

// Lists the documents on the server's disk; the list is a convenience, and may be missing.
async function refreshKept() {
  const {data: kept} = await requestJson("/documents").catch(() => ({data: []}));
  $("kept").hidden = !kept.length;
  reconcile($("kept").querySelector("ul"), kept, ({id}) => id, ({id, name, tokens}) =>
    make("li", {}, action(name, () => addDocuments([{name, kept: id}]), {className: "link"}),
      make("span", {className: "muted"}, plural(tokens, "token"))));
}

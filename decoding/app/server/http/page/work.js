// The server's state, and one request at a time: the documents are read, then questions answered.

const CHECK_S = 10;        // between two checks of a server that is there
const MAX_BACKOFF_S = 15;  // between two of one that is gone
const BUSY_S = 3;          // until a request is sent again that the server was too busy for
const SMOOTHING_S = 5;     // over which the rate of a prefill is averaged

// state: connecting, open, locked (it needs another API key), or lost
const server = {state: "connecting", model: "", context: 0, created: 0, failures: 0, retryAt: 0};
let checkTimer = null;
let busyTimer = null;   // set while the server has too many requests
let active = null;      // the request: {turn, null for the documents; controller, progress, ...}
let readKey = "";       // the documents that the server has prefilled
let readingError = "";
let ownAborted = 0;     // aborted requests that may still be ending there: no one else's
let systemMessage = "";

async function check() {
  const before = server.state;
  const signal = AbortSignal.timeout(1000 * CHECK_S);
  try {
    await request("/health", {signal});
    onModel((await requestJson("/v1/models", {signal})).data[0]);
    Object.assign(server, {state: "open", failures: 0});
    if (key) stored("sessionStorage")?.setItem("api-key", key);
  } catch (error) {
    server.state = error.status === 401 ? "locked" : "lost";
    server.failures += 1;
  }
  const wait = server.state === "lost" ? Math.min(MAX_BACKOFF_S, 1.5 ** server.failures) : CHECK_S;
  checkLater(wait);
  if (server.state === "open" && before !== "open") refreshKept();
  openNext();
}

function checkLater(wait) {
  clearTimeout(checkTimer);
  server.retryAt = Date.now() + 1000 * wait;
  // a stream shows as well that the server is there
  checkTimer = setTimeout(() => (active ? checkLater(CHECK_S) : check()), 1000 * wait);
}

function onModel({id, max_model_len: context, created}) {
  const {model, created: createdBefore, context: contextBefore} = server;
  Object.assign(server, {model: id, context, created});
  save("server", {model: id, context, created});
  if (!model || created === createdBefore) return;
  readKey = "";
  if (id === model && context === contextBefore) return;
  showIf($("restarted"), `The server was restarted: it has ${id} with a context of `
    + `${number(context)} tokens now, not ${model} with ${number(contextBefore)}.`);
  for (const each of documents) if (id !== model) each.tokens = null;  // another tokenizer
  fitAgain();
}

// Returns whether what an error ended has to be done again, once the server can be reached, has
// another key, or is less busy.
async function isPostponed(error) {
  const isBusy = error.status === 429 || (error.status === 503 && error.code !== "out_of_memory");
  if (isBusy) {
    clearTimeout(busyTimer);
    busyTimer = setTimeout(() => { busyTimer = null; openNext(); }, 1000 * BUSY_S);
  }
  const isServers = error instanceof Unreachable || error.type === "server_error";
  if (isServers || error.status === 401 || error.status >= 500) await check();
  return isBusy || server.state !== "open";
}

// -- what comes next ------------------------------------------------------------------------

const prefixKey = () => JSON.stringify(used().length
  ? [systemMessage, ...used().map(({id, part}) => [id, part?.length])] : "");
const isReading = () => active !== null && active.turn === null;
const isRead = () => !used().length || readKey === prefixKey();

// Begins what comes next, if there is no request, and nothing that it would have to wait for.
function advance() {
  renderSoon();
  if (isReading() && !isOpening && active.key !== prefixKey()) active.controller.abort();
  if (active || waitReason()) return;
  const turn = turns.find((each) => each.status === "waiting");
  if (!isRead()) readDocuments();
  else if (turn) answer(turn);
}

// Returns what everything waits for; "" for nothing.
function waitReason() {
  if (server.state === "locked") return "waiting for the API key";
  if (server.state !== "open") return "waiting for the server";
  if (busyTimer) return "the server has too many requests; trying again in a few seconds";
  if (undecided()) return `waiting: decide about ${undecided().name}`;
  if (isOpening || unopened() || !isFitted) return "waiting for the documents to be opened";
  return readingError ? "waiting: the documents could not be read" : "";
}

async function readDocuments() {
  announce("The documents are being read.");
  const messages = [{role: "user", content: documentsPrefix()}];
  const job = newJob(null, prefixTokens());
  readKey = "";  // this may overwrite what was read before
  const {error, isAgain} = await run(job, {messages, max_tokens: 1});
  if (!error) {
    readKey = job.key;
    announce("The documents are read.");
    refreshKept();
  } else if (error.name !== "AbortError" && !isAgain) {
    readingError = error.message;
  }
  advance();
}

async function answer(turn) {
  const job = newJob(turn, 0);
  if (turn.mode === "go on") job.start = turn.answer;
  const body = {messages: messagesFor(turn), ...sampling(turn.mode === "retry")};
  if (turn.mode === "go on") body.continue_final_message = true;
  Object.assign(turn, {status: "running", error: ""});
  announce("The question is being answered.");
  Object.assign(turn, endOf(job, await run(job, body)));
  if (job.counts) turn.total = job.counts.prompt_tokens + job.counts.new_tokens;
  if (turn.status !== "waiting") turn.before = "";
  announce(ENDINGS[turn.status]);
  turnsChanged();
}

const ENDINGS = {
  done: "The answer is complete.", cut: "The answer was cut.", stopped: "The answer was stopped.",
  interrupted: "The answer was interrupted.", waiting: "The question waits again.",
  failed: "The question could not be answered.",
};

// Returns the status of a turn after its request, and its error.
function endOf({turn, hasText, finish}, {error, isAgain}) {
  if (!error) return {status: finish === "length" ? "cut" : "done"};
  if (error.name === "AbortError") return {status: hasText ? "stopped" : turn.before || "stopped"};
  if (isAgain) return {status: hasText ? "interrupted" : "waiting"};
  return {status: "failed", error: error.message};
}

// -- the request ----------------------------------------------------------------------------

function newJob(turn, tokens) {
  const state = {progress: null, note: "starting …", hasText: false, start: ""};
  return {turn, tokens, key: prefixKey(), controller: new AbortController(), ...state};
}

// Sends a request; returns the error that ended it, if any, and whether to send it again.
async function run(job, {messages, ...body}) {
  const all = systemMessage ? [{role: "system", content: systemMessage}, ...messages] : messages;
  active = job;
  stored("sessionStorage")?.setItem("running", "1");
  renderSoon();
  const end = {error: null, isAgain: false};
  try {
    await complete({messages: all, ...body}, job.controller.signal, (event) => onEvent(job, event));
  } catch (error) {
    if (error.name === "AbortError") ownAborted += 1;
    Object.assign(end, {error, isAgain: error.name !== "AbortError" && await isPostponed(error)});
    if (job.controller.signal.aborted) {  // meanwhile
      Object.assign(end, {error: new DOMException("", "AbortError"), isAgain: false});
    }
    job.controller.abort();  // a stream that cannot be read is not left open
  }
  active = null;
  stored("sessionStorage")?.removeItem("running");
  return end;
}

function onEvent(job, event) {
  if (job.controller.signal.aborted) return;
  if ("waiting" in event) {
    const others = event.waiting - ownAborted;
    job.note = others > 0 ? `waiting: ${plural(others, "request")} ahead` : "starting …";
  } else {
    ownAborted = 0;
  }
  if (event.prefill) onPrefill(job, ...event.prefill);
  if (event.counts) showNumbers(job.counts = event.counts);
  if (event.text && job.turn) onText(job, event.text);
  if (event.finish) job.finish = event.finish;
  renderSoon();
}

function onText(job, part) {
  if (!job.hasText) Object.assign(job.turn, {answer: job.start, before: ""});
  Object.assign(job, {hasText: true, progress: null, note: ""});
  job.turn.answer += part;
  saveTurnsSoon();
}

// Updates the share of a prefill that is done, and the smoothed rate of it. The server counts units
// of work, layer by layer; a reader knows tokens.
function onPrefill(job, done, total) {
  const now = performance.now() / 1000, share = done / total, {tokens} = job;
  job.progress ??= {share, rate: null, now, started: now};
  const {progress} = job;
  if (now > progress.now) {
    const rate = (share - progress.share) / (now - progress.now);
    const weight = Math.exp((progress.now - now) / SMOOTHING_S);
    progress.rate = progress.rate === null ? rate : weight * progress.rate + (1 - weight) * rate;
    Object.assign(progress, {share, now});
  }
  job.note = tokens ? `${number(share * tokens)} of ${number(tokens)} tokens`
    : `reading: ${Math.floor(100 * share)}%`;
  const isKnown = progress.rate > 0 && now - progress.started > 1 && share < 1;
  if (isKnown) job.note += `, ${timeLeft((1 - share) / progress.rate)}`;
}

function stop() {
  if (active?.turn) active.controller.abort();
}

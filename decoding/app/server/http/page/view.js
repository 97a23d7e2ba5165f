// What is shown: drawn from the state, shortly after it has changed.

const FRAME_MS = 30;
const NEAR_END = 120;  // pixels from the end of the page up to which it follows an answer
let isDue = false;

function renderSoon() {
  if (isDue) return;
  isDue = true;
  setTimeout(() => {
    isDue = false;
    render();
  }, FRAME_MS);
}

function announce(message) { $("announcer").textContent = message; }

function render() {
  const page = document.documentElement, height = page.scrollHeight;
  const isAtEnd = height - page.scrollTop - page.clientHeight < NEAR_END;
  renderServer();
  reconcile($("documents"), documents, documentKey, documentItem);
  documents.forEach((each, index) => {
    showText($("documents").children[index].querySelector(".state"), documentState(each));
  });
  renderReading();
  reconcile($("conversation"), turns, (turn) => turn.id, turnArticle);
  turns.forEach((turn, index) => renderTurn($("conversation").children[index], turn));
  $("empty").hidden = turns.length > 0;
  $("clear").disabled = !turns.length;
  if (isAtEnd && turns.length && page.scrollHeight > height) scrollToEnd();
  const share = active?.progress && Math.floor(100 * active.progress.share);
  document.title = share ? `${share}% read – TierForce` : "TierForce: ask a book";
}

function renderServer() {
  const {state, model, context, retryAt} = server;
  const unknown = state === "locked" ? "API key needed" : "connecting …";
  $("model").textContent = model ? `${model}, context of ${number(context)} tokens` : unknown;
  const wasHidden = $("locked").hidden;
  $("locked").hidden = state !== "locked";
  if (wasHidden && state === "locked" && document.activeElement === document.body) $("key").focus();
  $("key-error").hidden = state !== "locked" || !key;
  $("connection").hidden = state !== "lost";
  const left = Math.max(1, Math.ceil((retryAt - Date.now()) / 1000));
  $("countdown").textContent = `Trying again in ${left} s.`;
}

function scrollToEnd() { scrollTo(0, document.documentElement.scrollHeight); }

// -- documents ------------------------------------------------------------------------------

const documentKey = (each) =>
  JSON.stringify([each.id, each.error, each.notes, each.offer]);

function documentState(each) {
  if (each.error) return "";
  if (!isOpen(each)) return server.state === "open" ? "opening …" : "waiting for the server";
  if (each.offer) return `${plural(each.tokens, "token")}, too long`;
  const state = isRead() ? "read" : isReading() ? "being read" : "not read yet";
  const part = each.part ? `the first ${percentOf(each, each.part)}, ` : "";
  return `${part}${plural(usedTokens(each), "token")}, ${state}`;
}

const percentOf = ({characters}, {length}) =>
  `${Math.min(99, Math.floor(100 * length / characters)) || "<1"}%`;

function documentItem(each) {
  const remove = action("Remove", () => {
    removeDocument(each);
    $("file").focus();
  }, {ariaLabel: `Remove ${each.name}`});
  const item = make("li", {}, make("b", {}, each.name), remove,
    make("span", {className: "muted state"}));
  if (each.notes.length) item.append(make("p", {className: "muted"}, each.notes.join(" ")));
  const retries = each.file || each.kept ? [action("Try again", () => openAgain(each))] : [];
  if (each.error) item.append(errorLine(each.error, ...retries));
  else if (each.offer) item.append(offerLine(each));
  return item;
}

// What would be used of a document that does not fit, before anything of it is read.
function offerLine(each) {
  const {length, tokens, room} = each.offer;
  const size = `It has ${number(each.tokens)} tokens, and there is room for `
    + `${number(Math.max(0, room))}: the context has ${number(server.context)}, of which `
    + `${number(reserved())} are for questions and answers.`;
  if (!length) return errorLine(`${size} Remove it, or one before it.`);
  const label = `Use the first ${percentOf(each, each.offer)} (${number(tokens)} tokens)`;
  return make("div", {className: "offer", role: "alert"}, make("p", {}, size),
    action(label, () => {
      acceptPart(each);
      $("question").focus();
    }));
}

function renderReading() {
  const state = isReading() ? "reading" : readingError;
  reconcile($("reading"), state ? [state] : [], (each) => each, () => {
    if (!isReading()) return errorLine(readingError, action("Try again", documentsChanged));
    return make("div", {}, make("progress", {max: 1, ariaLabel: "Documents read"}),
      make("p", {className: "muted", id: "progress"}));
  });
  if (!isReading()) return;
  $("progress").textContent = active.note;
  $("reading").querySelector("progress").value = active.progress?.share ?? 0;
}

// -- turns ----------------------------------------------------------------------------------

function turnArticle(turn) {
  return make("article", {tabIndex: -1}, make("h3", {className: "question"}, turn.question),
    make("div", {className: "answer"}), make("div", {className: "state"}));
}

function renderTurn(article, turn) {
  const [, body, state] = article.children;
  if (body.source !== turn.answer) renderMarkdown(body, body.source = turn.answer);
  article.className = turn.status;
  const names = actionsOf(turn);
  const hasFocus = state.contains(document.activeElement);
  reconcile(state, [turn], () => [turn.error, ...names].join(), () => stateLine(article, turn));
  if (hasFocus && !state.contains(document.activeElement)) article.focus({preventScroll: true});
  showText(state.querySelector(".note"), noteOf(turn));
}

function showText(element, content) {
  if (element.textContent !== content) element.textContent = content;
}

function noteOf(turn) {
  if (turn.status === "running") return active?.turn === turn ? active.note : "";
  if (turn.status === "waiting") {
    return waitReason()
      || (isReading() ? "waiting for the documents to be read" : "waiting in line");
  }
  if (turn.status === "done") return turn.answer ? "" : "the answer is empty";
  if (turn.status === "failed") return "";  // the error says more
  if (turn.status !== "cut") return turn.status;
  return `cut: ${turn.total < server.context ? "the limit of tokens" : "the context is full"}`;
}

const ACTIONS = {
  Remove: withdraw, Stop: stop,
  "Go on": (turn) => again(turn, "go on"), Retry: (turn) => again(turn, "retry"),
};

function actionsOf(turn) {
  if (turn.status === "waiting") return ["Remove"];
  if (turn.status === "running") return ["Stop"];
  return [canGoOn(turn) && "Go on", turn.answer && "Copy", "Retry"].filter(Boolean);
}

function stateLine(article, turn) {
  const buttonOf = (name) => action(name, () => {
    ACTIONS[name](turn);
    article.focus({preventScroll: true});  // the button goes away
  });
  return make("div", {className: "actions"}, ...(turn.error ? [errorLine(turn.error)] : []),
    make("span", {className: "note"}), ...actionsOf(turn).map((name) =>
      (name === "Copy" ? copyButton(name, () => turn.answer) : buttonOf(name))));
}

// Offers to undo what was done last; "" to withdraw the offer.
function offerUndo(message, restore) {
  if (message) announce(message);
  $("undo").hidden = !message;
  $("undo").replaceChildren(message, " ", action("Undo", () => {
    offerUndo("");
    restore();
    $("question").focus();
  }));
}

// -- numbers --------------------------------------------------------------------------------

const squares = (kinds) => kinds.map((className) => make("i", {className}));

function showNumbers(counts) {
  $("no-numbers").hidden = true;
  $("some-numbers").hidden = false;
  if (counts.layers) showLayers(counts.layers);
  showOrigins(counts);
  const rows = {
    prompt: plural(counts.prompt_tokens, "token"),
    generated: plural(counts.new_tokens, "token"),
    "time to first token": seconds(counts.time_to_first_token_s),
    "time per token": `${counts.ms_per_token?.toFixed(1) ?? "–"} ms`,
    "tokens per verification": counts.tokens_per_verification?.toFixed(2) ?? "–",
    "host link": bytes(counts.link_bytes),
    "host link, per token": bytes(counts.link_bytes_per_token ?? 0),
    seed: counts.seed,
    mode: counts.mode,
  };
  $("counts").replaceChildren(...Object.entries(rows).flatMap(([name, value]) =>
    [make("dt", {className: "muted"}, name), make("dd", {}, value)]));
}

function showLayers(layers) {
  const kinds = Object.entries(layers).flatMap(([kind, count]) => Array(count).fill(kind));
  $("layers").replaceChildren(...squares(kinds));
  showCounts($("layers"), [layers.device, layers.split, layers.host]);
  $("layers").ariaLabel =
    `${layers.device} layers on the device, ${layers.split} split, ${layers.host} on the host`;
}

// Writes the numbers of a chart into the legend after it.
function showCounts(chart, counts) {
  const places = chart.nextElementSibling.querySelectorAll("b");
  counts.forEach((count, index) => { places[index].textContent = number(count); });
}

function showOrigins({prompt_tokens: total, reused_tokens: reused, loaded_tokens: loaded}) {
  const counts = [reused, loaded, Math.max(0, total - reused - loaded)];
  $("prompt").replaceChildren(...squares(["device", "disk", "prefilled"]));
  counts.forEach((count, index) => {
    $("prompt").children[index].style.width = `${100 * count / Math.max(1, total)}%`;
  });
  showCounts($("prompt"), counts);
  $("prompt").ariaLabel = `${plural(counts[0], "token")} reused, ${number(counts[1])} loaded `
    + `from disk, ${number(counts[2])} prefilled`;
}

// The conversation: its questions, those that wait in line included, and their answers.

const SAVE_MS = 300;  // between two savings while an answer is written

// Each {id, question, answer, status, before, mode, error, total}. Its status is waiting, running,
// done, cut (at the limit of tokens), stopped, interrupted, or failed; `before` is the one before
// it waited again; `mode` is ask, retry, or go on; `total` counts its tokens and its prompt's.
let turns = [];
let saveTimer = null;

function addQuestion(question) {
  const state = {answer: "", status: "waiting", before: "", mode: "ask", error: "", total: 0};
  turns.push({id: nextId(), question, ...state});
  offerUndo("");
  showIf($("restarted"), "");
  turnsChanged();
  render();
  scrollToEnd();
}

function again(turn, mode) {
  Object.assign(turn, {before: turn.status, status: "waiting", mode, error: ""});
  turnsChanged();
}

// Takes a question out of the line; one that was answered before keeps its answer.
function withdraw(turn) {
  if (turn.before) turn.status = turn.before;
  else turns = turns.filter((each) => each !== turn);
  turnsChanged();
}

function newConversation() {
  const before = turns;
  stop();
  turns = [];
  offerUndo("The conversation is cleared.", () => {
    turns = [...before, ...turns];
    turnsChanged();
  });
  turnsChanged();
}

function saveTurns() {
  clearTimeout(saveTimer);
  saveTimer = null;
  save("turns", turns);
}

function saveTurnsSoon() { saveTimer ??= setTimeout(saveTurns, SAVE_MS); }

function turnsChanged() {
  saveTurns();
  advance();
}

const canGoOn = (turn) => turn.answer.trim() !== "" && turn.total < server.context
  && ["cut", "stopped", "interrupted", "failed"].includes(turn.status);

// Returns the messages up to a turn; the documents are at the beginning of the first question.
function messagesFor(turn) {
  const earlier = turns.slice(0, turns.indexOf(turn)).filter((each) => each.answer.trim());
  const messages = earlier.flatMap(({question, answer}) =>
    [{role: "user", content: question}, {role: "assistant", content: answer}]);
  messages.push({role: "user", content: turn.question});
  messages[0].content = documentsPrefix() + messages[0].content;
  if (turn.mode === "go on") messages.push({role: "assistant", content: turn.answer});
  return messages;
}

// Settings, event handlers, and the start.

const SAMPLING = ["max-tokens", "temperature", "top-p", "seed"];
const SETTINGS = [...SAMPLING, "system"];

// Returns the fields of a request that the reader has set; a repeated one gets a new seed.
function sampling(isRepeated) {
  const fields = {};
  for (const id of SAMPLING) if ($(id).value) fields[id.replace("-", "_")] = Number($(id).value);
  if (isRepeated && "seed" in fields) fields.seed = -1;  // any
  return fields;
}

function saveSettings() {
  for (const id of SETTINGS) stored("localStorage")?.setItem(id, $(id).value);
}

function onSystemMessage() {
  systemMessage = $("system").value.trim();
  documentsChanged();
}

// Restores what a reload has left; files dropped meanwhile come after it.
async function restore() {
  await openStorage();
  const [oldDocuments, oldTurns, oldServer] =
    await Promise.all(["documents", "turns", "server"].map(load));
  documents = [...oldDocuments ?? [], ...documents];
  turns = [...oldTurns ?? [], ...turns];
  Object.assign(server, oldServer);
  for (const turn of turns.filter(({status}) => status === "running")) {
    turn.status = turn.answer && !turn.before ? "interrupted" : "waiting";
  }
  saveTurns();
  save("documents", documents);
  if (stored("sessionStorage")?.getItem("running")) ownAborted = 1;
  isFitted = false;
}

function onQuestion() {
  const area = $("question");
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;  // with its border
  $("send").disabled = !area.value.trim();
}

function onDrag(event) {
  if (!event.dataTransfer?.types.includes("Files")) return;  // a text, for the question
  event.preventDefault();
  document.body.classList.toggle("over", event.type === "dragover");
  if (event.type === "drop") addFiles(event.dataTransfer.files);
}

for (const name of ["dragover", "drop", "dragleave"]) document.addEventListener(name, onDrag);
$("file").onchange = () => {
  addFiles($("file").files);
  $("file").value = "";
};
$("clear").onclick = () => {
  newConversation();
  $("question").focus();
};
$("settings").oninput = saveSettings;
$("system").onchange = onSystemMessage;
$("question").oninput = onQuestion;
$("question").onkeydown = (event) => {
  const isComposing = event.isComposing || event.keyCode === 229;  // Safari's, at the end of it
  if (event.key === "Enter" && !event.shiftKey && !isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
};
$("ask").onsubmit = (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question) return;
  $("question").value = "";
  onQuestion();
  addQuestion(question);
};
$("locked").onsubmit = async (event) => {
  event.preventDefault();
  key = $("key").value.trim().replace(/[^\x20-\x7e]/g, "?");  // headers have no others
  $("key-error").hidden = true;  // shown again, it is announced again
  await check();
  if (server.state === "open") $("question").focus();
};

for (const id of SETTINGS) $(id).value = stored("localStorage")?.getItem(id) ?? "";
systemMessage = $("system").value.trim();
setInterval(() => { if (server.state === "lost") renderSoon(); }, 1000);  // the countdown
await restore().catch(() => showIf($("storage"), NOTHING_IS_STORED));
await check();

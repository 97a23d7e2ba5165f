// Requests to the server, and the streams that answer them.

const SILENCE_S = 30;  // until a stream is given up, which has a comment every second
const INTERRUPTED = "the connection was interrupted.";

let key = stored("sessionStorage")?.getItem("api-key") ?? "";

class Unreachable extends Error {}

const asUnreachable = (error) => {
  throw error.name === "AbortError" ? error : new Unreachable(INTERRUPTED);
};

// Returns a response; raises Unreachable, AbortError, or an error with the response's status.
async function request(path, {headers = {}, ...options} = {}) {
  const all = key ? {...headers, Authorization: `Bearer ${key}`} : headers;
  const response = await fetch(path, {...options, headers: all}).catch(asUnreachable);
  if (response.ok) return response;
  const {status} = response;
  let error = {message: `the server answered with status ${status}.`};
  try { error = (await response.json()).error ?? error; } catch { /* no JSON: a proxy's */ }
  const {message, code, type, tierforce: sizes} = error;
  throw Object.assign(new Error(message), {status, code, type, sizes});
}

async function requestJson(path, options) {
  const response = await request(path, options);
  return response.json().catch(asUnreachable);
}

const asJson = (body, signal) => ({
  method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body), signal,
});

// Sends a conversation, and calls onEvent({waiting}|{prefill}|{counts}|{text}|{finish}).
async function complete(body, signal, onEvent) {
  const options = {stream: true, stream_options: {include_usage: true}};
  const response = await request("/v1/chat/completions", asJson({...body, ...options}, signal));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", isDone = false, timer;
  for (;;) {
    timer = setTimeout(() => reader.cancel(), 1000 * SILENCE_S);
    const {value, done} =
      await reader.read().catch(asUnreachable).finally(() => clearTimeout(timer));
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) isDone = parseLine(line.trimEnd(), onEvent) || isDone;
  }
  if (!isDone) throw new Unreachable(INTERRUPTED);
}

// Handles one line of a stream; returns whether it was the last.
function parseLine(line, onEvent) {
  if (line.startsWith(": {")) {
    onEvent(JSON.parse(line.slice(2)));
  } else if (line === "data: [DONE]") {
    return true;
  } else if (line.startsWith("data: ")) {
    const chunk = JSON.parse(line.slice(6));
    if (chunk.error) throw Object.assign(new Error(chunk.error.message), chunk.error);
    if (chunk.tierforce) onEvent({counts: chunk.tierforce});
    for (const choice of chunk.choices) {
      if (choice.delta.content) onEvent({text: choice.delta.content});
      if (choice.finish_reason) onEvent({finish: choice.finish_reason});
    }
  }
  return false;
}

// Returns the tokens of a text; an estimate if they are more than twice the context.
async function countTokens(content) {
  try {
    return (await requestJson("/tokenize", asJson({content}))).count;
  } catch (error) {
    if (error.code === "context_length_exceeded" && error.sizes) return error.sizes.prompt_tokens;
    throw error;
  }
}

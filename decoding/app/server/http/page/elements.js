// Elements, numbers and times.

const $ = (id) => document.getElementById(id);

// Returns a new element with properties, and children that are nodes or strings.
function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const action = (label, onclick, properties) =>
  make("button", {type: "button", onclick, ...properties}, label);
const errorLine = (message, ...actions) =>
  make("p", {className: "error", role: "alert"}, message, ...actions);

// Gives `parent` one child per item; children with the same key stay, with focus and selection.
function reconcile(parent, items, keyOf, build) {
  items.forEach((item, index) => {
    const key = keyOf(item), old = parent.children[index];
    if (old?.key === key) return;
    const element = Object.assign(build(item), {key});
    if (old) old.replaceWith(element);
    else parent.append(element);
  });
  while (parent.children.length > items.length) parent.lastElementChild.remove();
}

// Shows `message` in an element, or hides it if there is none.
function showIf(element, message) {
  element.hidden = !message;
  element.textContent = message;
}

const number = (value) => Math.round(value).toLocaleString("en");
const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
const seconds = (value) => `${value < 10 ? value.toFixed(2) : value.toFixed(0)} s`;

function timeLeft(value) {
  if (value >= 90) return `about ${Math.round(value / 60)} min left`;
  const step = value > 20 ? 5 : 1;  // seconds; a number that changes all the time is not read
  return `about ${Math.max(1, step * Math.round(value / step))} s left`;
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${value < 10 && unit ? value.toFixed(1) : value.toFixed(0)} ${units[unit]}`;
}

async function copy(content) {
  if (navigator.clipboard) return navigator.clipboard.writeText(content);
  // without HTTPS, on another machine than the server's, browsers have only the old function
  const focused = document.activeElement;
  const area = document.body.appendChild(make("textarea", {value: content}));
  area.select();
  document.execCommand("copy");
  area.remove();
  focused.focus({preventScroll: true});
}

function copyButton(label, contentOf) {
  const button = action(label, async () => {
    button.textContent = await copy(contentOf()).then(() => "Copied", () => "Not copied");
    setTimeout(() => { button.textContent = label; }, 2000);
  });
  return button;
}

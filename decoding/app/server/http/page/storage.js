// What survives a reload: in IndexedDB, one slot per tab that is open at the same time.

const SLOTS = 100;
const RELOAD_MS = 500;  // until the page before a reload has released its slot
const NOTHING_IS_STORED = "This browser stores nothing for this page: a reload would lose all.";

let database = null;
const unsaved = new Map();  // why the latest value of a name is not saved
let slot = 1;

// Returns a storage of the browser's; null if the reader has blocked it.
function stored(name) {
  try { return window[name]; } catch { return null; }
}

async function openStorage() {
  try {
    slot = await claimSlot();
    const opening = indexedDB.open("tierforce", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore("saved");
    database = await finished(opening);
  } catch {
    showIf($("storage"), NOTHING_IS_STORED);
  }
}

// Returns a tab's own slot after a reload, and otherwise the first one that no other tab has.
async function claimSlot() {
  const own = Number(stored("sessionStorage")?.getItem("slot"));
  let claimed = own || 1;
  if (navigator.locks) {  // browsers have them for HTTPS and this machine only
    const isOwn = own && await claim(own, {signal: AbortSignal.timeout(RELOAD_MS)});
    if (!isOwn) claimed = 1;
    while (!isOwn && claimed < SLOTS && !await claim(claimed, {ifAvailable: true})) claimed += 1;
  }
  stored("sessionStorage")?.setItem("slot", claimed);
  return claimed;
}

// Locks a slot until the tab is closed; returns whether that was possible.
const claim = (number, options) => new Promise((resolve) => {
  navigator.locks.request(`tierforce ${number}`, options, (lock) => {
    resolve(lock !== null);
    return lock && new Promise(() => {});
  }).catch(() => resolve(false));
});

const finished = (operation) => new Promise((resolve, reject) => {
  operation.onsuccess = () => resolve(operation.result);
  operation.onerror = () => reject(operation.error);
});

const saved = (mode) => database.transaction("saved", mode).objectStore("saved");
const load = async (name) => database && finished(saved("readonly").get(`${slot} ${name}`));

async function save(name, value) {
  if (!database) return;
  try {
    await finished(saved("readwrite").put(value, `${slot} ${name}`));
    unsaved.delete(name);
  } catch (error) {  // the browser's quota
    unsaved.set(name, `A reload would lose the latest changes: ${error.message}`);
  }
  showIf($("storage"), [...unsaved.values()][0]);
}

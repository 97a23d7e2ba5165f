// Markdown to elements, created one by one: what is no Markdown, HTML included, stays text.

const MAX_DEPTH = 20;  // of lists and quotes in each other
const FENCE = /^ {0,3}(`{3,}|~{3,})(?=[^`]*$)\s*([^`\s]*)/;
const HEADING = /^ {0,3}(#{1,6})(?=\s|$)(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+|$)/;
const TABLE_RULE = /^(?:\|\s*)?:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?$/;  // of a trimmed line
const INLINE = new RegExp([
  /\\(?<escaped>[!-/:-@[-`{-~])/,
  /(?<!`)(?<ticks>`+)(?!`)(?<code>.{0,2000}?[^`])\k<ticks>(?!`)/,
  /!?\[(?<label>[^[\]]*)\]\(<?(?<href>[^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?: "[^"]*")?\)/,
  /<(?<auto>(?:https?:\/\/|mailto:)[^\s<>]+)>/,
  /(?<bare>https?:\/\/[^\s<>]*[^\s<>.,;:!?'")\]*_])/,
  /\*\*(?=\S)(?<strong>.{0,2000}?\S)\*\*(?!\*)|(?<!\w)__(?=\S)(?<strong2>.{0,2000}?\S)__(?!\w)/,
  /\*(?=[^\s*])(?<em>.{0,2000}?[^\s*])\*(?!\*)/,
  /(?<!\w)_(?=[^\s_])(?<em2>.{0,2000}?[^\s_])_(?!\w)/,
  /~~(?=\S)(?<del>.{0,2000}?\S)~~/,
  /(?<! )(?<hard> {2,}|\\)\n/,
].map((part) => part.source).join("|"), "gs");

// Renders an answer, perhaps unfinished; blocks that have not changed stay as they are.
function renderMarkdown(root, source) {
  reconcile(root, blocksOf(source.split("\n")), (block) => block.key, (block) => block.build());
}

// Returns the blocks in lines: {key: their source, build: a function that returns an element}.
function blocksOf(lines, depth = 0) {
  const blocks = [];
  let start = 0;
  while (start < lines.length) {
    if (!lines[start].trim()) { start += 1; continue; }
    const [end, build] = nextBlock(lines, start, depth);
    blocks.push({key: lines.slice(start, end).join("\n"), build});
    start = end;
  }
  return blocks;
}

// Returns the end of the block at `start`, and a function that builds its element.
function nextBlock(lines, start, depth) {
  const line = lines[start], fence = FENCE.exec(line), heading = HEADING.exec(line);
  if (fence) return codeBlock(lines, start, fence);
  if (heading) {  // all of one rank, below the question's: answers skip ranks
    const className = `rank-${heading[1].length}`;
    return [start + 1, () => make("h4", {className}, ...inline(heading[2].trim()))];
  }
  if (RULE.test(line)) return [start + 1, () => make("hr")];
  if (QUOTE.test(line) && depth < MAX_DEPTH) return quoteBlock(lines, start, depth + 1);
  if (ITEM.test(line) && depth < MAX_DEPTH) return listBlock(lines, start, depth + 1);
  if (isTable(lines, start)) return tableBlock(lines, start);
  let end = start + 1;
  while (end < lines.length && !endsParagraph(lines, end)) end += 1;
  return [end, () => make("p", {}, ...inline(lines.slice(start, end).join("\n")))];
}

function endsParagraph(lines, index) {
  const patterns = [FENCE, HEADING, RULE, QUOTE, /^\s*(?:[-*+]|1[.)])\s+\S/];
  return !lines[index].trim() || isTable(lines, index)
    || patterns.some((pattern) => pattern.test(lines[index]));
}

function codeBlock(lines, start, [, fence, language]) {
  const closing = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}\\s*$`);
  let end = start + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const code = lines.slice(start + 1, end).join("\n");
  return [Math.min(end + 1, lines.length), () => make("div", {className: "code"},
    make("p", {}, language, copyButton("Copy code", () => code)),
    make("pre", {tabIndex: 0}, make("code", {}, code)))];
}

function quoteBlock(lines, start, depth) {
  let end = start;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(start, end).map((line) => line.replace(QUOTE, ""));
  return [end, () => make("blockquote", {}, ...built(inner, depth))];
}

const built = (lines, depth) => blocksOf(lines, depth).map((block) => block.build());
const indentOf = (line) => line.length - line.trimStart().length;

function listBlock(lines, start, depth) {
  const [, indent, marker] = ITEM.exec(lines[start]);
  const isOrdered = /\d/.test(marker), items = [];
  let end = start, isLoose = false, width = 0;  // columns up to the text of an item
  for (; end < lines.length; end += 1) {
    const line = lines[end], item = ITEM.exec(line), isFirst = end === start;
    const wasBlank = !isFirst && !lines[end - 1].trim();
    const isInner = !isFirst && indentOf(line) >= Math.min(width, indent.length + 2);
    if (!line.trim()) {
      items.at(-1).push("");
    } else if (item && !isInner && item[1].length >= indent.length - 1
        && isOrdered === /\d/.test(item[2]) && !RULE.test(line)) {
      isLoose ||= wasBlank;
      width = Math.min(item[0].length, item[1].length + item[2].length + 4);
      items.push([line.slice(item[0].length)]);
    } else if (isInner || !(wasBlank || endsParagraph(lines, end))) {
      items.at(-1).push(line.slice(Math.min(width, indentOf(line))));
    } else {
      break;
    }
  }
  return [end, () => make(...isOrdered ? ["ol", {start: parseInt(marker, 10)}] : ["ul", {}],
    ...items.map((item) => listItem(item, isLoose, depth)))];
}

function listItem(lines, isLoose, depth) {
  const [first, ...rest] = built(lines, depth);
  if (!first) return make("li");
  const isPlain = !isLoose && first.tagName === "P";
  return make("li", {}, ...(isPlain ? first.childNodes : [first]), ...rest);
}

const isTable = (lines, index) => lines[index].includes("|")
  && lines[index + 1]?.includes("|") && TABLE_RULE.test(lines[index + 1].trim());

function tableBlock(lines, start) {
  let end = start + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const cellsOf = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/)
    .map((cell) => cell.trim().replaceAll("\\|", "|"));
  const head = cellsOf(lines[start]);
  const alignments = cellsOf(lines[start + 1]).map((cell) => (
    cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  const row = (tag, cells) => make("tr", {}, ...cells.slice(0, head.length).map((cell, index) =>
    make(tag, {className: alignments[index] ?? ""}, ...inline(cell))));
  return [end, () => make("div", {className: "table", tabIndex: 0}, make("table", {},
    make("thead", {}, row("th", head)),
    make("tbody", {}, ...lines.slice(start + 2, end).map((line) => row("td", cellsOf(line))))))];
}

// Returns the nodes of a text with emphasis, code and links.
function inline(source, depth = 0) {
  if (depth > MAX_DEPTH) return [source];
  const nodes = [];
  let end = 0;
  for (const match of source.matchAll(INLINE)) {
    if (match.index > end) nodes.push(source.slice(end, match.index));
    nodes.push(inlineNode(match[0], match.groups, depth + 1));
    end = match.index + match[0].length;
  }
  if (end < source.length) nodes.push(source.slice(end));
  return nodes;
}

function inlineNode(source, groups, depth) {
  const {escaped, code, label, href, del} = groups, bare = groups.auto ?? groups.bare;
  const strong = groups.strong ?? groups.strong2, em = groups.em ?? groups.em2;
  if (escaped) return escaped;
  if (code !== undefined) return make("code", {}, codeText(code));
  if (href !== undefined) return link(href, inline(label || href, depth).map(withoutLink), source);
  if (bare) return link(bare, [bare], source);
  if (strong) return make("strong", {}, ...inline(strong, depth));
  if (em) return make("em", {}, ...inline(em, depth));
  if (del) return make("del", {}, ...inline(del, depth));
  return make("br");
}

// Returns code without the one blank that separates it from backticks in it.
const codeText = (code) =>
  (code.startsWith(" ") && code.endsWith(" ") && code.trim() ? code.slice(1, -1) : code);

const withoutLink = (node) =>
  (node.tagName === "A" || node.querySelector?.("a") ? node.textContent : node);

// Returns a link; `source` where its address is none that may be opened.
function link(href, children, source) {
  if (!/^(?:https?:\/\/|mailto:)/i.test(href) || !URL.canParse(href)) return source;
  return make("a", {href, target: "_blank", rel: "noopener noreferrer"}, ...children);
}

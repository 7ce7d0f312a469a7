// Build elements; strings only ever become text nodes, so records cannot inject markup.

const $ = (id) => document.getElementById(id);

/** Build an element: ``make("a", {href: "#x", class: "y"}, "text", otherElement)``. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false)
      element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

/** Build the letter of an outcome, hidden from screen readers, which read its name. */
function mark(word, glyph = page.glyphs.get(word)) {
  return make("span", { class: `sign o-${word}`, "aria-hidden": "true" }, glyph);
}

/** Build a link to a cell. */
const linkTo = (record, text = record.id) => make("a", { href: `#${encodeURIComponent(record.key)}` }, text);

/** Turn web addresses, and issues written as ``owner/name#1``, into links. */
function linkAddresses(text) {
  const found = /https:\/\/[^\s)'"<>]+[^\s)'"<>.,;:]|\b[\w.-]+\/[\w.-]+#\d+\b/g;
  const parts = [];
  let from = 0;
  for (const match of text.matchAll(found)) {
    const issue = match[0].match(/^([\w.-]+\/[\w.-]+)#(\d+)$/);
    const href = issue ? `https://github.com/${issue[1]}/issues/${issue[2]}` : match[0];
    parts.push(text.slice(from, match.index), make("a", { href, rel: "noreferrer" }, match[0]));
    from = match.index + match[0].length;
  }
  return [...parts, text.slice(from)];
}

/** Build a table of plain rows. */
function tableOf(head, body) {
  return make(
    "table",
    {},
    make(
      "thead",
      {},
      make(
        "tr",
        {},
        head.map((text) => make("th", { scope: "col" }, text)),
      ),
    ),
    make(
      "tbody",
      {},
      body.map((row) =>
        make(
          "tr",
          {},
          row.map((text, i) =>
            i ? make("td", { class: "number" }, String(text)) : make("th", { scope: "row" }, String(text)),
          ),
        ),
      ),
    ),
  );
}

/** Build a definition list; terms without a definition are left out. */
function terms(pairs) {
  return make(
    "dl",
    {},
    pairs
      .filter(([, value]) => value !== "" && value !== null && value !== undefined && value !== false)
      .map(([term, value]) => [make("dt", {}, term), make("dd", {}, value)])
      .flat(),
  );
}

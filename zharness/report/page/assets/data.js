// From the text inside the page to records, and what is shown of them.

/** The page's data: base64 of deflated JSON, see columns.py. */
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

/** Columns as an array of objects, one for each record. */
function rows({ size, texts, numbers, sparse }) {
  const found = Array.from({ length: size }, () => ({}));
  for (const [name, { values, at }] of Object.entries(texts))
    at.forEach((place, i) => (found[i][name] = values[place]));
  for (const [name, column] of Object.entries(numbers)) column.forEach((value, i) => (found[i][name] = value));
  for (const [name, some] of Object.entries(sparse)) {
    for (const [i, value] of Object.entries(some)) found[i][name] = value;
  }
  return found;
}

/** Records with what the page needs beside: a group, an address of their own, the words that a filter looks through. */
function prepared(table) {
  const seen = new Map();
  return rows(table).map((record) => {
    const times = (seen.get(record.id) ?? 0) + 1;
    seen.set(record.id, times);
    record.key = times === 1 ? record.id : `${record.id}~${times}`;
    record.group = record.check.split(".")[0];
    record.column = [record.engine, record.version, record.dtype, record.world_size, record.stage].join("|");
    record.spelled = record.variant ? `${record.model}, ${record.variant}` : record.model;
    return record;
  });
}

/** What a filter looks through, made when it is first asked for. */
function haystack(record) {
  record.words ??= [
    record.id,
    record.version,
    record.outcome,
    record.cause,
    record.excuse,
    record.modules,
    page.laws[record.check],
  ]
    .join("\n")
    .toLowerCase();
  return record.words;
}

/** A number as JSON holds it, or as the text that stands for one that JSON lacks. */
function number(value) {
  return value === "inf"
    ? Infinity
    : value === "-inf"
      ? -Infinity
      : value === null || value === undefined
        ? NaN
        : Number(value);
}

/** Three digits, and a sign for what has no end. */
function short(value) {
  const found = number(value);
  if (found === Infinity) return "∞";
  if (Number.isNaN(found)) return value === "nan" ? "NaN" : "";
  if (found === 0) return "0";
  const extreme = Math.abs(found) >= 1e5 || Math.abs(found) < 1e-3;
  return extreme ? found.toExponential(1).replace(".0e", "e").replace("e+", "e") : String(Number(found.toPrecision(3)));
}

/** Nine digits, which tell any two float32 apart. */
const long = (value) => (Number.isFinite(number(value)) ? String(Number(number(value).toPrecision(9))) : short(value));

const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
const stageOf = (record) => `stage ${record.stage}, ${plural(record.world_size, "rank")}, ${record.dtype}`;

// What there is (page), what is shown of it (view), and which square of the matrix has the focus.
const page = {};
const view = { records: [], folded: new Set(), off: new Set(), chosen: null, at: [0, 0] };

const gravity = (word) => page.order.get(word);
const gravest = (words) => {
  const told = words.filter((word) => word !== "unsupported");
  return (told.length ? told : words).reduce((a, b) => (gravity(a) <= gravity(b) ? a : b));
};

/** The sign of several cells: the gravest's; ":" where some hold and the engine does not claim the rest. */
function sign(words) {
  const word = gravest(words);
  return word === "pass" && words.includes("unsupported") ? ":" : page.glyphs.get(word);
}

/** ``2 fail, 3 pass``, the gravest first. */
function counted(records) {
  const counts = d3.rollup(
    records,
    (some) => some.length,
    (record) => record.outcome,
  );
  return [...counts]
    .sort(([a], [b]) => gravity(a) - gravity(b))
    .map(([word, count]) => `${count} ${word}`)
    .join(", ");
}

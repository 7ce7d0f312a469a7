// Decode the page's data, and format numbers and outcomes.

/** Decode the page's data: base64 of deflated JSON, see columns.py. */
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

/** Convert columns to an array of objects, one for each record. */
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

/** Add the fields that the page needs to each record: group, unique key, column, and the label of its model. */
function prepareRecords(table) {
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

/** Return the text that the filter searches, built on first use. */
function haystack(record) {
  record.words ??= [
    record.id,
    record.version,
    record.outcome,
    record.cause,
    record.pool_difference,
    record.excuse,
    record.modules,
    page.laws[record.check],
  ]
    .join("\n")
    .toLowerCase();
  return record.words;
}

/** Parse a number that JSON holds as a number or as text, such as "inf"; NaN without a number. */
function number(value) {
  return value === "inf"
    ? Infinity
    : value === "-inf"
      ? -Infinity
      : value === null || value === undefined
        ? NaN
        : Number(value);
}

/** Format a number with three digits, infinity as a symbol, and a missing number as an empty string. */
function short(value) {
  const found = number(value);
  if (found === Infinity) return "∞";
  if (Number.isNaN(found)) return value === "nan" ? "NaN" : "";
  if (found === 0) return "0";
  const extreme = Math.abs(found) >= 1e5 || Math.abs(found) < 1e-3;
  return extreme ? found.toExponential(1).replace(".0e", "e").replace("e+", "e") : String(Number(found.toPrecision(3)));
}

/** Format a number with nine digits, which distinguish any two float32 values. */
const long = (value) => (Number.isFinite(number(value)) ? String(Number(number(value).toPrecision(9))) : short(value));

const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
const stageOf = (record) => `stage ${record.stage}, ${plural(record.world_size, "rank")}, ${record.dtype}`;

// The data (page), the records shown (view), and the square of the matrix that has the focus.
const page = {};
const view = { records: [], folded: new Set(), off: new Set(), chosen: null, at: [0, 0] };

const seriousness = (word) => page.order.get(word);
const mostSerious = (outcomes) => {
  const run = outcomes.filter((outcome) => outcome !== "unsupported");
  return (run.length ? run : outcomes).reduce((a, b) => (seriousness(a) <= seriousness(b) ? a : b));
};

/** Return the most serious outcome of several cells; ":" if some pass and the others are unsupported. */
function sign(outcomes) {
  const outcome = mostSerious(outcomes);
  return outcome === "pass" && outcomes.includes("unsupported") ? ":" : page.glyphs.get(outcome);
}

/** Count outcomes, as in ``2 fail, 3 pass``, the most serious first. */
function describeCounts(records) {
  const counts = d3.rollup(
    records,
    (some) => some.length,
    (record) => record.outcome,
  );
  return [...counts]
    .sort(([a], [b]) => seriousness(a) - seriousness(b))
    .map(([word, count]) => `${count} ${word}`)
    .join(", ");
}

// Long lists of cells, and what changed between two runs.

const AT_ONCE = 100;
const list = { records: [], drawn: 0 };

/** The sign and word of an outcome. */
const verdict = (record) => [mark(record.outcome), " ", record.outcome];

/** One cell as a row. */
function listRow(record) {
  return make(
    "tr",
    { class: view.chosen === record ? "chosen" : null },
    make("td", { class: "nowrap" }, verdict(record)),
    make("th", { scope: "row" }, linkTo(record, record.check)),
    make("td", {}, `${nameOf(record)} ${record.version}, ${stageOf(record)}`),
    make("td", {}, record.spelled),
    make("td", { class: "number" }, short(record.ratio)),
    make("td", { class: "cause" }, firstWords(record.stale || record.cause || record.excuse)),
  );
}

/** The begin of a long cause. */
const firstWords = (text, most = 220) => (text.length > most ? `${text.slice(0, most)} …` : text);

/** The first cells of what is shown; the others come as one scrolls. */
function drawList() {
  list.records = d3.sort(view.records, (record) => gravity(record.outcome));
  list.drawn = 0;
  $("cells").tBodies[0].replaceChildren();
  drawMore();
}

/** Some more rows. */
function drawMore() {
  const next = list.records.slice(list.drawn, list.drawn + AT_ONCE);
  $("cells").tBodies[0].append(...next.map(listRow));
  list.drawn += next.length;
  const left = list.records.length - list.drawn;
  $("more").hidden = left === 0;
  $("more").textContent = `Show more: ${plural(left, "cell")} left`;
}

const OPEN = ["newly broken", "new failure", "fails otherwise"]; // whatever their number; the others while they are few

/** What changed between two runs: each way to change its own part, which folds. */
function drawComparison() {
  const found = page.comparison;
  if (!found) return;
  const before = prepared(found.before);
  $("comparison").hidden = false;
  $("comparison-words").textContent = found.words;
  for (const [turn, count] of found.turns) {
    const some = found.rows.filter(([word]) => word === turn);
    const part = make(
      "details",
      { open: count <= 25 || OPEN.includes(turn) },
      make("summary", {}, make("h3", {}, `${turn} `, make("span", { class: "count" }, count.toLocaleString("en")))),
    );
    const draw = () => part.childElementCount > 1 || part.append(changes(some, before));
    part.open ? draw() : part.addEventListener("toggle", draw);
    $("comparison-rows").append(part);
  }
}

/** One cell that changed: its outcome then and now. */
function changedRow([, now, then], before) {
  const side = (record) =>
    record ? [mark(record.outcome), ` ${record.outcome} `, make("small", {}, record.version)] : "–";
  const [after, earlier] = [page.records[now], before[then]];
  return make(
    "tr",
    {},
    make("th", { scope: "row" }, after ? linkTo(after) : earlier.id),
    make("td", { class: "nowrap" }, side(earlier)),
    make("td", { class: "nowrap" }, side(after)),
    make("td", { class: "cause" }, firstWords(after?.stale || after?.cause || earlier?.cause || "")),
  );
}

/** A table of cells that changed alike, the first of them, and a button for the others. */
function changes(some, before) {
  const body = make("tbody");
  const more = make("button", { type: "button", click: () => draw() });
  let drawn = 0;
  const draw = () => {
    body.append(...some.slice(drawn, (drawn += AT_ONCE)).map((row) => changedRow(row, before)));
    more.hidden = drawn >= some.length;
    more.textContent = `Show more: ${plural(some.length - drawn, "cell")} left`;
  };
  draw();
  return make(
    "div",
    { class: "scroll" },
    make(
      "table",
      {},
      make(
        "thead",
        {},
        make(
          "tr",
          {},
          ["Cell", "Before", "Now", "Cause"].map((text) => make("th", { scope: "col" }, text)),
        ),
      ),
      body,
    ),
    more,
  );
}

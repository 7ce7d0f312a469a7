// Long lists of cells, and the comparison of two runs.

const AT_ONCE = 100;
const list = { records: [], drawn: 0 };

/** Render the letter and name of an outcome. */
const verdict = (record) => [mark(record.outcome), " ", record.outcome];

/** Render one cell as a row. */
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

/** Shorten a long cause. */
const firstWords = (text, most = 220) => (text.length > most ? `${text.slice(0, most)} …` : text);

/** Draw the first rows; more are added while scrolling. */
function drawList() {
  list.records = d3.sort(view.records, (record) => seriousness(record.outcome));
  list.drawn = 0;
  $("cells").tBodies[0].replaceChildren();
  drawMore();
}

/** Add more rows. */
function drawMore() {
  const next = list.records.slice(list.drawn, list.drawn + AT_ONCE);
  $("cells").tBodies[0].append(...next.map(listRow));
  list.drawn += next.length;
  const left = list.records.length - list.drawn;
  $("more").hidden = left === 0;
  $("more").textContent = `Show more: ${plural(left, "cell")} left`;
}

const OPEN = ["newly broken", "new failure", "fails differently"]; // always open; other kinds only if they have few cells

/** Render the comparison of two runs: a folding section for each kind of difference. */
function drawComparison() {
  const found = page.comparison;
  if (!found) return;
  const before = prepareRecords(found.before);
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

/** Render one difference: the outcome in the earlier and in the later run. */
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

/** Render the first differences of one kind, and a button for more. */
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

// The matrix: laws by group, engines by dtype, ranks and stage.

const MANY_SQUARES = 4000; // in a larger matrix, groups without unexpected outcomes start folded

/** Return the columns of some records, in the order of the file, with stages ascending. */
function columnsOf(records) {
  const found = [...new Map(records.map((record) => [record.column, record])).values()];
  const first = new Map();
  found.forEach((record) => first.set(headOf(record), first.get(headOf(record)) ?? first.size));
  return found.sort(
    (a, b) => first.get(headOf(a)) - first.get(headOf(b)) || a.world_size - b.world_size || a.stage - b.stage,
  );
}

const nameOf = (record) => record.engine.split(":").at(-1); // the factory's name of package.module:factory
const engineOf = (record) => `${record.engine} ${record.version}`;
const headOf = (record) => `${engineOf(record)}|${record.dtype}`;

/** Group neighbours with equal keys. */
function runs(items, name) {
  const found = [];
  for (const item of items) {
    if (found.length && found.at(-1).name === name(item)) found.at(-1).items.push(item);
    else found.push({ name: name(item), items: [item] });
  }
  return found;
}

/** Build the three header rows: engine, dtype and ranks, stage. */
function drawHead(columns) {
  const engines = runs(columns, engineOf);
  const ranks = runs(columns, (record) => `${engineOf(record)}|${record.dtype}|${record.world_size}`);
  const head = (run, ...text) => make("th", { scope: "colgroup", colspan: run.items.length, class: "edge" }, ...text);
  const starts = new Set(ranks.map((run) => run.items[0]));
  page.edges = new Set(starts);
  $("matrix").tHead.replaceChildren(
    make(
      "tr",
      {},
      make("th", { scope: "col", class: "law" }, "Engine"),
      engines.map((run) =>
        head(
          run,
          make("span", { title: run.items[0].engine }, nameOf(run.items[0])),
          make("small", {}, run.items[0].version),
        ),
      ),
    ),
    make(
      "tr",
      {},
      make("th", { scope: "col", class: "law" }, "Dtype × ranks"),
      ranks.map((run) => head(run, `${run.items[0].dtype} ×${run.items[0].world_size}`)),
    ),
    make(
      "tr",
      {},
      make("th", { scope: "col", class: "law" }, "Law, by stage"),
      columns.map((record) =>
        make(
          "th",
          { scope: "col", class: starts.has(record) ? "edge" : null, title: engineOf(record) + ", " + stageOf(record) },
          make(
            "span",
            { class: "unseen" },
            `${engineOf(record)}, ${record.dtype}, ${plural(record.world_size, "rank")}, stage `,
          ),
          String(record.stage),
        ),
      ),
    ),
  );
}

/** Build one square, with the letter of its most serious outcome. */
function square(records, column, what) {
  const edge = page.edges.has(column) ? " edge" : "";
  if (!records) return make("td", { class: `none${edge}`, tabindex: "-1", "aria-label": `${what}: no cell` });
  const outcomes = records.map((record) => record.outcome);
  const label = `${what}, ${engineOf(column)}, ${stageOf(column)}: ${describeCounts(records)}`;
  const outcome = mostSerious(outcomes);
  const part = outcomes.some((each) => each !== outcome && each !== "unsupported") ? " part" : "";
  return make(
    "td",
    { class: `square o-${outcome}${edge}${part}`, tabindex: "-1", "aria-label": label, title: label },
    sign(outcomes),
  );
}

/** Build the row of a group, and the rows of its laws if it is unfolded. */
function groupRows(group, records, columns) {
  const byLaw = d3.group(records, (record) => record.check);
  const folded = view.folded.has(group);
  const byColumn = d3.group(records, (record) => record.column);
  const head = make(
    "th",
    { scope: "row", class: "law", tabindex: "-1", "aria-expanded": String(!folded), title: describeCounts(records) },
    make("span", { class: "fold", "aria-hidden": "true" }, folded ? "▸" : "▾"),
    ` ${group} `,
    make("small", {}, plural(byLaw.size, "law")),
  );
  const rows = [
    make(
      "tr",
      { class: "group", "data-group": group },
      head,
      columns.map((column) => square(byColumn.get(column.column), column, group)),
    ),
  ];
  for (const [check, some] of folded ? [] : byLaw) {
    const cells = d3.group(some, (record) => record.column);
    rows.push(
      make(
        "tr",
        { "data-check": check },
        make(
          "th",
          { scope: "row", class: "law", tabindex: "-1", title: page.laws[check] ?? "" },
          check.slice(group.length + 1),
        ),
        columns.map((column) => square(cells.get(column.column), column, check)),
      ),
    );
  }
  return rows;
}

/** Draw the matrix of the shown records. */
function drawMatrix() {
  const columns = (page.columns = columnsOf(view.records));
  drawHead(columns);
  const groups = d3.group(view.records, (record) => record.group);
  $("matrix").tBodies[0].replaceChildren(
    ...[...groups].flatMap(([group, records]) => groupRows(group, records, columns)),
  );
  point(view.at, false);
}

/** Fold groups without unexpected outcomes if the matrix is large. */
function foldAtFirst() {
  const laws = new Set(page.records.map((record) => record.check)).size;
  if (laws * columnsOf(page.records).length <= MANY_SQUARES) return;
  for (const [group, records] of d3.group(page.records, (record) => record.group)) {
    if (records.every((record) => record.expected)) view.folded.add(group);
  }
}

/** Fold or unfold one group, and keep the focus. */
function fold(group) {
  if (!view.folded.delete(group)) view.folded.add(group);
  drawMatrix();
  point([[...gridRows()].findIndex((row) => row.dataset.group === group), 0], true);
}

/** Fold or unfold all groups. */
function foldAll(folded) {
  view.folded = new Set(folded ? page.records.map((record) => record.group) : []);
  view.at = [0, 0];
  drawMatrix();
}

/** Handle a click on a square, a law or a group. */
function matrixClick(event) {
  const place = event.target.closest("td, th");
  const row = place?.closest("tbody tr");
  if (!row) return;
  point(placeOf(place), true);
  const { group, check } = row.dataset;
  if (group && place.cellIndex === 0) return fold(group);
  const column = place.cellIndex ? page.columns[place.cellIndex - 1] : null;
  const chosen = view.records.filter(
    (record) =>
      (group ? record.group === group : record.check === check) && (!column || record.column === column.column),
  );
  if (chosen.length) openSquare(chosen, group ?? check, column);
}

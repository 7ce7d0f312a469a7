// The matrix: laws by group, engines by dtype, ranks and stage.

const MANY_SQUARES = 4000; // above it, groups in which all is as expected begin folded

/** The columns of some records, in the order of the file, stages ascending. */
function columnsOf(records) {
  const found = [...new Map(records.map((record) => [record.column, record])).values()];
  const first = new Map();
  found.forEach((record) => first.set(headOf(record), first.get(headOf(record)) ?? first.size));
  return found.sort(
    (a, b) => first.get(headOf(a)) - first.get(headOf(b)) || a.world_size - b.world_size || a.stage - b.stage,
  );
}

const nameOf = (record) => record.engine.split(":").at(-1); // of package.module:factory the factory
const engineOf = (record) => `${record.engine} ${record.version}`;
const headOf = (record) => `${engineOf(record)}|${record.dtype}`;

/** Neighbours that are alike, with how many they are. */
function runs(items, name) {
  const found = [];
  for (const item of items) {
    if (found.length && found.at(-1).name === name(item)) found.at(-1).items.push(item);
    else found.push({ name: name(item), items: [item] });
  }
  return found;
}

/** The three rows above the matrix: engine, dtype and ranks, stage. */
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

/** One square: the sign of all its cells. */
function square(records, column, what) {
  const edge = page.edges.has(column) ? " edge" : "";
  if (!records) return make("td", { class: `none${edge}`, tabindex: "-1", "aria-label": `${what}: no cell` });
  const words = records.map((record) => record.outcome);
  const label = `${what}, ${engineOf(column)}, ${stageOf(column)}: ${counted(records)}`;
  const word = gravest(words);
  const part = words.some((each) => each !== word && each !== "unsupported") ? " part" : "";
  return make(
    "td",
    { class: `square o-${word}${edge}${part}`, tabindex: "-1", "aria-label": label, title: label },
    sign(words),
  );
}

/** The row of a group, which folds, and where it is open those of its laws. */
function groupRows(group, records, columns) {
  const byLaw = d3.group(records, (record) => record.check);
  const folded = view.folded.has(group);
  const byColumn = d3.group(records, (record) => record.column);
  const head = make(
    "th",
    { scope: "row", class: "law", tabindex: "-1", "aria-expanded": String(!folded), title: counted(records) },
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

/** The matrix of the records that are shown. */
function drawMatrix() {
  const columns = (page.columns = columnsOf(view.records));
  drawHead(columns);
  const groups = d3.group(view.records, (record) => record.group);
  $("matrix").tBodies[0].replaceChildren(
    ...[...groups].flatMap(([group, records]) => groupRows(group, records, columns)),
  );
  point(view.at, false);
}

/** Fold what is as expected where the whole would be too much to look at. */
function foldAtFirst() {
  const laws = new Set(page.records.map((record) => record.check)).size;
  if (laws * columnsOf(page.records).length <= MANY_SQUARES) return;
  for (const [group, records] of d3.group(page.records, (record) => record.group)) {
    if (records.every((record) => record.expected)) view.folded.add(group);
  }
}

/** Fold or unfold one group, the focus where it was. */
function fold(group) {
  if (!view.folded.delete(group)) view.folded.add(group);
  drawMatrix();
  point([[...gridRows()].findIndex((row) => row.dataset.group === group), 0], true);
}

/** Fold all groups, or none. */
function foldAll(folded) {
  view.folded = new Set(folded ? page.records.map((record) => record.group) : []);
  view.at = [0, 0];
  drawMatrix();
}

/** What a click on a square, a law or a group does. */
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

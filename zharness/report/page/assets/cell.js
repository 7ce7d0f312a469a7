// The pane beside the matrix: the chosen cell, or the cells of the chosen square.

const TIERS = {
  X: "exact: every sum is exact in this dtype, so the numbers have to be equal bit for bit",
  S: "staged: each part of the step against plain PyTorch, within the rounding that the part may have",
  C: "calibrated: the engine's kernels differ from plain PyTorch's, so errors are compared with those of plain runs",
};

/** Fill the pane beside the matrix and scroll it into view. */
function show(title, ...children) {
  const heading = make("h2", { id: "cell-heading", tabindex: "-1" }, title);
  $("cell").replaceChildren(
    make("button", { type: "button", class: "close", click: closeCell }, "Close ", make("kbd", {}, "Esc")),
    heading,
    ...children.filter(Boolean),
  );
  $("cell").hidden = false;
  $("cell").scrollTop = 0;
  heading.focus({ preventScroll: false });
}

/** Show the cells of one square, law or group; a single cell is opened at once. */
function openSquare(records, what, column) {
  if (records.length === 1) return go(records[0]);
  const some = d3.sort(records, (record) => seriousness(record.outcome));
  const law = page.laws[what];
  const shown = make("ul", { class: "links" });
  const add = (from) => {
    shown.append(
      ...some
        .slice(from, from + AT_ONCE)
        .map((record) =>
          make("li", {}, mark(record.outcome), " ", linkTo(record), make("small", {}, ` ${record.outcome}`)),
        ),
    );
    if (from + AT_ONCE < some.length) {
      shown.append(
        make(
          "li",
          {},
          make(
            "button",
            { type: "button", click: (event) => (event.target.parentElement.remove(), add(from + AT_ONCE)) },
            `${some.length - from - AT_ONCE} more`,
          ),
        ),
      );
    }
  };
  add(0);
  show(
    what,
    make("p", { class: "where" }, column ? `${engineOf(column)}, ${stageOf(column)}` : "everywhere"),
    law ? make("p", { class: "says" }, law) : null,
    make("p", {}, describeCounts(records)),
    shown,
  );
}

/** Choose a cell by writing it into the address; the change of address opens it. */
function go(record) {
  const hash = `#${encodeURIComponent(record.key)}`;
  if (location.hash === hash) openCell(record);
  else location.hash = hash;
}

/** Render the tier of the comparisons and the errors that they would find. */
function judgement(record) {
  if (!record.tier) return null;
  const ratio = number(record.ratio);
  return make(
    "section",
    {},
    make("h3", {}, "What was compared"),
    terms([
      ["judged", `${record.tier}, ${TIERS[record.tier] ?? ""}`],
      [
        "error / bound",
        [
          make("strong", {}, short(record.ratio)),
          " ",
          Number.isNaN(ratio)
            ? ""
            : ratio > 1
              ? "outside the bound"
              : ratio === 0
                ? "no difference at all"
                : "within the bound",
        ],
      ],
      [
        "would have caught",
        [
          record.smallest === null
            ? ""
            : number(record.smallest) === Infinity
              ? "no number here can be scaled"
              : `a scale error of ${short(record.smallest)}`,
          record.wrong_elements ? `, ${plural(record.wrong_elements, "lost element")}` : "",
        ].join(""),
      ],
      [
        "elements",
        record.elements
          ? `${record.elements.toLocaleString("en")}, of which ${record.undetermined ?? 0} undetermined (smaller than their bound)`
          : "",
      ],
      ["notes", record.notes],
    ]),
  );
}

/** Render the cause of the outcome, and the issue or documentation behind it. */
function renderCause(record) {
  const cause = record.stale || record.pool_difference || record.cause;
  const meaning = page.outcomes.find(([word]) => word === record.outcome)[2];
  return make(
    "section",
    {},
    make("h3", {}, "What happened"),
    make("p", { class: "outcome" }, mark(record.outcome), " ", make("strong", {}, record.outcome), `: ${meaning}`),
    cause ? make("p", { class: "words" }, linkAddresses(cause)) : null,
    terms([
      ["expected failure", record.excuse && linkAddresses(record.excuse)],
      ["documented", record.documented && linkAddresses(record.documented)],
      ["modules", record.modules],
      [
        "withheld claim",
        record.withheld && `the engine does not claim ${record.withheld}, but the law holds with it`,
      ],
    ]),
    record.details
      ? make("details", {}, make("summary", {}, "Reports of all ranks"), make("pre", { tabindex: "0" }, record.details))
      : null,
  );
}

/** Render the command that runs the cell again, with a button that copies it. */
function again(record) {
  const status = make("span", { role: "status", "aria-live": "polite" });
  const command = make("code", {}, record.command);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(record.command);
      status.textContent = " copied";
    } catch {
      getSelection().selectAllChildren(command); // some browsers keep local files from the clipboard
      status.textContent = " selected: copy it with Ctrl+C";
    }
  };
  return make(
    "section",
    {},
    make("h3", {}, "Run this cell again"),
    make(
      "div",
      { class: "command" },
      make("pre", { tabindex: "0" }, command),
      make("button", { type: "button", class: "copy", click: copy }, "Copy"),
    ),
    status,
  );
}

/** Show one cell. */
function openCell(record) {
  view.chosen = record;
  const law = page.laws[record.check];
  show(
    record.check,
    make("p", { class: "where" }, `${engineOf(record)}, ${stageOf(record)}, ${record.spelled}`),
    make("p", { class: "id" }, make("code", {}, record.id)),
    make(
      "section",
      {},
      make("h3", {}, "The law"),
      make("p", { class: "says" }, law ?? "this release does not know it"),
    ),
    renderCause(record),
    strip(record.evidence?.part ?? record.divergence?.part),
    divergenceOf(record),
    evidenceOf(record),
    judgement(record),
    again(record),
    make(
      "p",
      { class: "small" },
      `torch ${record.torch}, seed ${record.command.match(/--seed (\d+)$/)?.[1] ?? 0}, ${record.seconds.toFixed(2)} s`,
    ),
  );
  $("matrix").querySelector(".chosen")?.classList.remove("chosen");
  squareOf(record)?.classList.add("chosen");
}

/** Find the square of a cell; undefined if it is folded or filtered out. */
function squareOf(record) {
  const row = [...gridRows()].find((each) => each.dataset.check === record.check);
  const at = page.columns.findIndex((column) => column.column === record.column);
  return row && at >= 0 ? row.cells[at + 1] : null;
}

/** Close the pane and move the focus back to the square. */
function closeCell() {
  const back = view.chosen && squareOf(view.chosen);
  $("cell").hidden = true;
  view.chosen = null;
  $("matrix").querySelector(".chosen")?.classList.remove("chosen");
  if (location.hash) history.pushState(null, "", location.pathname + location.search);
  if (back) point(placeOf(back), true);
  else point(view.at, true);
}

/** Decode the key in the address; an invalid escape such as "#%" is used unchanged. */
function readAddressKey() {
  const text = location.hash.slice(1);
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Open the cell that the address names. */
function followAddress() {
  const key = readAddressKey();
  const record = page.byKey.get(key);
  if (record) openCell(record);
  else if (key) show("No such cell", make("p", {}, "This page has no cell ", make("code", {}, key), "."));
  else if (!$("cell").hidden) closeCell();
}

// Keyboard control of the matrix: one square has the focus, arrows move it (the ARIA grid pattern).

const MOVES = {
  ArrowUp: ([row, column]) => [row - 1, column],
  ArrowDown: ([row, column]) => [row + 1, column],
  ArrowLeft: ([row, column]) => [row, column - 1],
  ArrowRight: ([row, column]) => [row, column + 1],
  PageUp: ([row, column]) => [row - 10, column],
  PageDown: ([row, column]) => [row + 10, column],
  Home: ([row]) => [row, 0],
  End: ([row]) => [row, Infinity],
};

const gridRows = () => $("matrix").tBodies[0].rows;

/** Make Tab reach the square at ``[row, column]`` or the nearest one; with ``focus``, also focus it. */
function point([row, column], focus) {
  const all = gridRows();
  if (!all.length) return;
  const y = Math.max(0, Math.min(row, all.length - 1));
  const x = Math.max(0, Math.min(column, all[y].cells.length - 1));
  $("matrix").querySelector('tbody [tabindex="0"]')?.setAttribute("tabindex", "-1");
  view.at = [y, x];
  all[y].cells[x].setAttribute("tabindex", "0");
  if (focus) all[y].cells[x].focus();
}

/** Return row and column of a square. */
const placeOf = (square) => [[...gridRows()].indexOf(square.parentElement), square.cellIndex];

/** Handle a key in the matrix. */
function gridKey(event) {
  const square = event.target.closest("td, th");
  if (!square || event.altKey || event.metaKey) return;
  if (event.key === "Enter" || event.key === " ") square.click();
  else if (event.ctrlKey && event.key === "Home") point([0, 0], true);
  else if (event.ctrlKey && event.key === "End") point([Infinity, Infinity], true);
  else if (MOVES[event.key] && !event.ctrlKey) point(MOVES[event.key](view.at), true);
  else return;
  event.preventDefault();
}

/** Handle a key anywhere: / focuses the filter; Escape leaves the filter, or closes the pane. */
function pageKey(event) {
  const typing = event.target.matches("input, select, textarea");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    $("text").focus();
  } else if (event.key === "Escape" && event.target === $("text")) {
    if ($("text").value) $("text").value = "";
    else $("text").blur();
    update();
  } else if (event.key === "Escape" && !$("cell").hidden) closeCell();
}

// The charts of a cell, drawn by Observable Plot; each has a table of its numbers beside it.

const WIDTH = 560;
const ENGINE = "var(--engine)";
const BASELINE = "var(--baseline)";

/** Render a chart with a heading, a description for screen readers, and a table of its numbers. */
function figure(title, words, options, numbers, notes = "") {
  const chart = Plot.plot({ className: "chart", width: WIDTH, ...options });
  for (const part of chart.querySelectorAll("[aria-label]")) part.removeAttribute("aria-label"); // "rect", "dot": no news
  chart.setAttribute("role", "img");
  chart.setAttribute("aria-label", `${title}: ${words}`);
  const table = make("details", { class: "numbers" }, make("summary", {}, "The numbers"));
  table.addEventListener(
    "toggle",
    () => table.childElementCount > 1 || table.append(make("div", { class: "scroll" }, numbers())),
  );
  return make("figure", {}, make("figcaption", {}, make("h4", {}, title), make("p", {}, words), notes), chart, table);
}

/** Draw how far the engine and the baseline are from the float64 oracle. */
function ulpChart({ edges: all, engine, baseline }) {
  const last = (counts) => counts.reduce((found, count, i) => (count ? i : found), 0);
  const edges = all.slice(0, Math.max(4, last(engine), last(baseline)) + 1);
  const bars = edges.flatMap((edge, i) => [
    { edge, who: "engine", count: engine[i] ?? 0 },
    { edge, who: "baseline", count: baseline[i] ?? 0 },
  ]);
  const brief = (edge) => {
    const most = Number(edge.split("-")[1]);
    return Number.isNaN(most) ? edge : most < 1000 ? `≤${most}` : `≤2^${Math.log2(most)}`;
  };
  const plain = baseline.length ? `plain PyTorch ${all[last(baseline)]}` : "of plain PyTorch there are no numbers here";
  return figure(
    "Distance from the float64 oracle",
    `elements by units in the last place (ULP); the engine reaches ${all[last(engine)]}, ${plain}`,
    {
      height: 190,
      marginLeft: 48,
      marginBottom: 44,
      axis: null,
      fx: { domain: edges, padding: 0.15 },
      x: { domain: ["engine", "baseline"], padding: 0.05 },
      y: { type: "sqrt", label: "elements, by square root", grid: true },
      marks: [
        Plot.axisY({ label: "elements (square root)", ticks: 4 }),
        Plot.gridY({ ticks: 4 }),
        Plot.axisFx({ anchor: "bottom", label: null, tickFormat: brief, tickRotate: edges.length > 12 ? -45 : 0 }),
        Plot.barY(bars, {
          fx: "edge",
          x: "who",
          y: "count",
          fill: (bar) => (bar.who === "engine" ? ENGINE : BASELINE),
          stroke: "currentColor",
          strokeWidth: (bar) => (bar.count ? 0.7 : 0),
        }),
        Plot.ruleY([0]),
      ],
    },
    () =>
      tableOf(
        ["ULP", "engine", "baseline"],
        edges.map((edge, i) => [edge, engine[i] ?? 0, baseline[i] ?? 0]),
      ),
    legend(baseline.length > 0),
  );
}

/** Render the legend of the colours. */
const legend = (both = true) =>
  make(
    "p",
    { class: "legend" },
    make("span", { class: "swatch engine" }),
    "engine ",
    both ? [make("span", { class: "swatch baseline" }), "baseline (plain PyTorch)"] : "",
  );

const SCALE_TOP = 1e6; // ratios above this are drawn with the same colour

/** Map a ratio to 0..1: up to 1/2 is within the bound, above it wrong. */
function heat(value) {
  const found = number(value);
  if (!Number.isFinite(found)) return 1;
  return found <= 1 ? found * 0.35 : 0.5 + 0.5 * Math.min(1, Math.log10(found) / Math.log10(SCALE_TOP));
}

/** Return the edges of shards as lines over the matrix; an edge inside a row makes a step. */
function stairs(shards, rows, columns) {
  const starts = [...new Set(shards.map((shard) => shard.start))].filter(
    (start) => start > 0 && start < rows * columns,
  );
  return starts.flatMap((start, i) => {
    const [y, x] = [Math.floor(start / columns), start % columns];
    const line =
      rows === 1
        ? [
            [x, 0],
            [x, 1],
          ]
        : x
          ? [
              [columns, y],
              [x, y],
              [x, y + 1],
              [0, y + 1],
            ]
          : [
              [columns, y],
              [0, y],
            ];
    return line.map(([px, py]) => ({ x: px, y: py, z: i }));
  });
}

/** Place the label of each shard's rank in the middle of its range. */
function rankLabels(shards, rows, columns) {
  return shards
    .filter((shard) => shard.stop > shard.start)
    .map((shard) => {
      const middle = (shard.start + shard.stop - 1) / 2;
      return rows === 1
        ? { x: middle + 0.5, y: 0, text: `rank ${shard.rank}` }
        : { x: columns, y: Math.floor(middle / columns) + 0.5, text: `rank ${shard.rank}` };
    });
}

/** Draw the error over the parameter, block by block, with the ranks that own it. */
function heatChart({ values, block, rows, columns }, shards, shape) {
  const blocks = values.flatMap((row, y) =>
    row.map((value, x) => ({
      value,
      y1: y * block[0],
      y2: Math.min(rows, (y + 1) * block[0]),
      x1: x * block[1],
      x2: Math.min(columns, (x + 1) * block[1]),
    })),
  );
  const wrong = blocks.filter((each) => !(number(each.value) <= 1));
  const owners = shards ?? [];
  const height = rows === 1 ? 92 : Math.max(110, Math.min(280, (values.length / values[0].length) * 460)) + 46;
  const size =
    rows === 1
      ? plural(block[1], "element")
      : block[0] * block[1] === 1
        ? "1 element"
        : `${block[0]} by ${block[1]} elements`;
  const owned =
    owners.length > 8
      ? `${owners.length} shards`
      : owners.map((shard) => `rank ${shard.rank} owns ${shard.start} to ${shard.stop - 1}`).join(", ");
  const found = `${plural(wrong.length, "block")} of ${blocks.length} outside the bound (marked ×), ${size} each`;
  const words = `${found}, of ${shape.join(" × ") || "a scalar"}; ${owned || "every rank holds it whole"}`;
  const marks = [
    Plot.rect(blocks, {
      x1: "x1",
      x2: "x2",
      y1: "y1",
      y2: "y2",
      fill: (each) => d3.interpolateYlOrBr(heat(each.value)),
      inset: 0.25,
      title: (each) =>
        `rows ${each.y1}–${each.y2 - 1}, columns ${each.x1}–${each.x2 - 1}: ${short(each.value)} of the bound`,
    }),
    Plot.text(wrong, {
      x: (each) => (each.x1 + each.x2) / 2,
      y: (each) => (each.y1 + each.y2) / 2,
      text: () => "×",
      fill: (each) => (heat(each.value) > 0.65 ? "white" : "black"),
      fontSize: 9,
    }),
    Plot.line(stairs(owners, rows, columns), { x: "x", y: "y", z: "z", stroke: "white", strokeWidth: 5 }),
    Plot.line(stairs(owners, rows, columns), { x: "x", y: "y", z: "z", stroke: "var(--shard)", strokeWidth: 3 }),
    Plot.text(
      rankLabels(owners, rows, columns),
      rows === 1
        ? { x: "x", y: "y", text: "text", dy: -9 }
        : { x: "x", y: "y", text: "text", dx: 6, textAnchor: "start" },
    ),
    Plot.frame({ stroke: "currentColor" }),
  ];
  return figure(
    "Error over the parameter",
    words,
    {
      height,
      marginLeft: 52,
      marginRight: owners.length && rows > 1 ? 56 : 16,
      marginTop: rows === 1 ? 24 : 8,
      marginBottom: 36,
      x: {
        domain: [0, columns],
        ticks: Math.min(columns, 6),
        tickFormat: "d",
        label: rows === 1 ? "element" : "column",
        labelAnchor: "center",
        labelArrow: "none",
      },
      y: {
        domain: [rows, 0],
        label: rows === 1 ? null : "row",
        labelAnchor: "center",
        labelArrow: "none",
        ticks: rows === 1 ? [] : Math.min(rows, 6),
        tickFormat: "d",
      },
      marks,
    },
    () =>
      tableOf(
        ["rows", ...values[0].map((_, x) => `column ${x * block[1]}`)],
        values.map((row, y) => [y * block[0], ...row.map(short)]),
      ),
    make("p", { class: "legend" }, "within the bound ", make("span", { class: "ramp" }), " a million bounds and more"),
  );
}

/** Draw the largest ratio of every parameter, in order of depth. */
function layerChart(layers, parameter) {
  const least = 1e-3;
  const dots = layers.map(({ name, ratio }, depth) => ({
    name,
    depth,
    ratio,
    shown: Math.min(SCALE_TOP, Math.max(least, number(ratio) || (ratio === "nan" ? SCALE_TOP : least))),
  }));
  const wrong = (dot) => !(number(dot.ratio) <= 1);
  const first = dots.find(wrong);
  const every = Math.max(1, Math.ceil(dots.length / 40));
  return figure(
    "Error along depth",
    first
      ? `${dots.filter(wrong).length} of ${plural(dots.length, "parameter")} outside the bound, the first in depth ${first.name}`
      : `${plural(dots.length, "parameter")}, none outside the bound`,
    {
      height: 46 + (dots.length / every) * 15,
      marginLeft: 190,
      marginTop: 20,
      marginRight: 24,
      x: {
        type: "log",
        domain: [
          least,
          Math.max(
            10,
            d3.max(dots, (dot) => dot.shown),
          ),
        ],
        label: "largest error / bound",
        labelArrow: "none",
        grid: true,
        ticks: 5,
        tickFormat: short,
      },
      y: { type: "linear", domain: [dots.length - 0.5, -0.5], axis: null },
      marks: [
        Plot.ruleX([1], { strokeDasharray: "4 3", strokeWidth: 1.5 }),
        Plot.text(["bound"], { x: 1, frameAnchor: "top", dy: -12 }),
        Plot.text(
          dots.filter((_, i) => i % every === 0),
          {
            x: least,
            y: "depth",
            dx: -8,
            textAnchor: "end",
            text: (dot) => (dot.name.length > 30 ? `…${dot.name.slice(-29)}` : dot.name),
            fontWeight: (dot) => (dot.name === parameter ? "bold" : "normal"),
          },
        ),
        Plot.ruleY(dots, {
          x1: least,
          x2: "shown",
          y: "depth",
          stroke: (dot) => (wrong(dot) ? "var(--bad)" : "var(--calm)"),
          strokeWidth: 1.5,
        }),
        Plot.dot(dots, {
          x: "shown",
          y: "depth",
          r: 4,
          symbol: (dot) => (wrong(dot) ? "times" : "circle"),
          stroke: (dot) => (wrong(dot) ? "var(--bad)" : "var(--calm)"),
          strokeWidth: 2,
        }),
      ].flat(),
    },
    () =>
      tableOf(
        ["parameter", "largest error / bound"],
        layers.map(({ name, ratio }) => [name, short(ratio)]),
      ),
  );
}

/** Draw a curve over steps, of the engine and of the baseline. */
function curveChart(title, { engine, baseline }) {
  const points = [
    ["engine", engine],
    ["baseline", baseline],
  ].flatMap(([who, values]) => values.map((value, step) => ({ who, step, value: number(value) })));
  const apart = engine.findIndex((value, i) => String(value) !== String(baseline[i]));
  const finite = points.filter((each) => Number.isFinite(each.value));
  return figure(
    title,
    apart < 0
      ? `the same at all ${engine.length} steps`
      : `the curves part at step ${apart}: ${long(engine[apart])} against ${long(baseline[apart])}`,
    {
      height: 190,
      marginLeft: 56,
      x: { label: "step", ticks: d3.range(0, engine.length, Math.ceil(engine.length / 10)), tickFormat: "d" },
      y: { label: title.toLowerCase(), grid: true, nice: true },
      marks: [
        Plot.lineY(
          finite.filter((each) => each.who === "baseline"),
          { x: "step", y: "value", stroke: BASELINE, strokeWidth: 5, strokeOpacity: 0.55 },
        ),
        Plot.lineY(
          finite.filter((each) => each.who === "engine"),
          { x: "step", y: "value", stroke: ENGINE, strokeWidth: 1.8, strokeDasharray: "6 3" },
        ),
        Plot.dot(
          finite.filter((each) => each.who === "engine"),
          { x: "step", y: "value", r: 2.5, fill: ENGINE },
        ),
      ],
    },
    () =>
      tableOf(
        ["step", "engine", "baseline"],
        engine.map((value, step) => [step, String(value), String(baseline[step])]),
      ),
    legend(),
  );
}

// The evidence of a failing cell: the part of the step, the parameter, the charts.

/** Render the parts of a training step in a row, the wrong one marked. */
function strip(part) {
  const at = page.step.indexOf(part);
  if (at < 0) return null;
  const state = (i) => (i < at ? "before" : i === at ? "wrong" : "after");
  const words = { before: "", wrong: "the first wrong numbers", after: "" };
  return make(
    "section",
    { "aria-label": `The part of the step that went wrong: ${part}` },
    make("h3", {}, "Where in the step"),
    make(
      "ol",
      { class: "strip" },
      page.step.map((name, i) =>
        make(
          "li",
          { class: state(i), "aria-current": i === at ? "step" : null },
          make("span", {}, i === at ? `✗ ${name}` : name),
          words[state(i)] ? make("small", {}, words[state(i)]) : null,
        ),
      ),
    ),
  );
}

/** Return rows and columns of a parameter as a matrix; a vector is one row. */
function asMatrix(shape) {
  const total = shape.reduce((a, b) => a * b, 1);
  return shape.length < 2 ? [1, total] : [shape[0], total / (shape[0] || 1)];
}

/** Render every chart for which a record has numbers. */
function charts({ heat, shards, ulps, layers, curves, shape, parameter }) {
  const [rows, columns] = asMatrix(shape ?? []);
  const curve = (name, title) => (curves?.[name]?.engine?.length > 1 ? curveChart(title, curves[name]) : null);
  return [
    heat?.values?.length ? heatChart({ ...heat, rows, columns }, shards, shape) : null,
    ulps ? ulpChart(ulps) : null,
    layers?.length ? layerChart(layers, parameter) : null,
    curve("loss", "Loss"),
    curve("norm", "Gradient norm"),
  ].filter(Boolean);
}

/** Render the evidence of a record; empty without evidence. */
function evidenceOf(record) {
  const { evidence } = record;
  if (!evidence) return null;
  return make(
    "section",
    {},
    make("h3", {}, "Evidence"),
    make(
      "p",
      {},
      "Of ",
      make("code", {}, evidence.parameter),
      evidence.shape?.length ? ` (${evidence.shape.join(" × ")})` : "",
      `, step ${evidence.step}, ${evidence.part}:`,
    ),
    charts(evidence),
  );
}

/** Render the first wrong number as a table of its fields. */
function divergenceOf({ divergence: found }) {
  if (!found) return null;
  const place = found.index.length ? `${found.parameter}[${found.index.join(", ")}]` : found.parameter;
  return make(
    "section",
    {},
    make("h3", {}, "The first wrong number"),
    terms([
      ["where", make("code", {}, place)],
      ["step and part", `step ${found.step}, ${found.part}`],
      [
        "owned by",
        found.owner === null
          ? "every rank"
          : `rank ${found.owner}, as element ${found.offset} of its shard; seen on rank ${found.seen_on}`,
      ],
      ["expected", make("code", {}, String(found.expected))],
      ["got", make("code", {}, String(found.actual))],
      ["allowed", `${short(found.bound) || "0"} apart`],
      ["apart", found.ulps < 0 ? "one of the two is not finite" : `${found.ulps.toLocaleString("en")} ULP`],
      ["wrong", `${found.wrong.toLocaleString("en")} of ${plural(found.total, "element")}`],
      ["looks like", found.hint],
    ]),
  );
}

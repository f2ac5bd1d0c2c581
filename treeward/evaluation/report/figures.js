// The figures: each function takes its block and returns what stands below the title.
"use strict";

const seriesClass = (index) => `s${index % SERIES_COLOURS}`;
const named = (series, text) => (series.name ? `${series.name}: ${text}` : text);
const MANY_POINTS = 300;

// A legend, a plot and, folded away, its numbers as a table.
function figure(block, { hideSeries = false, legendShape = "square", label, draw, columns, rows, footnote, onopen, extraLegend }) {
  const numbers = h("details", { class: "numbers" }, h("summary", null, "Numbers of this figure"));
  numbers.addEventListener("toggle", () => {
    if (!numbers.open || numbers.children.length > 1) return;
    if (footnote) numbers.append(h("p", null, footnote));
    numbers.append(dataTable(columns, rows(), { caption: `Numbers of ${block.title}` }));
  });
  return h("figure", null,
    h("div", { class: "legends" }, !hideSeries && block.series.length > 1 && legend(block.series, legendShape), extraLegend),
    plot({ label, draw, onopen }), numbers);
}

// Horizontal bars in groups of one label, with whiskers, the value in words, and the line of chance.
function barsFigure(block) {
  const range = block.x_range || [0, 1];
  const format = block.format || (range[0] === 0 && range[1] === 1 ? "percent" : "number");
  const labels = [...new Set(block.series.flatMap((series) => series.items.map((item) => item.label)))];
  const groups = labels.map((label) => block.series.map((series) => series.items.find((item) => item.label === label)));
  const many = block.series.length > 1;
  // A line at 0 is that of no change, not of chance.
  const referenceName = block.reference_label || (format === "percent" && block.reference > 0 ? "chance" : "");
  const referenceText = `${referenceName} ${block.reference === 0 ? "0" : roundNumber(block.reference, format)}`.trim();
  // Items may have lines of their own; where these mark one value it is named above the first of them.
  const own = [...new Set(groups.flat().map((item) => item?.reference).filter(isNumber))];
  const marked = isNumber(block.reference) ? block.reference : own.length === 1 ? own[0] : null;
  const markedText = marked === block.reference ? referenceText : marked === null ? "" : `chance ${roundNumber(marked, format)}`;
  const reference = marked === null ? "" : ` The line marks ${markedText}.`;
  const said = (item) => formatInterval(item, format) + (isNumber(item.reference) ? `, chance ${roundNumber(item.reference, format)}` : "");

  const draw = (width) => {
    const narrow = width < 560;
    const texts = groups.flat().map((item) => (item ? formatInterval(item, format).replace(" (", "  (") : ""));
    const valueRoom = narrow ? 12 : Math.max(...texts.map((text) => textWidth(text))) + 20;
    const labelRoom = narrow ? 0 : Math.min(Math.max(...labels.map((label) => textWidth(label, 13.5))) + 16, width * 0.3);
    const thick = many ? 11 : 16;
    const step = narrow && many ? thick + 18 : thick + 5;
    const head = narrow ? 20 : 0;
    const gap = narrow ? 12 : 10;
    const top = marked === null ? 8 : 24;
    const heights = groups.map((group) => head + (narrow && !many ? step : group.length * step));
    const bottom = top + heights.reduce((sum, height) => sum + height + gap, 0);
    const height = bottom + (block.x_label ? 46 : 26);
    const x = linear(range[0], range[1], labelRoom + 1, width - valueRoom);
    const marks = [];
    const words = []; // above the line of chance
    const tickValues = ticks(range[0], range[1], clamp((width - labelRoom - valueRoom) / 70, 2, 10));
    const tickTexts = tickText(tickValues, format);
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true", focusable: "false" },
      tickValues.map((tick, index) => [
        s("line", { class: "grid", x1: x(tick), x2: x(tick), y1: top, y2: bottom }),
        s("text", { class: "tick", x: x(tick), y: bottom + 17,
          "text-anchor": narrow && index === 0 ? "start" : narrow && index === tickValues.length - 1 ? "end" : "middle" }, tickTexts[index]),
      ]),
      block.x_label && s("text", { class: "axis-label", x: (x(range[0]) + x(range[1])) / 2, y: bottom + 38, "text-anchor": "middle" }, block.x_label));
    let y = top;
    groups.forEach((group, index) => {
      if (narrow) {
        svg.append(s("text", { class: "label", x: 0, y: y + 13 }, shorten(labels[index], many ? width : width * 0.5)));
      } else {
        svg.append(s("text", { class: "label", x: labelRoom - 10, y: y + (group.length * step - 5) / 2 + 5, "text-anchor": "end" },
          shorten(labels[index], labelRoom - 16)));
      }
      group.forEach((item, order) => {
        const rowTop = y + head + (narrow && !many ? 0 : order * step);
        if (!item) return;
        const barTop = narrow && many ? rowTop + 14 : rowTop;
        const text = formatInterval(item, format);
        const zero = clamp(0, range[0], range[1]);
        if (isNumber(item.value)) {
          const ends = [x(zero), x(clamp(item.value, range[0], range[1]))].sort((a, b) => a - b);
          svg.append(s("rect", { class: `mark bar ${seriesClass(order)}`, x: ends[0], y: barTop, width: Math.max(ends[1] - ends[0], 1), height: thick, rx: 1.5 }));
        }
        if (isNumber(item.low) && isNumber(item.high)) {
          const [from, to] = [x(clamp(item.low, range[0], range[1])), x(clamp(item.high, range[0], range[1]))];
          const middle = barTop + thick / 2;
          const path = `M${from} ${middle - 4}V${middle + 4}M${from} ${middle}H${to}M${to} ${middle - 4}V${middle + 4}`;
          svg.append(s("path", { class: "whisker-halo", d: path }), s("path", { class: "whisker", d: path }));
        }
        words.push(s("text", { class: "value", x: width - 2, "text-anchor": "end",
          y: narrow ? rowTop + (many ? 10 : -7) : barTop + thick / 2 + 4.5 }, text));
        marks.push({ x: x(isNumber(item.value) ? clamp(item.value, range[0], range[1]) : zero), y: barTop + thick / 2,
          box: { x: x(range[0]) - 2, y: barTop - 2, width: x(range[1]) - x(range[0]) + 4, height: thick + 4 },
          lines: [labels[index], named(block.series[order], said(item)), item.note] });
        if (isNumber(item.reference)) {
          svg.append(s("line", { class: "reference", x1: x(item.reference), x2: x(item.reference), y1: barTop - 3, y2: barTop + thick + 3 }));
        }
      });
      y += heights[index] + gap;
    });
    if (marked !== null) {
      const at = x(marked);
      if (marked === block.reference) svg.append(s("line", { class: "reference", x1: at, x2: at, y1: top - 6, y2: bottom }));
      svg.append(s("text", { class: "reference-label", x: at, y: 12, "text-anchor": "middle" }, markedText));
    }
    svg.append(...words);
    return { svg, marks, by: "y" };
  };

  const words = block.series.map((series) => named(series,
    series.items.map((item) => `${item.label} ${said(item)}`).join("; "))).join(". ");
  return figure(block, {
    label: `Bar chart, ${block.title}. ${words}.${reference}`,
    draw,
    columns: [{ key: "label", label: "" }, ...(many ? [{ key: "series", label: "Series" }] : []),
      { key: "value", label: "Value", format }, { key: "low", label: "Low", format }, { key: "high", label: "High", format },
      { key: "count", label: "n", format: "integer" }],
    rows: () => groups.flatMap((group, index) => group.map((item, order) =>
      item && { ...item, label: labels[index], series: block.series[order].name }).filter(Boolean)),
  });
}

function histogramFigure(block) {
  const { edges, series } = block;
  const most = Math.max(1, ...series.flatMap((one) => one.counts.filter(isNumber)));
  const bins = edges.slice(1).map((high, index) => `${formatNumber(edges[index])} to ${formatNumber(high)}`);
  const draw = (width) => {
    const height = clamp(width * 0.42, 220, 330);
    const { svg, x, y, box } = axes(width, height, { xRange: [edges[0], edges[edges.length - 1]], yRange: [0, most * 1.06],
      xLabel: block.x_label, yLabel: block.y_label || "examples" });
    const gap = series.length === 1 ? 0.5 : 0;
    series.forEach((one, order) => {
      let outline = `M${x(edges[0])} ${y(0)}`;
      one.counts.forEach((count, index) => {
        const [left, right, top] = [x(edges[index]), x(edges[index + 1]), y(count || 0)];
        const below = series.length === 1 && isNumber(block.mark) && edges[index + 1] <= block.mark + 1e-12;
        svg.append(s("rect", { class: `mark bin ${seriesClass(order)}${below ? " below" : ""}${["", "", " overlaid"][series.length] ?? " bare"}`,
          x: left + gap, y: top, width: Math.max(right - left - 2 * gap, 0.5), height: y(0) - top }));
        outline += `V${top}H${right}`;
      });
      if (series.length > 1) {
        svg.append(s("path", { class: `outline ${seriesClass(order)}`, d: `${outline}V${y(0)}`, "stroke-dasharray": DASHES[order % DASHES.length] }));
      }
    });
    if (isNumber(block.mark)) {
      svg.append(s("line", { class: "reference", x1: x(block.mark), x2: x(block.mark), y1: box.top - 8, y2: box.bottom }),
        s("text", { class: "reference-label", x: x(block.mark) + 5, y: box.top - 2 }, block.mark_label || (block.mark === 0 ? "0" : formatNumber(block.mark))));
    }
    const marks = bins.map((bin, index) => ({ x: (x(edges[index]) + x(edges[index + 1])) / 2,
      y: y(Math.max(...series.map((one) => one.counts[index] || 0))),
      box: { x: x(edges[index]), y: box.top, width: x(edges[index + 1]) - x(edges[index]), height: box.bottom - box.top },
      lines: [bin, ...series.map((one) => named(one, formatNumber(one.counts[index], "integer")))] }));
    return { svg, marks, by: "x" };
  };
  const words = series.map((one) => named(one, one.counts.map((count, index) => `${bins[index]}: ${formatNumber(count, "integer")}`).join("; "))).join(". ");
  return figure(block, {
    label: `Histogram, ${block.title}${block.x_label ? `, of ${block.x_label}` : ""}. ${words}.`,
    draw,
    columns: [{ key: "from", label: "From", format: "number" }, { key: "to", label: "To", format: "number" },
      ...series.map((one, order) => ({ key: `s${order}`, label: one.name || "Count", format: "integer" }))],
    rows: () => bins.map((_, index) => ({ from: edges[index], to: edges[index + 1],
      ...Object.fromEntries(series.map((one, order) => [`s${order}`, one.counts[index]])) })),
  });
}

// Frequency against predicted probability, the diagonal of perfect calibration, and below it how many there are of each.
function reliabilityFigure(block) {
  const { series } = block;
  const known = (bin) => isNumber(bin.probability) && isNumber(bin.frequency);
  const draw = (width) => {
    const side = Math.min(width, 480);
    const strip = 64;
    const { svg, x, y, box } = axes(side, side + strip, { xRange: [0, 1], yRange: [0, 1], xFormat: "percent", yFormat: "percent",
      xLabel: block.x_label || "predicted probability", yLabel: block.y_label || "how often it was right", bottom: strip });
    svg.append(s("line", { class: "diagonal", x1: x(0), y1: y(0), x2: x(1), y2: y(1) }));
    const most = Math.max(1, ...series.flatMap((one) => one.bins.map((bin) => bin.count || 0)));
    const base = box.bottom + 46 + strip - 8;
    const marks = [];
    series.forEach((one, order) => {
      const bins = one.bins.filter(known);
      svg.append(s("path", { class: `line ${seriesClass(order)}`, "stroke-dasharray": DASHES[order % DASHES.length],
        d: bins.map((bin, index) => `${index ? "L" : "M"}${x(bin.probability)} ${y(bin.frequency)}`).join("") }));
      const barWidth = 8 / series.length;
      for (const bin of bins) {
        const at = x(bin.probability);
        if (isNumber(bin.low) && isNumber(bin.high)) {
          svg.append(s("line", { class: `whisker ${seriesClass(order)} coloured`, x1: at, x2: at, y1: y(bin.low), y2: y(bin.high) }));
        }
        svg.append(s("circle", { class: `mark point ${seriesClass(order)}`, cx: at, cy: y(bin.frequency), r: 4.5 }));
        const high = ((bin.count || 0) / most) * (strip - 22);
        svg.append(s("rect", { class: `mark count ${seriesClass(order)}`, x: at - 4 + order * barWidth, y: base - high, width: Math.max(barWidth - 0.5, 1), height: high }));
        marks.push({ x: at, y: y(bin.frequency), lines: [named(one, `predicted ${formatNumber(bin.probability, "percent")}`),
          `right ${formatInterval({ ...bin, value: bin.frequency }, "percent")}`] });
      }
    });
    svg.append(s("line", { class: "axis", x1: box.left, x2: box.right, y1: base, y2: base }),
      s("text", { class: "tick", x: box.left - 8, y: base - strip + 30, "text-anchor": "end" }, formatNumber(most, "integer")),
      s("text", { class: "tick", x: box.left - 8, y: base, "text-anchor": "end" }, "n"));
    return { svg, marks: marks.sort((a, b) => a.x - b.x), by: "xy" };
  };
  const words = series.map((one) => named(one, one.bins.filter(known).map((bin) =>
    `predicted ${formatNumber(bin.probability, "percent")}, right ${formatInterval({ ...bin, value: bin.frequency }, "percent")}`).join("; "))).join(". ");
  return figure(block, {
    legendShape: "line",
    label: `Reliability diagram, ${block.title}. ${words}. The diagonal is perfect calibration.`,
    draw,
    columns: [{ key: "series", label: "Series" }, { key: "probability", label: "Predicted", format: "percent" },
      { key: "frequency", label: "Right", format: "percent" }, { key: "low", label: "Low", format: "percent" },
      { key: "high", label: "High", format: "percent" }, { key: "count", label: "n", format: "integer" }],
    rows: () => series.flatMap((one) => one.bins.map((bin) => ({ ...bin, series: one.name }))),
  });
}

// Shapes tell groups apart, colours series; on a canvas, as there may be thousands of points.
const SHAPES = {
  circle: (pen, x, y, r) => pen.arc(x, y, r, 0, 2 * Math.PI),
  triangle: (pen, x, y, r) => { pen.moveTo(x, y - r * 1.25); pen.lineTo(x + r * 1.2, y + r * 0.9); pen.lineTo(x - r * 1.2, y + r * 0.9); pen.closePath(); },
  square: (pen, x, y, r) => pen.rect(x - r * 0.9, y - r * 0.9, r * 1.8, r * 1.8),
  diamond: (pen, x, y, r) => { pen.moveTo(x, y - r * 1.3); pen.lineTo(x + r * 1.3, y); pen.lineTo(x, y + r * 1.3); pen.lineTo(x - r * 1.3, y); pen.closePath(); },
};
const SHAPE_SIGNS = { circle: "●", triangle: "▲", square: "■", diamond: "◆" };

function scatterFigure(block) {
  const { series } = block;
  const points = series.flatMap((one, order) => one.points.filter((point) => isNumber(point.x) && isNumber(point.y))
    .map((point) => ({ ...point, order }))).sort((a, b) => a.x - b.x);
  const groups = [...new Set(series.flatMap((one) => one.points).map((point) => point.group).filter((group) => group !== null && group !== undefined))];
  // Groups have shapes, and if there is only one series colours too; too many to tell apart have neither.
  const coloured = series.length === 1 && groups.length > 1 && groups.length <= SERIES_COLOURS;
  const grouped = coloured || (groups.length > 1 && groups.length <= 4);
  const shapeOf = (group) => Object.keys(SHAPES)[grouped ? Math.max(0, groups.indexOf(group)) % 4 : 0];
  const colourOf = (point) => (coloured ? Math.max(0, groups.indexOf(point.group)) : point.order % SERIES_COLOURS);
  const xRange = extent([...points.map((point) => point.x), ...series.flatMap((one) => one.line?.x ?? [])]);
  const yRange = extent([...points.map((point) => point.y), ...series.flatMap((one) => one.line?.y ?? [])]);
  const opens = points.some((point) => findExample(point.id, block.source));
  // Characters are counted; a mean of them is not whole.
  const counted = points.every((point) => Number.isInteger(point.x)) ? "integer" : "number";
  const draw = (width) => {
    const height = clamp(width * 0.6, 280, 460);
    const { svg, x, y } = axes(width, height, { xRange, yRange, xLabel: block.x_label, yLabel: block.y_label });
    const canvas = h("canvas", { class: "points", "aria-hidden": "true", "data-points": points.length });
    const ratio = Math.max(2, window.devicePixelRatio || 1);
    [canvas.width, canvas.height] = [width * ratio, height * ratio];
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const colours = Array.from({ length: SERIES_COLOURS }, (_, index) => colour(`s${index}`));
    const radius = clamp(Math.sqrt((0.2 * width * height) / (Math.PI * Math.max(points.length, 1))), 1.4, 4);
    pen.globalAlpha = points.length > 1500 ? 0.4 : points.length > MANY_POINTS ? 0.55 : 0.75;
    const marks = points.map((point) => {
      const at = { x: x(point.x), y: y(point.y) };
      pen.beginPath();
      SHAPES[shapeOf(point.group)](pen, at.x, at.y, radius);
      pen.fillStyle = colours[colourOf(point)];
      pen.fill();
      return { ...at, point, lines: [
        named(series[point.order], [point.group, point.id].filter(Boolean).join(" · ")),
        `${block.x_label || "x"} ${formatNumber(point.x, counted)} · ${block.y_label || "y"} ${formatNumber(point.y)}`,
        point.text && excerpt(String(point.text), 360), opens && "Click or Enter: the whole example" ] };
    });
    series.forEach((one, order) => {
      if (!one.line) return;
      const path = one.line.x.map((value, index) => `${index ? "L" : "M"}${x(value)} ${y(one.line.y[index])}`).join("");
      svg.append(s("path", { class: "line-halo", d: path }),
        s("path", { class: `line fit ${coloured ? "of-all" : seriesClass(order)}`, d: path, "stroke-dasharray": DASHES[order % DASHES.length] }));
    });
    return { svg, canvas, marks, by: "xy" };
  };
  const summaries = series.map((one) => {
    const kept = one.points.filter((point) => isNumber(point.x) && isNumber(point.y));
    const mean = (name) => kept.reduce((sum, point) => sum + point[name], 0) / (kept.length || 1);
    const [meanX, meanY] = [mean("x"), mean("y")];
    const product = (a, b) => kept.reduce((sum, point) => sum + (point[a] - (a === "x" ? meanX : meanY)) * (point[b] - (b === "x" ? meanX : meanY)), 0);
    const spread = Math.sqrt(product("x", "x") * product("y", "y"));
    const line = one.line && one.line.x.length > 1 ? (one.line.y.at(-1) - one.line.y[0]) / (one.line.x.at(-1) - one.line.x[0]) : null;
    return { series: one.name, count: kept.length, x: kept.length ? meanX : null, y: kept.length ? meanY : null,
      correlation: spread ? product("x", "y") / spread : null, slope: line };
  });
  const words = summaries.map((one) => named({ name: one.series }, `${one.count} points, mean ${block.x_label || "x"} ${formatNumber(one.x)}, `
    + `mean ${block.y_label || "y"} ${formatNumber(one.y)}, correlation ${formatNumber(one.correlation)}`
    + (isNumber(one.slope) ? `, slope of the line ${formatNumber(one.slope)}` : ""))).join(". ");
  return figure(block, {
    label: `Scatter plot, ${block.title}. ${words}. Arrow keys visit the points.`,
    draw,
    hideSeries: coloured,
    extraLegend: grouped && h("ul", { class: "legend" }, groups.map((group, index) =>
      h("li", { dir: "auto" }, h("span", { class: `shape ${coloured ? seriesClass(index) : ""}`, "aria-hidden": "true" }, SHAPE_SIGNS[shapeOf(group)]), " ", String(group)))),
    footnote: "The correlation is Pearson's, of the points shown. Every point is in the JSON.",
    columns: [{ key: "series", label: "Series" }, { key: "count", label: "Points", format: "integer" },
      { key: "x", label: `Mean ${block.x_label || "x"}`, format: "number" }, { key: "y", label: `Mean ${block.y_label || "y"}`, format: "number" },
      { key: "correlation", label: "Correlation", format: "signed" }, { key: "slope", label: "Slope of the line", format: "signed" }],
    rows: () => summaries,
    onopen: opens && ((mark) => {
      const example = findExample(mark.point.id, block.source, series[mark.point.order].name);
      if (example) openReader([example], 0);
    }),
  });
}

function curvesFigure(block) {
  const { series } = block;
  const all = (name) => series.flatMap((one) => one[name] || []);
  const logarithmicX = block.x_scale === "log" && all("x").every((value) => !isNumber(value) || value > 0);
  const xRange = logarithmicX ? [Math.min(...all("x").filter(isNumber)), Math.max(...all("x").filter(isNumber))] : extent(all("x"), 0.02);
  const yRange = extent([...all("y"), ...all("low"), ...all("high")]);
  const place = (one, index) => one.labels?.[index] ?? `${block.x_label || "x"} ${formatNumber(one.x[index])}`;
  const labelled = series.some((one) => one.labels);
  const draw = (width) => {
    const height = clamp(width * 0.55, 260, 420);
    const { svg, x, y, box } = axes(width, height, { xRange, yRange, xLabel: block.x_label, yLabel: block.y_label,
      yFormat: block.format, xScale: logarithmicX ? "log" : "linear", xNamed: block.x_ticks });
    const marks = [];
    // Named places of the x axis, each with its name on a line of its own: they may be close together.
    (block.lines || []).forEach((line, row) => {
      const toTheLeft = x(line.x) + 6 + textWidth(line.label) > box.right;
      svg.append(s("line", { class: `reference ${isNumber(line.colour) ? `coloured ${seriesClass(line.colour)}` : ""}`, x1: x(line.x), x2: x(line.x), y1: box.top, y2: box.bottom }),
        s("text", { class: "reference-label", x: x(line.x) + (toTheLeft ? -6 : 6), y: box.top + 10 + 17 * row, "text-anchor": toTheLeft ? "end" : "start" }, line.label));
    });
    series.forEach((one, at) => {
      const order = one.colour ?? at;
      const known = one.x.map((value, index) => index).filter((index) => isNumber(one.x[index]) && isNumber(one.y[index]));
      const banded = known.filter((index) => isNumber(one.low?.[index]) && isNumber(one.high?.[index]));
      if (banded.length > 1) {
        const upper = banded.map((index) => `${x(one.x[index])} ${y(one.high[index])}`);
        const lower = banded.map((index) => `${x(one.x[index])} ${y(one.low[index])}`).reverse();
        svg.append(s("path", { class: `band ${seriesClass(order)}`, d: `M${[...upper, ...lower].join("L")}Z` }));
      }
      svg.append(s("path", { class: `line ${seriesClass(order)}`, "stroke-dasharray": DASHES[(one.dash ?? at) % DASHES.length],
        d: known.map((index, place) => `${place ? "L" : "M"}${x(one.x[index])} ${y(one.y[index])}`).join("") }));
      for (const index of known) {
        if (one.dots ?? known.length <= 40) svg.append(s("circle", { class: `mark point ${seriesClass(order)}`, cx: x(one.x[index]), cy: y(one.y[index]), r: 3.2 }));
        marks.push({ x: x(one.x[index]), y: y(one.y[index]), lines: [named(one, place(one, index)),
          formatInterval({ value: one.y[index], low: one.low?.[index], high: one.high?.[index] }, block.format)] });
      }
    });
    return { svg, marks, by: "xy" };
  };
  const words = block.spoken ?? series.map((one) => named(one, one.x.map((value, index) =>
    `${one.labels?.[index] ?? formatNumber(value)}: ${formatInterval({ value: one.y[index], low: one.low?.[index], high: one.high?.[index] }, block.format)}`).join("; "))).join(". ");
  return figure(block, {
    legendShape: "line",
    label: `Curves, ${block.title}, ${block.y_label || "y"} against ${block.x_label || "x"}. ${words}.`.replace(/\.\.$/, "."),
    draw,
    columns: [{ key: "series", label: "Series" }, labelled && { key: "label", label: "Point" }, { key: "x", label: labelled ? "x" : block.x_label || "x", format: "number" },
      ...["y", "low", "high"].map((key) => ({ key, label: key === "y" ? block.y_label || "y" : key, format: block.format || "number" }))].filter(Boolean),
    rows: () => series.flatMap((one) => one.x.map((x, index) => ({ series: one.name, label: one.labels?.[index] ?? "", x, y: one.y[index], low: one.low?.[index], high: one.high?.[index] }))),
  });
}

// A matrix is a table whose cells are shaded; as it is small, every number is in its cell.
function matrixFigure(block) {
  const format = block.format || "number";
  const values = block.values.flat().filter(isNumber);
  const [low, high] = block.range || (format === "percent" ? [0, 1] : [Math.min(0, ...values), Math.max(...values, 0)]);
  const cell = (value) => {
    const share = isNumber(value) ? clamp((value - low) / (high - low || 1), 0, 1) : 0;
    const node = h("td", { class: "cell" }, formatNumber(value, format));
    node.style.setProperty("--share", `${Math.round(share * 62)}%`);
    return node;
  };
  return h("figure", null, h("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": block.title },
    h("table", { class: "matrix" }, h("caption", { class: "visually-hidden" }, block.title),
      h("thead", null,
        block.column_label && h("tr", null, h("td"), h("th", { colspan: block.columns.length, scope: "colgroup", class: "axis-name" }, block.column_label)),
        h("tr", null, h(block.row_label ? "th" : "td", block.row_label ? { scope: "col", class: "axis-name" } : null, block.row_label || ""),
          block.columns.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", null, block.rows.map((name, index) => h("tr", null, h("th", { scope: "row" }, name), block.values[index].map(cell)))))));
}

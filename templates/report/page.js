// Draws the plots of the report with uPlot, and lets its reader choose light or dark. No network, no storage needed.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const probe = document.body.appendChild(document.createElement("i"));
  probe.hidden = true;
  const drawn = [];

  // A canvas knows no variables of CSS: what a colour is in the present theme is asked of an element.
  const colour = (name, alpha) => {
    probe.style.color = `var(${name})`;
    const parts = getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3);
    return `rgba(${parts.join(", ")}, ${alpha ?? 1})`;
  };
  const figures = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
  const number = value => {
    if (value == null) return "–";
    const size = Math.abs(value);
    return size && size < 1e-3 ? value.toExponential(2) : size < 1e4 ? String(+value.toPrecision(5)) : figures.format(value);
  };
  const two = value => String(value).padStart(2, "0");
  const clock = seconds => {
    if (seconds == null) return "–";
    const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
    return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
  };
  const long = (seconds, apart) => apart % 86400 === 0 ? `${seconds / 86400} d` : apart % 3600 === 0 ? `${seconds / 3600} h` : clock(seconds);
  const dashes = [[], [6, 4], [2, 3], [10, 3, 2, 3]];
  const times = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800, 2592000];

  const whole = [...Array(16).keys()].flatMap(power => [1, 2, 5].map(digit => digit * 10 ** power));

  // Each series has its own steps; a band is drawn between two more, which the legend does not name.
  const layout = chart => {
    const many = new Set(chart.series.map(one => one.run)).size > 1;
    const tables = [], series = [{ label: chart.x, value: (_, v) => chart.x === "time" ? clock(v) : v == null ? "–" : v.toLocaleString("en") }], bands = [];
    for (const one of chart.series) {
      const name = `--c${(many ? one.run : one.dash) % 6}`;
      const points = one.x.length === 1 || undefined;
      tables.push(one.low ? [one.x, one.y, one.low, one.high] : [one.x, one.y]);
      series.push({ label: one.label, stroke: () => colour(name), width: 1.5, dash: many ? dashes[one.dash % 4] : [], points: { show: points }, value: (_, v) => number(v) });
      if (one.low) {
        const bound = { class: "bound", stroke: "transparent", width: 0, points: { show: false } };
        series.push({ ...bound, label: "least" }, { ...bound, label: "greatest" });
        bands.push({ series: [series.length - 1, series.length - 2], fill: () => colour(name, 0.22) });
      }
    }
    return { data: uPlot.join(tables), series, bands };
  };

  const marks = chart => u => {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.strokeStyle = colour("--warn");
    ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    for (const at of chart.marks) {
      const x = Math.round(u.valToPos(at, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  };

  const draw = (figure, chart, log) => {
    const { data: values, series, bands } = layout(chart);
    const axis = { stroke: () => colour("--quiet"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { stroke: () => colour("--line"), width: 1 } };
    const across = { ...axis, values: (_, all, __, ___, apart) => all.map(chart.x === "time" ? v => long(v, apart) : number) };
    across.incrs = chart.x === "time" ? times : whole;  // there is nothing between two steps
    return new uPlot({
      width: figure.clientWidth,
      height: figure.parentElement.firstElementChild === figure ? 300 : 210,
      series, bands,
      scales: { x: { time: false }, y: log ? { distr: 3 } : chart.name === "goodput" ? { range: [0, 100] } : {} },
      axes: [across, { ...axis, size: 62, values: (_, all) => all.map(v => v == null ? "" : number(v)) }],
      cursor: { sync: { key: chart.x }, points: { size: 6 } },
      hooks: {
        draw: [marks(chart)],
        setSeries: [(u, at, options) => {  // a band goes with its curve
          for (let next = at + 1; options.show != null && u.series[next]?.class === "bound"; next++) u.setSeries(next, { show: options.show });
        }],
      },
    }, values, figure);
  };

  // Bars that lie on each other: the longest is drawn first, so each part shows what is beyond the ones before it.
  const bars = (figure, { parts, rows, budget }) => {
    const count = rows.length, narrow = figure.clientWidth < 600;
    const sums = parts.map((_, at) => rows.map(row => row.parts.slice(0, at + 1).reduce((sum, size) => sum + size, 0)));
    const most = Math.max(budget, ...sums.at(-1)) * 1.05;
    const quiet = { stroke: () => colour("--quiet"), ticks: { show: false } };
    return new uPlot({
      width: figure.clientWidth, height: 34 * count + 90,
      scales: { x: { time: false, ori: 1, dir: -1, range: [-0.6, count - 0.4] }, y: { ori: 0, dir: 1, range: [0, most] } },
      axes: [
        { ...quiet, side: 3, size: narrow ? 130 : 300, grid: { show: false }, splits: () => rows.map((_, at) => at), values: () => rows.map(row => narrow ? row.label.split(",")[0] : row.label) },
        { ...quiet, side: 2, grid: { stroke: () => colour("--line"), width: 1 } },
      ],
      series: [
        { label: "choice", value: (_, at) => rows[at]?.label ?? "–" },
        ...parts.map((part, at) => ({
          label: part, fill: () => colour(`--c${at}`), stroke: () => colour(`--c${at}`), width: 0, points: { show: false },
          paths: uPlot.paths.bars({ size: [0.7, 40] }), value: (u, _, __, row) => row == null ? "–" : number(rows[row].parts[at]),
        })).reverse(),
      ],
      cursor: { drag: { x: false, y: false }, points: { show: false } },
      hooks: { draw: [u => {
        const at = Math.round(u.valToPos(budget, "y", true));
        u.ctx.save();
        u.ctx.strokeStyle = colour("--text");
        u.ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
        u.ctx.beginPath();
        u.ctx.moveTo(at, u.bbox.top);
        u.ctx.lineTo(at, u.bbox.top + u.bbox.height);
        u.ctx.stroke();
        u.ctx.restore();
      }] },
    }, [rows.map((_, at) => at), ...sums.slice().reverse()], figure);
  };
  const place = document.getElementById("bars");
  if (place) {
    const state = { figure: place, plot: null };
    state.again = () => { state.plot?.destroy(); state.plot = bars(place, data.bars); };
    state.again();
    drawn.push(state);
  }

  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const chart = data.charts[+figure.dataset.chart];
    const state = { figure, chart, log: false, plot: null };
    state.again = () => { state.plot?.destroy(); state.plot = draw(figure, chart, state.log); };
    state.again();
    drawn.push(state);
    const button = figure.querySelector(".log");
    const positive = chart.series.every(one => (one.low ?? one.y).every(v => v == null || v > 0));
    button.hidden = !positive || chart.unit === "%";
    button.addEventListener("click", () => {
      state.log = !state.log;
      button.setAttribute("aria-pressed", state.log);
      state.again();
    });
  }

  let last = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === last) return;  // a phone's address bar comes and goes
    last = window.innerWidth;
    for (const { plot, figure } of drawn) plot.setSize({ width: figure.clientWidth, height: plot.height });
  });
  const again = () => drawn.forEach(state => state.again());
  const prefers = matchMedia("(prefers-color-scheme: dark)");
  prefers.addEventListener("change", again);
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.style.colorScheme ? root.style.colorScheme === "dark" : prefers.matches;
    root.style.colorScheme = dark ? "light" : "dark";
    again();
  });
  root.dataset.plots = drawn.length;
})();

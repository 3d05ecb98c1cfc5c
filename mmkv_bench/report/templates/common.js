/* What all pages share: data from scripts, elements made of text alone, charts that follow the colour scheme. */
"use strict";

const mmkv = {
  values: {},

  /** Scripts in data/ call this. */
  put(name, value) { this.values[name] = value; },

  /** A value, read when it is first asked for; a page that was opened from a file can load scripts and nothing else. */
  load(name) {
    if (name in this.values) return Promise.resolve(this.values[name]);
    return new Promise((done, failed) => {
      const script = document.createElement("script");
      script.src = `data/${name}.js`;
      script.onload = () => done(this.values[name]);
      script.onerror = () => failed(new Error(`data/${name}.js is not beside this page: the report was not copied whole`));
      document.head.append(script);
    });
  },

  /** Rows of a table that was written column by column, as objects. */
  rows(columns) {
    const names = Object.keys(columns), read = names.map((name) => {
      const column = columns[name];
      return Array.isArray(column) ? (i) => column[i] : (i) => column.of[column.at[i]];
    });
    const first = columns[names[0]], n = (Array.isArray(first) ? first : first.at).length, rows = new Array(n);
    for (let i = 0; i < n; i++) {
      const row = {};
      for (let k = 0; k < names.length; k++) row[names[k]] = read[k](i);
      rows[i] = row;
    }
    return rows;
  },
};

const $ = (id) => document.getElementById(id);

/** An element; strings among its children become text, never markup. */
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

function tell(id, ...children) { $(id).replaceChildren(...children.flat()); }

function problem(error) {
  $("problem").hidden = false;
  $("problem").textContent = error.message || String(error);
}
/** Run what a page does and show what goes wrong. A browser tells listeners nothing of errors in scripts that came from files. */
async function run(does) {
  try { await does(); } catch (error) { problem(error); }
}

const score = (value) => (value === null || value === undefined ? "–" : value.toFixed(Math.abs(value) >= 100 ? 1 : 3));
const span = (low, high) => (low === null || low === undefined ? "" : `[${score(low)}, ${score(high)}]`);
const rank = (low, high) => (low === null || low === undefined ? "" : low === high ? `${low}` : `${low}–${high}`);
const budgetWord = (view, budget) => (budget === "" ? "no budget" : view.axis === "fraction" ? `${+(100 * budget).toPrecision(4)} %` : `${budget} entries`);
function bytes(n) {
  if (n === null || n === undefined) return "–";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (n < 1024 || unit === "GiB") return `${unit === "B" ? n : n.toFixed(1)} ${unit}`;
    n /= 1024;
  }
}

const collator = new Intl.Collator("en", { numeric: true });
const distinct = (values) => [...new Set(values)].sort((a, b) => collator.compare(a, b));

/** Fill a select; options: [value, words]. The one that was chosen stays where it still can. */
function options(select, pairs, chosen = select.value) {
  select.replaceChildren(...pairs.map(([value, words]) => el("option", { value }, words)));
  if (pairs.some(([value]) => String(value) === String(chosen))) select.value = chosen;
}

function plainTable(header, rows, caption = null) {
  return el("table", { class: "plain" }, caption === null ? null : el("caption", {}, caption),
    el("thead", {}, el("tr", {}, header.map((word) => el("th", { scope: "col" }, word)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell) => cell instanceof Node ? cell :
      el("td", { class: typeof cell === "number" ? "number" : null }, typeof cell === "number" ? score(cell) : cell ?? ""))))));
}

/* Okabe and Ito's colours, told apart with every common colour vision; shapes and dashes repeat the distinction. */
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#a07a1f", "#8a63c9"];
const SHAPES = ["circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star", "pentagon", "hexagon"];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const SCALE = "Cividis";
function styleOf(number) {
  return { colour: COLOURS[number % COLOURS.length], shape: SHAPES[number % SHAPES.length],
    dash: DASHES[Math.floor(number / COLOURS.length) % DASHES.length] };
}

const drawn = new Map();
/* A chart is drawn when it is about to be seen: the library takes a second for one of a hundred lines. */
const seen = new IntersectionObserver((changes) => {
  for (const { target, isIntersecting } of changes) if (drawn.has(target.id)) {
    drawn.get(target.id).seen = isIntersecting;
    if (isIntersecting && drawn.get(target.id).stale) redraw(target.id);
  }
}, { rootMargin: "200px" });

/** A chart that is drawn again when the colour scheme changes or the page is printed; table: makes its numbers when asked for. */
function chart(id, traces, layout = {}, table = null) {
  const place = $(id), before = drawn.get(id);
  drawn.set(id, { traces, layout, stale: true, seen: before ? before.seen : false });
  place.style.minHeight = `${layout.height}px`;
  if (before) {
    if (before.seen) redraw(id);
  } else {
    place.replaceChildren();
    seen.observe(place);
  }
  numbersOf(id)?.remove();
  if (table) place.after(el("details", { "data-of": id, ontoggle: ({ target }) => {
    if (target.open && target.children.length === 1) target.append(el("div", { class: "wide" }, table()));
  } }, el("summary", {}, "as numbers")));
}
function numbersOf(id) {
  const next = $(id).nextElementSibling;
  return next && next.dataset.of === id ? next : null;
}
/** Forget a chart, of which nothing is left on the page. */
function undraw(id) {
  drawn.delete(id);
  seen.unobserve($(id));
  $(id).style.minHeight = "";
  if (window.Plotly && $(id).data) Plotly.purge($(id));
  numbersOf(id)?.remove();
}
function redraw(id, printing = false) {
  if (!window.Plotly || !$(id)) return;  // the library is large: texts and tables are there before it
  const { traces, layout } = drawn.get(id), style = getComputedStyle(document.documentElement);
  drawn.get(id).stale = false;
  const text = printing ? "#000" : style.getPropertyValue("--text").trim();
  const line = printing ? "#999" : style.getPropertyValue("--line").trim();
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
  const full = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: text, family: "system-ui, sans-serif" },
    margin: { l: 60, r: 20, t: 20, b: 50 }, hoverlabel: { align: "left" }, ...layout };
  for (const name of Object.keys(full).filter((key) => /^[xy]axis/.test(key))) full[name] = { ...axis, ...full[name] };
  Plotly.react($(id), traces, full, { responsive: true, displaylogo: false, displayModeBar: printing ? false : "hover" });
}
const redrawSeen = () => drawn.forEach((one, id) => { one.stale = true; if (one.seen) redraw(id); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawSeen);
addEventListener("DOMContentLoaded", redrawSeen);
addEventListener("beforeprint", () => drawn.forEach((_, id) => redraw(id, true)));
addEventListener("afterprint", () => drawn.forEach((_, id) => redraw(id)));

/** The place's own parameters, #name=value&...: kept when pages are reloaded, sent or gone back to. */
const place = {
  get(name) { return new URLSearchParams(location.hash.slice(1)).get(name); },
  set(values) {
    const now = new URLSearchParams(location.hash.slice(1));
    for (const [name, value] of Object.entries(values)) value === "" || value === null ? now.delete(name) : now.set(name, value);
    history.replaceState(null, "", `#${now}`);
  },
};

addEventListener("hashchange", () => location.reload());  // another cell or sample on the same page; replaceState is no such event

addEventListener("DOMContentLoaded", () => {
  const report = mmkv.values.report;
  if (!report) return problem(new Error("data/report.js is not beside this page: the report was not copied whole, or is still being made"));
  $("footer").textContent = `mmkv_bench ${report.version}; ${mmkv.values.size}. ${report.libraries}`;
});

/* Charts, choices, the comparison of two cells and maps of kept tokens; Python writes everything else on these pages. */
"use strict";

const $ = (id) => document.getElementById(id);
const inline = (id) => ($(id) ? JSON.parse($(id).textContent) : null);
const visible = (node) => node.offsetParent !== null;
const dark = matchMedia("(prefers-color-scheme: dark)");
const scheme = () => document.documentElement.classList.toggle("dark", dark.matches);  // DataTables reads this class
const BUTTONS = ["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"];  // none uploads the chart
const CONFIG = { responsive: true, displaylogo: false, plotlyServerURL: "", modeBarButtons: [BUTTONS] };
const figures = {};
const mmkv = { put(name, figure) { figures[name] = figure; } };  // scripts below figures/ call it

function problem(error) {
  $("problem").hidden = false;
  $("problem").textContent = error.message || String(error);
}
const run = (work) => Promise.resolve().then(work).catch(problem);

/** Load figures/<name>.js: a page opened from a file may load only scripts. */
function load(name) {
  return new Promise((resolve, reject) => {
    if (name in figures) return resolve(figures[name]);
    const script = document.createElement("script");
    script.src = `${document.documentElement.dataset.root}figures/${name}.js`;
    script.onload = () => resolve(figures[name]);
    script.onerror = () => reject(new Error(`figures/${name}.js is not beside this page: the report was not copied whole`));
    document.head.append(script);
  });
}

/** Draw the visible charts that are not drawn yet, one after another. */
async function draw() {
  for (const node of document.querySelectorAll(".chart:not([data-drawn])")) {
    if (!visible(node)) continue;
    node.dataset.drawn = "";
    const { figure, numbers } = await load(node.dataset.figure);
    const values = node.textContent && JSON.parse(node.textContent);  // this page's values for a heat map that many pages share
    const data = figure?.data.map((trace, k) => (values ? { ...trace, z: values[k] } : trace));
    if (figure) node.style.height = `${figure.layout.height}px`;  // plotly forgets the height when the window's size changes
    if (figure) await Plotly.newPlot(node, data, structuredClone(figure.layout), CONFIG);
    if (numbers) node.insertAdjacentHTML("afterend", numbers);
  }
}

/** Fill the columns A and B with the answers of two cells and show the samples that pass the filter. */
function compare(answers) {
  const [a, b] = ["a", "b"].map((id) => answers.cells[$(id).value]), metric = $("metric").value;
  const value = (cell, i) => cell.values[metric]?.[i] ?? null;
  const sign = answers.less_is_better.includes(metric) ? -1 : 1;
  const gain = (i) => (value(a, i) === null || value(b, i) === null ? NaN : sign * (value(a, i) - value(b, i)));
  const tests = { all: () => true, a: (i) => gain(i) > 0, b: (i) => gain(i) < 0, same: (i) => gain(i) === 0,
    differ: (i) => a.texts[i] !== b.texts[i], failed: (i) => a.failed[i] || b.failed[i] };
  const marks = new Map([[null, "–"], [1, '<b class="good">✓ 1.000</b>'], [0, '<b class="bad">✗ 0.000</b>']]);
  const score = (cell, i) => marks.get(value(cell, i)) ?? value(cell, i).toFixed(3);
  const words = (cell, i) => `${answers.texts[cell.texts[i]]}<div>${score(cell, i)} <span class="quiet">${leaves(cell, i)}</span></div>`;
  const leaves = (cell, i) => (cell.leaves[i] === null ? "" : `leaves full: ${cell.leaves[i] < 0 ? "never" : `token ${cell.leaves[i] + 1}`}`);
  const rows = [...document.querySelectorAll("#samples tbody tr")];
  rows.forEach((row, i) => {
    row.hidden = !tests[$("which").value](i);
    [row.cells[3].innerHTML, row.cells[4].innerHTML] = [words(a, i), words(b, i)];  // escaped by Python
  });
  ["a", "b"].forEach((id) => { $(`label-${id}`).textContent = $(id).selectedOptions[0].text; });
  $("shown").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} samples`;
}

/** Return the share of the chosen layers and KV heads that keep each visual token: [visual tokens], and the number of these heads. */
function shares(bits, tokens) {
  const pick = (list, id) => ($(id).value === "" ? list : [list[$(id).value]]);
  const heads = pick(bits, "layer").flatMap((layer) => pick(layer, "head")).map(atob);
  const counts = new Array(tokens).fill(0);
  for (const bytes of heads) for (let i = 0; i < tokens; i++) counts[i] += (bytes.charCodeAt(i >> 3) >> (7 - (i & 7))) & 1;
  return [counts.map((count) => count / heads.length), heads.length];
}

/** Colour the visible maps by the shares of their cells, all on one scale. */
function paint(kept) {
  const maps = [...document.querySelectorAll(".map")].filter(visible);
  if (!maps.length) return null;
  const drawn = maps.map((node) => shares(kept.bits[node.dataset.cell], kept.tokens));
  const most = Math.max(...drawn.flatMap(([share]) => share)) || 1, heads = drawn[0][1];
  $("kept-scale").textContent = `Dark blue: kept by none of ${heads} layers × heads; yellow: by ${(100 * most).toFixed(0)} % of them. ` +
    `The prompt has ${kept.tokens} visual tokens; counts are over all layers and heads.`;
  return Promise.all(maps.map((node, k) => {
    const { data, layout } = structuredClone(kept.figures[node.dataset.image]), [share] = drawn[k];
    const mean = (tokens) => (tokens.length ? tokens.reduce((sum, token) => sum + share[token], 0) / tokens.length : null);
    data[0].z = kept.places[node.dataset.image].map((row) => row.map(mean));
    data[0].zmax = most;
    return Plotly.react(node, data, layout, { ...CONFIG, displayModeBar: false });
  }));
}

/** Show the panels that name a choice's value, and keep choices in the page's address, for reloading, sending and going back. */
async function start() {
  const address = new URLSearchParams(location.hash.slice(1)), choices = [...document.querySelectorAll(".filters select[id]")];
  const answers = inline("answers-data"), kept = inline("kept-data");
  const update = async () => {
    for (const { id, value } of choices) {
      const panels = document.querySelectorAll(`[data-of="${id}"]`);
      panels.forEach((panel) => { panel.hidden = !panel.dataset.keys.split(" ").includes(value); });
    }
    if (answers) compare(answers);
    if (kept) await paint(kept);
    await draw();
  };
  const chosen = () => {
    choices.forEach(({ id, value }) => address.set(id, value));
    history.replaceState(null, "", `#${address}`);
    return run(update);
  };
  for (const select of choices) {
    if ([...select.options].some(({ value }) => value === address.get(select.id))) select.value = address.get(select.id);
    select.addEventListener("change", chosen);
  }
  const pages = document.querySelector("select.pages");
  pages?.addEventListener("change", () => { location.href = pages.value; });
  $("swap")?.addEventListener("click", () => { [$("a").value, $("b").value] = [$("b").value, $("a").value]; chosen(); });
  $("copy")?.addEventListener("click", async () => {
    getSelection().selectAllChildren($("command"));
    if (!document.execCommand("copy")) await navigator.clipboard.writeText($("command").textContent);
    $("copied").textContent = "copied";
  });
  await update();
  document.body.dataset.ready = "";
}
const PAPER = { beforeprint: { width: 700 }, afterprint: { width: null, autosize: true } };  // pixels across A4
for (const [when, size] of Object.entries(PAPER)) {
  addEventListener(when, () => document.querySelectorAll(".chart.js-plotly-plot").forEach((node) => Plotly.relayout(node, size)));
}
scheme();
dark.addEventListener("change", scheme);
addEventListener("hashchange", () => location.reload());  // another cell on the same page; replaceState does not fire this event
addEventListener("DOMContentLoaded", () => run(start));

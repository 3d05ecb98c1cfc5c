/* Which visual tokens a cell kept, over the sample's images. */
"use strict";

let told = null;

/** 0 or 1 of each visual token, of one layer's head. */
function bitsOf(text, n) {
  const bytes = atob(text), found = new Array(n);
  for (let i = 0; i < n; i++) found[i] = (bytes.charCodeAt(i >> 3) >> (7 - (i & 7))) & 1;
  return found;
}

/** Share of the chosen layers and heads that keep each visual token. */
function shares(cell, layer, head) {
  const n = told.visual.length, total = new Array(n).fill(0);
  const layers = layer === "" ? cell.bits : [cell.bits[layer]];
  let heads = 0;
  for (const own of layers) for (const text of head === "" ? own : [own[head]]) {
    heads += 1;
    bitsOf(text, n).forEach((bit, i) => { total[i] += bit; });
  }
  return { heads, share: total.map((sum) => sum / heads) };
}

/** The mean share on the grid that all edges of an image's boxes make: boxes of any layout, overlapping ones too. */
function grid(image, share) {
  const boxes = told.visual.map((box, i) => [box, share[i]]).filter(([box]) => box[0] === image);
  const edges = (first, last) => [...new Set(boxes.flatMap(([box]) => [box[first], box[last]]))].sort((a, b) => a - b);
  const ys = edges(1, 2), xs = edges(3, 4);
  const sum = ys.slice(1).map(() => xs.slice(1).fill(0)), n = ys.slice(1).map(() => xs.slice(1).fill(0));
  const at = (list) => new Map(list.map((value, i) => [value, i])), y = at(ys), x = at(xs);
  for (const [[, top, bottom, left, right], value] of boxes)
    for (let r = y.get(top); r < y.get(bottom); r++) for (let c = x.get(left); c < x.get(right); c++) { sum[r][c] += value; n[r][c] += 1; }
  return { xs, ys, z: sum.map((row, r) => row.map((value, c) => (n[r][c] ? value / n[r][c] : null))) };
}

const total = (list) => list.flat().reduce((a, b) => a + b, 0);
const PROOF = { true: "The digest in its row proves the choice.", null: "Its row has no digest to check the choice by.",
  false: "The digest in its row is that of ANOTHER choice: the row is damaged." };

/** A figure per image: the image, over it the shares. */
function overlays(number, sample, caption) {
  return el("div", { class: "cell-maps" }, el("p", {}, caption), sample.images.map((path, k) => el("figure", { class: "stack" },
    el("img", { src: path, alt: `image ${k + 1}` }), el("div", { id: `map-${number}-${k}`, class: "over" }))));
}

/** Cells of the choice: one, or all of a budget. */
function chosenCells(group) {
  const value = $("kept-cell").value;
  return value.startsWith("all ") ? Object.keys(told.cells).map(Number).filter((i) => group.cells[i].budget === value.slice(4)) : [+value];
}

async function keptShow(group, sample) {
  const cells = chosenCells(group), layer = $("layer").value, head = $("head").value;
  place.set({ kept: $("kept-cell").value, layer, head });
  [...drawn.keys()].filter((id) => id.startsWith("map-") || id === "kept-heads").forEach((id) => drawn.delete(id));
  tell("kept", cells.map((i) => overlays(i, sample, el("span", {}, el("b", {}, cellWords(group.cells[i])),
    `: ${total(told.cells[i].visual)} of its ${total(told.cells[i].entries)} entries are visual tokens. ${PROOF[told.cells[i].proven]}`))));
  // A chart over an image takes the image's size, which is there when it was decoded.
  await Promise.all([...document.querySelectorAll("#kept img")].map((image) => image.decode().catch(() => null)));
  const found = cells.map((i) => shares(told.cells[i], layer, head)), most = Math.max(...found.flatMap(({ share }) => share)) || 1;
  $("kept-scale").textContent = `Dark blue: kept by none of ${found[0].heads} layers × heads; yellow: by ${(100 * most).toFixed(0)} % of them. ` +
    `The prompt has ${told.visual.length} visual tokens; counts are over all layers and heads.`;
  const hidden = { visible: false, fixedrange: true };
  cells.forEach((i, n) => sample.images.forEach((_, k) => {
    const id = `map-${i}-${k}`, { xs, ys, z } = grid(k, found[n].share), box = $(id).getBoundingClientRect();
    chart(id, [{ type: "heatmap", x: xs, y: ys, z, zmin: 0, zmax: most, colorscale: SCALE, opacity: 0.62, showscale: false,
      hovertemplate: `kept by %{z:.0%} of ${found[n].heads} layers × heads<extra></extra>` }],
    { width: box.width, height: box.height, margin: { l: 0, r: 0, t: 0, b: 0 }, xaxis: { ...hidden, range: [0, 1] }, yaxis: { ...hidden, range: [1, 0] } });
  }));
  if (cells.length === 1) byHead(told.cells[cells[0]]);
}

function byHead(cell) {
  $("kept").append(el("h3", {}, "Visual tokens by layer and head"), el("div", { id: "kept-heads", class: "chart" }));
  const rows = cell.visual.map((own, i) => [String(i), ...own.map((visual, j) => `${visual} of ${cell.entries[i][j]}`)]);
  chart("kept-heads", [{ type: "heatmap", z: cell.visual, colorscale: SCALE, xgap: 1, ygap: 1, hovertemplate: "layer %{y}, KV head %{x}: %{z} visual tokens<extra></extra>",
    colorbar: { title: { text: "visual" } }, text: rows.map((row) => row.slice(1)), texttemplate: rows.length * rows[0].length < 200 ? "%{text}" : undefined }],
  { height: Math.min(700, 130 + 26 * rows.length), xaxis: { title: { text: "KV head" }, dtick: 1, showgrid: false },
    yaxis: { title: { text: "layer" }, autorange: "reversed", dtick: rows.length > 40 ? 4 : 1, showgrid: false } },
  () => plainTable(["layer", ...cell.visual[0].map((_, j) => `head ${j}: visual of all`)], rows));
}

async function keptMaps(group, sample) {
  $("kept-section").hidden = false;
  if (!sample.kept) {
    $("kept-form").hidden = true;
    $("kept-scale").textContent = "These rows do not tell which entries stay: run with keep=indices into a folder of its own.";
    return;
  }
  told = await mmkv.load(`kept/${place.get("group")}-${place.get("sample")}`);
  const cells = Object.keys(told.cells).map(Number), budgets = distinct(cells.map((i) => group.cells[i].budget).filter(Boolean));
  const pairs = [...budgets.map((budget) => [`all ${budget}`, `all at ${budget}`]), ...cells.map((i) => [i, cellWords(group.cells[i])])];
  options($("kept-cell"), pairs, place.get("kept") ?? pairs[0][0]);
  const shape = told.cells[cells[0]].bits;
  options($("layer"), [["", "mean of all"], ...shape.map((_, i) => [i, `${i}`])], place.get("layer") ?? "");
  options($("head"), [["", "mean of all"], ...shape[0].map((_, i) => [i, `${i}`])], place.get("head") ?? "");
  for (const id of ["kept-cell", "layer", "head"]) $(id).addEventListener("change", () => run(() => keptShow(group, sample)));
  await keptShow(group, sample);
}

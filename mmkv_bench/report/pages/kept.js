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

async function keptShow(group, sample) {
  const cell = told.cells[$("kept-cell").value], layer = $("layer").value, head = $("head").value;
  const { heads, share } = shares(cell, layer, head);
  place.set({ kept: $("kept-cell").value, layer, head });
  const sum = (list) => list.flat().reduce((a, b) => a + b, 0);
  const proof = cell.proven ? "The digest in the row proves the choice." : cell.proven === null ? "The row has no digest to check it by." :
    "The digest in the row is that of ANOTHER choice: the row is damaged.";
  $("kept-note").textContent = `${sum(cell.visual)} of the ${sum(cell.entries)} entries that stay are visual tokens, counted over all layers and heads; ` +
    `the prompt has ${told.visual.length}. ${proof}`;
  tell("kept", sample.images.map((path, k) => el("figure", { class: "stack" }, el("img", { src: path, alt: `image ${k + 1}` }), el("div", { id: `map-${k}`, class: "over" }))),
    el("h3", {}, "Visual tokens by layer and head"), el("div", { id: "kept-heads", class: "chart" }));
  // The chart over an image takes the image's size, which is there when it was decoded.
  await Promise.all([...document.querySelectorAll("#kept img")].map((image) => image.decode().catch(() => null)));
  const most = Math.max(...share) || 1, hidden = { visible: false, fixedrange: true };
  $("kept-scale").textContent = `Dark blue: kept by none of ${heads} layers × heads; yellow: by ${(100 * most).toFixed(0)} % of them.`;
  sample.images.forEach((_, k) => {
    const { xs, ys, z } = grid(k, share), box = $(`map-${k}`).getBoundingClientRect();
    chart(`map-${k}`, [{ type: "heatmap", x: xs, y: ys, z, zmin: 0, zmax: most, colorscale: SCALE, opacity: 0.62, showscale: false,
      hovertemplate: `kept by %{z:.0%} of ${heads} layers × heads<extra></extra>` }],
    { width: box.width, height: box.height, margin: { l: 0, r: 0, t: 0, b: 0 }, xaxis: { ...hidden, range: [0, 1] }, yaxis: { ...hidden, range: [1, 0] } });
  });
  const rows = cell.visual.map((own, i) => [String(i), ...own.map((visual, j) => `${visual} of ${cell.entries[i][j]}`)]);
  chart("kept-heads", [{ type: "heatmap", z: cell.visual, colorscale: SCALE, xgap: 1, ygap: 1, hovertemplate: "layer %{y}, KV head %{x}: %{z} visual tokens<extra></extra>",
    colorbar: { title: { text: "visual" } }, text: rows.map((row) => row.slice(1)), texttemplate: rows.length * rows[0].length < 200 ? "%{text}" : undefined }],
  { height: Math.min(700, 130 + 26 * rows.length), xaxis: { title: { text: "KV head" }, dtick: 1, showgrid: false },
    yaxis: { title: { text: "layer" }, autorange: "reversed", dtick: rows.length > 40 ? 4 : 1, showgrid: false } },
  plainTable(["layer", ...cell.visual[0].map((_, j) => `head ${j}: visual of all`)], rows));
}

async function keptMaps(group, sample) {
  $("kept-section").hidden = false;
  if (!sample.kept) {
    $("kept-form").hidden = true;
    $("kept-note").textContent = "These rows do not tell which entries stay: run with keep=indices into a folder of its own.";
    return;
  }
  told = await mmkv.load(`kept/${place.get("group")}-${place.get("sample")}`);
  const cells = Object.keys(told.cells).map(Number), evicting = cells.filter((i) => told.cells[i].visual.flat().some((n) => n < told.visual.length));
  options($("kept-cell"), cells.map((i) => [i, cellWords(group.cells[i])]), place.get("kept") ?? evicting.find((i) => !group.cells[i].label.startsWith("random")) ?? cells[0]);
  const shape = told.cells[cells[0]].bits;
  options($("layer"), [["", "mean of all"], ...shape.map((_, i) => [i, `${i}`])], place.get("layer") ?? "");
  options($("head"), [["", "mean of all"], ...shape[0].map((_, i) => [i, `${i}`])], place.get("head") ?? "");
  for (const id of ["kept-cell", "layer", "head"]) $(id).addEventListener("change", () => keptShow(group, sample));
  await keptShow(group, sample);
}

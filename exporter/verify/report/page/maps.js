// Gradients by layer: for each artifact a map, layers across and their parameters down.

const SVG = "http://www.w3.org/2000/svg";
const MOST_KINDS = 48;
const OUTPUTS = "out";
const MARGIN = 8; // for half of the last number
const CELL = { height: 15, most: 22, least: 3 };

// `backbone.layers.3.mixer.D` → layer `backbone.layers.3`, its `mixer.D`; without a number the layer
// is all but the last name.
function split(path) {
  const parts = path.split(".");
  const last = parts.findLastIndex((part) => /^\d+$/.test(part));
  const cut = last >= 0 && last < parts.length - 1 ? last + 1 : parts.length - 1;
  return [parts.slice(0, cut).join("."), parts.slice(cut).join(".")];
}

function worse(one, other) {
  if (!one) return other;
  const rank = (row) => [WORST[row.verdict], row.share === null ? -1 : row.share];
  const [a, b] = [rank(one), rank(other)];
  return b[0] > a[0] || (b[0] === a[0] && b[1] > a[1]) ? other : one;
}

// A cell's colour is how much of its bound the error takes; a failure and a missing figure have classes.
function paint(box, row) {
  if (row.verdict === "f") box.classList.add("cf");
  else if (row.share === null) box.classList.add("cn");
  else {
    const share = Math.min(1, row.share);
    const [low, high, part] = share < 0.5 ? ["--c0", "--c1", share * 2] : ["--c1", "--c2", share * 2 - 1];
    box.style.fill = `color-mix(in oklab, var(${high}) ${Math.round(100 * part)}%, var(${low}))`;
  }
}

// What a map has: layers in order, kinds of parameters, the worst row of each, and of the outputs.
function mapOf(number, mine) {
  const gradients = mine.filter((row) => row.tensor.startsWith("grad/"));
  const names = [...new Set(gradients.map((row) => row.tensor))];
  const simple = new Set(names.map((name) => split(name.slice(5))[1])).size > MOST_KINDS;
  const cells = new Map();
  const layers = new Set();
  const kinds = new Set();
  for (const row of gradients) {
    let [layer, kind] = split(row.tensor.slice(5));
    if (simple) kind = kind.split(".").pop();
    layers.add(layer);
    kinds.add(kind);
    const key = `${layer}\n${kind}`;
    cells.set(key, worse(cells.get(key), row));
  }
  const { runtime, artifact } = data.groups[number];
  const suffix = artifact.slice(artifact.indexOf("."));
  const forward = rows.filter(
    (row) => !row.tensor.startsWith("grad/") && row.tensor !== "*" && row.runtime === runtime &&
      (row.group === number || (row.program === "forward" && row.artifact.endsWith(suffix)))
  );
  const out = forward.reduce((worst, row) => worse(worst, row), null);
  return { number, layers: [...layers], kinds: [...kinds], cells, out };
}

function svg(tag, attributes, text = "") {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text) made.textContent = text;
  return made;
}

function short(text, length) {
  return text.length <= length ? text : `…${text.slice(1 - length)}`;
}

// What stands upright below a layer without a number.
function named(layer) {
  return numberOf(layer) === null && short(layer.split(".").pop(), 10);
}

function numberOf(layer) {
  const found = layer.split(".").filter((part) => /^\d+$/.test(part));
  return found.length && /\d$/.test(layer) ? found.join(".") : null;
}

function drawMap(holder, map, width) {
  const columns = map.layers.length + (map.out ? 1.6 : 0);
  const letters = Math.min(20, Math.max(...map.kinds.map((kind) => kind.length)), Math.floor((width * 0.4) / 6.4));
  const left = letters * 6.4 + 8;
  const cell = Math.min(CELL.most, Math.max(CELL.least, (width - left - MARGIN) / columns));
  const bottom = map.kinds.length * CELL.height;
  const upright = map.layers.map(named).filter((name) => name && cell >= 9);
  const axis = 12 + 6.2 * Math.max(OUTPUTS.length, ...upright.map((name) => name.length));
  const picture = svg("svg", { width: Math.max(width, left + columns * cell + MARGIN), height: bottom + axis, role: "application", tabindex: 0 });
  const at = new Map();
  const put = (row, column, line, x, height) => {
    const box = svg("rect", { x, y: line * CELL.height, width: cell, height, rx: Math.min(2, cell / 5) });
    paint(box, row);
    picture.append(box);
    if (row.verdict === "f" && cell > 8) {
      const [cx, cy, r] = [x + cell / 2, line * CELL.height + height / 2, 2.6];
      picture.append(svg("path", { class: "mark", d: `M${cx - r} ${cy - r}l${2 * r} ${2 * r}m0 ${-2 * r}l${-2 * r} ${2 * r}` }));
    }
    box.row = row;
    at.set(`${column} ${line}`, box);
  };
  map.kinds.forEach((kind, line) => {
    picture.append(svg("text", { x: left - 7, y: line * CELL.height + 11, "text-anchor": "end" }, short(kind, letters)));
    map.layers.forEach((layer, column) => {
      const row = map.cells.get(`${layer}\n${kind}`);
      if (row) put(row, column, line, left + column * cell, CELL.height);
    });
  });
  const longest = Math.max(...map.layers.map((layer) => (numberOf(layer) || "").length));
  const every = Math.ceil((6 * longest + 7) / cell);
  let count = 0;
  map.layers.forEach((layer, column) => {
    const x = left + (column + 0.5) * cell;
    if (numberOf(layer) === null) label(x, named(layer), true);
    else if (count++ % every === 0 && (every === 1 || !named(map.layers[column + 1] || ""))) label(x, numberOf(layer), false);
  });
  if (map.out) {
    const x = left + (map.layers.length + 0.6) * cell;
    put(map.out, map.layers.length, 0, x, bottom);
    label(x + cell / 2, OUTPUTS, true);
  }
  function label(x, text, upright) {
    if (upright && cell < 9 && text !== OUTPUTS) return;
    const place = upright ? { x, y: bottom + 5, transform: `rotate(-90 ${x} ${bottom + 5})`, "text-anchor": "end", "dominant-baseline": "central" } : { x, y: bottom + 14, "text-anchor": "middle" };
    picture.append(svg("text", { class: "tick", ...place }, text));
  }
  interact(picture, at, map);
  holder.replaceChildren(picture);
}

const tip = document.getElementById("tip");

function tell(row, box) {
  const what = row.share === null ? VERDICTS[row.verdict] : `${shareText(row.share)} of its bound`;
  tip.textContent = `${row.tensor}: ${what}; off by ${figure(row.error) || "?"}, ${row.case}`;
  tip.hidden = false;
  const [cell, own] = [box.getBoundingClientRect(), tip.getBoundingClientRect()];
  const x = Math.min(innerWidth - own.width - 8, Math.max(8, cell.x + cell.width / 2 - own.width / 2));
  const above = cell.y - own.height - 8;
  tip.style.transform = `translate(${x}px, ${above > 4 ? above : cell.bottom + 8}px)`;
}

function interact(picture, at, map) {
  const cursor = svg("rect", { class: "cursor", rx: 2, visibility: "hidden" });
  picture.append(cursor);
  let [column, line] = [0, 0];
  const worst = [...at.values()].reduce((found, box) => worse(found, box.row), null);
  picture.setAttribute("aria-label", `${map.layers.length} layers; the worst is ${worst.tensor}, ${shareText(worst.share)} of its bound. Arrow keys move, Enter lists.`);
  const list = (row) => show(row.tensor.startsWith("grad/") ? { text: row.tensor } : { text: row.tensor, runtime: row.runtime }, row.tensor.startsWith("grad/") ? map.number : null);
  const move = (box) => {
    for (const name of ["x", "y", "width", "height"]) cursor.setAttribute(name, box.getAttribute(name));
    cursor.setAttribute("visibility", "visible");
    tell(box.row, box);
  };
  const leave = () => {
    tip.hidden = true;
    cursor.setAttribute("visibility", "hidden");
  };
  picture.addEventListener("pointerover", (event) => (event.target.row ? move(event.target) : leave()));
  picture.addEventListener("pointerleave", leave);
  picture.addEventListener("blur", leave);
  picture.addEventListener("click", (event) => event.target.row && list(event.target.row));
  picture.addEventListener("focus", () => picture.matches(":focus-visible") && step(0, 0));
  picture.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const box = at.get(`${column} ${line}`);
    if (event.key === "Enter" && box) list(box.row);
    else if (event.key === "Escape") leave();
    else if (moves[event.key]) step(...moves[event.key]);
    else return;
    event.preventDefault();
  });
  // To the next cell in that direction: along a row over gaps, down to the nearest of the next rows.
  function step(right, down) {
    const places = [...at.keys()].map((key) => key.split(" ").map(Number));
    const ahead = places.filter(([x, y]) =>
      right ? (x - column) * right > 0 && (y === line || x === map.layers.length || column === map.layers.length) : down ? (y - line) * down > 0 : true
    );
    const far = ([x, y]) => Math.abs(x - column) + 1000 * Math.abs(y - line);
    const across = ([x, y]) => Math.abs(x - column) + (y === line ? 0 : 0.5);
    ahead.sort((a, b) => (right ? across(a) - across(b) : far(a) - far(b)));
    if (ahead.length) [column, line] = ahead[0];
    const box = at.get(`${column} ${line}`);
    if (box) move(box);
  }
}

function drawMaps() {
  const place = document.getElementById("maps");
  if (!place) return;
  const byGroup = new Map(data.groups.map((_, number) => [number, []]));
  for (const row of rows) byGroup.get(row.group).push(row);
  const maps = [...byGroup]
    .filter(([number, mine]) => data.groups[number].runtime !== data.float64 && mine.some((row) => row.tensor.startsWith("grad/")))
    .map(([number, mine]) => mapOf(number, mine));
  const most = Math.max(0, ...maps.map((map) => map.layers.length));
  place.style.setProperty("--panel", `${Math.min(900, Math.max(290, 150 + 13 * most))}px`);
  const holders = maps.map((map) => {
    const { runtime, name } = data.groups[map.number];
    const worst = [...map.cells.values()].reduce((found, row) => worse(found, row), null);
    const title = element("h3", {}, element("b", { textContent: runtime }), element("span", { textContent: name }), element("span", { textContent: worst.share === null ? "" : `worst ${shareText(worst.share)}` }));
    const holder = element("div", {});
    place.append(element("div", { className: "map" }, title, holder));
    return holder;
  });
  let before = 0;
  new ResizeObserver(() => {
    const width = holders[0].clientWidth;
    if (width === before) return;
    before = width;
    tip.hidden = true;
    maps.forEach((map, i) => drawMap(holders[i], map, width));
  }).observe(holders[0]);
}

if (document.getElementById("maps") && rows.some((row) => row.tensor.startsWith("grad/") && row.runtime !== data.float64)) drawMaps();

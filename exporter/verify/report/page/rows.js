"use strict";
// The list of all comparisons: filtered, sorted, and drawn a hundred rows at a time.

const data = JSON.parse(document.getElementById("data").textContent);
const VERDICTS = { p: "pass", f: "fail", e: "error", u: "unsupported" };
const STEP = 100;

const rows = data.rows.map((row, order) => {
  const [group, kase, tensor, verdict, share, error, bound, rms, rmsBound, baseline, scale, reason, hint] = row;
  const { runtime, name, program } = data.groups[group];
  const said = { case: data.cases[kase], tensor: data.tensors[tensor], reason: data.reasons[reason] || "" };
  return {
    order, group, verdict, hint, runtime, name, program, ...said, ...data.groups[group], row,
    share: number(share), error: number(error), bound: number(bound), rms: number(rms),
    rmsBound: number(rmsBound), baseline: number(baseline), scale: number(scale),
    text: `${said.tensor} ${said.case} ${said.reason} ${runtime} ${name} ${program}`.toLowerCase(),
  };
});

function number(value) {
  return value === null ? null : Number(value);
}

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}

function figure(value, digits = 3) {
  if (value === null) return "";
  if (value === Infinity) return "∞";
  if (value === 0) return "0";
  return value >= 0.01 && value < 10000 ? String(Number(value.toPrecision(digits))) : value.toExponential(digits - 1).replace("e+", "e");
}

function shareText(value) {
  if (value === null) return "";
  if (value === Infinity) return "∞";
  if (value < 10) return value.toFixed(2);
  return value < 99999 ? Math.round(value).toLocaleString("en") : figure(value, 2);
}

function place(row) {
  return [row.runtime, row.name, row.case].filter((part) => part && part !== "*").join(" · ");
}

const form = document.getElementById("filters");
const body = document.querySelector("#list tbody");
const more = document.getElementById("more");
const shownText = document.getElementById("shown");
const view = { rows: [], drawn: 0, sort: "share", down: true, group: null };

for (const [field, values] of [
  ["runtime", rows.map((row) => row.runtime)],
  ["name", rows.map((row) => row.name)],
  ["case", rows.map((row) => row.case)],
]) {
  for (const value of new Set(values.filter((value) => value && value !== "*"))) {
    form.elements.namedItem(field).append(element("option", { value, textContent: value }));
  }
}

// No figures: worse than any, or, where it is no failure, of no interest.
const WORST = { f: 3, e: 2, u: 1, p: 0 };
const SORTS = {
  share: (row) => (row.share === null ? (row.verdict === "f" ? Infinity : -1) : row.share),
  error: (row) => (row.error === null ? -1 : row.error),
  bound: (row) => (row.bound === null ? -1 : row.bound),
  tensor: (row) => row.order,
  where: (row) => place(row),
};

function chosen() {
  const wanted = Object.fromEntries(new FormData(form));
  const words = wanted.text.toLowerCase().split(/\s+/).filter(Boolean);
  const found = rows.filter(
    (row) =>
      (view.group === null || row.group === view.group) &&
      ["runtime", "name", "case", "verdict"].every((key) => !wanted[key] || row[key] === wanted[key]) &&
      words.every((word) => row.text.includes(word))
  );
  const key = SORTS[view.sort];
  const keys = new Map(found.map((row) => [row, key(row)]));
  const compare = (one, other) => {
    if (view.sort === "share" && one.verdict !== other.verdict) return WORST[one.verdict] - WORST[other.verdict];
    const [a, b] = [keys.get(one), keys.get(other)];
    return typeof a === "string" ? a.localeCompare(b) : a - b || 0;
  };
  return found.sort((one, other) => (view.down ? -compare(one, other) : compare(one, other)) || one.order - other.order);
}

function refresh() {
  view.rows = chosen();
  view.drawn = 0;
  body.replaceChildren();
  const all = rows.length.toLocaleString("en");
  const some = view.rows.length.toLocaleString("en");
  const only = view.group === null ? "" : ` (${[data.groups[view.group].runtime, data.groups[view.group].name].filter(Boolean).join(" · ")}, ${data.groups[view.group].program})`;
  shownText.textContent = (view.rows.length === rows.length ? `${all} comparisons` : `${some} of ${all} comparisons`) + only;
  for (const button of document.querySelectorAll("[data-sort]")) {
    const on = button.dataset.sort === view.sort;
    button.setAttribute("aria-pressed", String(on));
    button.textContent = button.textContent.replace(/ [↓↑]$/, "") + (on ? (view.down ? " ↓" : " ↑") : "");
    button.closest("th").setAttribute("aria-sort", on ? (view.down ? "descending" : "ascending") : "none");
  }
  draw();
}

function draw() {
  const part = view.rows.slice(view.drawn, view.drawn + STEP);
  body.append(...part.map(line));
  view.drawn += part.length;
  more.hidden = view.drawn >= view.rows.length;
  more.textContent = `Show more: ${(view.rows.length - view.drawn).toLocaleString("en")} left`;
}

function line(row) {
  const verdict = VERDICTS[row.verdict];
  const name = row.tensor === "*" ? row.name || row.runtime : row.tensor;
  const button = element("button", { type: "button" }, element("i", { className: `dot v-${verdict}` }), element("code", { textContent: name }));
  button.setAttribute("aria-expanded", "false");
  button.setAttribute("aria-label", `${name}: ${verdict}`);
  const share = element("td", { className: "figure share" });
  if (row.share !== null) {
    const bar = element("i");
    bar.style.width = `${100 * Math.min(1, row.share)}%`;
    const over = row.verdict === "p" ? "" : " over";
    share.append(element("span", { className: `meter${over}` }, element("i", { className: "bar" }, bar), element("b", { textContent: shareText(row.share) })));
  } else if (row.verdict !== "p") {
    share.append(element("span", { className: `verdict ${verdict}`, textContent: verdict }));
  }
  const made = element(
    "tr", {},
    element("td", { className: "tensor" }, button),
    element("td", { className: "where", textContent: place(row) }),
    element("td", { className: "figure error", textContent: figure(row.error) }),
    element("td", { className: "figure bound", textContent: figure(row.bound) }),
    share
  );
  made.addEventListener("click", () => toggle(made, button, row));
  return made;
}

function toggle(made, button, row) {
  if (window.getSelection().toString()) return; // a name is being copied
  const open = button.getAttribute("aria-expanded") === "true";
  button.setAttribute("aria-expanded", String(!open));
  made.classList.toggle("open", !open);
  if (open) made.nextElementSibling.remove();
  else made.after(detail(row));
}

function detail(row) {
  const facts = [
    ["verdict", VERDICTS[row.verdict]],
    ["program", row.program],
    ["provider", row.provider],
    ["largest error", figure(row.error, 4)],
    ["its bound", figure(row.bound, 4)],
    ["root mean square error", figure(row.rms, 4)],
    ["bound of that", figure(row.rmsBound, 4)],
    ["the model’s own error", figure(row.baseline, 4)],
    ["largest value of the truth", figure(row.scale, 4)],
  ].filter(([, value]) => value && value !== "*");
  const list = element("dl", {}, ...facts.map(([name, value]) => element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value }))));
  const said = [row.reason, row.hint].filter(Boolean).join("; ");
  const cell = element("td", { colSpan: 5 }, said ? element("p", { textContent: said }) : "", list);
  return element("tr", { className: "detail" }, cell);
}

// Shows the rows that `fields` name, and goes there.
function show(fields, group = null) {
  for (const control of form.elements) if (control.name) control.value = fields[control.name] || "";
  view.group = group;
  refresh();
  document.getElementById("rows").scrollIntoView();
  document.querySelector("#list tbody button")?.focus({ preventScroll: true });
}

form.addEventListener("input", refresh);
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => setTimeout(() => { view.group = null; refresh(); }));
more.addEventListener("click", () => {
  const first = body.childElementCount;
  draw();
  body.children[first]?.querySelector("button")?.focus();
});
for (const button of document.querySelectorAll("[data-sort]")) {
  button.addEventListener("click", () => {
    view.down = view.sort === button.dataset.sort ? !view.down : !["tensor", "where"].includes(button.dataset.sort);
    view.sort = button.dataset.sort;
    refresh();
  });
}
for (const button of document.querySelectorAll("[data-group]")) {
  button.addEventListener("click", () => show({}, Number(button.dataset.group)));
}
for (const button of document.querySelectorAll("[data-tensor]")) {
  button.addEventListener("click", () => show({ text: button.dataset.tensor, verdict: button.dataset.verdict }));
}
// The rest comes by itself when the end is near.
new IntersectionObserver((entries) => {
  if (entries.some((entry) => entry.isIntersecting) && !more.hidden) draw();
}, { rootMargin: "600px" }).observe(more);
refresh();

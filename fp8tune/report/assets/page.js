// Draws the report's pages from its data. Text of the database goes into text nodes and Vega data only, never into
// markup, an address or an expression.
"use strict";

const MANY = 300; // rows of a table that are shown at once
const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// A part's rows: an object a row, by the names of its columns.
function rowsOf(report, part) {
  const columns = report.templates[part.template].columns;
  const values = part.columns.map((packed) =>
    Array.isArray(packed) ? packed : packed.places.map((place) => packed.names[place]));
  return Array.from({ length: part.length }, (_, row) =>
    Object.fromEntries(columns.map((column, number) => [column.name, values[number][row]])));
}

// The current page: #VIEW/ID?kernel=...&device=...
function place() {
  const [path, query] = location.hash.slice(1).split("?");
  const [view, id] = path.split("/");
  return { view: view || "overview", id: id || "", filter: new URLSearchParams(query || "") };
}

function address(view, id, filter) {
  const query = filter.toString();
  return `#${view}${id ? `/${id}` : ""}${query ? `?${query}` : ""}`;
}

function passes(filter, row) {
  return [...filter].every(([name, value]) => row[name] === undefined || row[name] === null || row[name] === value);
}

function shown(column, value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (column.digits === null) return value.toLocaleString("en", { useGrouping: !column.name.startsWith("axis_") && value >= 10000 });
  return value.toLocaleString("en", { minimumFractionDigits: column.digits, maximumFractionDigits: column.digits }) + column.unit;
}

function ordered(rows, name, descending) {
  const empty = (value) => value === null || value === undefined || value === "";
  return [...rows].sort((a, b) => {
    const [x, y] = [a[name], b[name]];
    if (empty(x) || empty(y)) return empty(x) - empty(y);
    const by = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
    return descending ? -by : by;
  });
}

// A table whose headers sort it; of many rows the first, until all are asked for.
function tableOf(caption, columns, rows) {
  const visible = columns.filter((column) => !column.hidden);
  const numeric = new Set(visible.filter((column) => rows.some((row) => typeof row[column.name] === "number")).map((column) => column.name));
  const state = { name: "", descending: false, all: rows.length <= MANY, text: "" };
  const body = make("tbody");
  const count = make("span", { role: "status" });
  const more = make("button", { type: "button", hidden: state.all, click: () => { state.all = true; more.hidden = true; fill(); } }, `Show all ${rows.length} rows`);
  const heads = visible.map((column) => {
    const button = make("button", { type: "button", click: () => {
      state.descending = state.name === column.name && !state.descending;
      state.name = column.name;
      heads.forEach((head) => head.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
      fill();
    } }, column.title);
    const head = make("th", { scope: "col", class: numeric.has(column.name) && "number" }, button);
    return head;
  });
  function fill() {
    const wanted = state.text.toLowerCase();
    let found = rows.filter((row) => !wanted || visible.some((column) => shown(column, row[column.name]).toLowerCase().includes(wanted)));
    if (state.name) found = ordered(found, state.name, state.descending);
    const listed = state.all ? found : found.slice(0, MANY);
    body.replaceChildren(...listed.map((row) => make("tr", {}, ...visible.map((column, number) => {
      const text = shown(column, row[column.name]);
      const target = column.link && row[column.link];
      const inner = target ? make("a", { href: target }, text) : text;
      const kind = numeric.has(column.name) ? "number" : text.length > 90 && "long";
      return make(number ? "td" : "th", { scope: !number && "row", class: kind }, inner);
    }))));
    count.textContent = found.length === rows.length && listed.length === rows.length ? "" : `${listed.length} of ${rows.length} rows`;
  }
  fill();
  const search = make("input", { type: "search", input: () => { state.text = search.value; fill(); } });
  const tools = make("div", { class: "tools" }, ...(rows.length > 12 ? [make("label", {}, "Only rows with ", search)] : []), more, count);
  const grid = make("table", {}, make("caption", {}, caption), make("thead", {}, make("tr", {}, ...heads)), body);
  return make("div", {}, tools, make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${caption}, table` }, grid));
}

let drawing = 0; // of the view that is shown now: what is finished later than the next click is thrown away

async function draw(box, spec, rows) {
  const mine = drawing;
  try {
    const { column, step } = spec.usermeta || {};
    const size = step ? { height: step * new Set(rows.map((row) => row[column])).size } : {};
    const made = await vegaEmbed(box, { ...structuredClone(spec), ...size, datasets: { ...spec.datasets, rows } }, {
      mode: "vega-lite", renderer: "svg", actions: false, ast: true, hover: false,
    });
    if (mine !== drawing) made.finalize();
    box.querySelectorAll("svg").forEach((svg) => { svg.removeAttribute("role"); svg.setAttribute("aria-hidden", "true"); });
  } catch (error) {
    console.error(error);
    box.replaceChildren(`This chart could not be drawn (${error.message}). The table below has its rows.`);
  }
  box.dataset.drawn = rows.length;
}

function sectionOf(report, view, part, filter) {
  const template = report.templates[part.template];
  const rows = rowsOf(report, part).filter((row) => passes(filter, row));
  const section = make("section", { id: `${view.id}-${template.id}`, class: !template.chart && "wide", "aria-labelledby": `${view.id}-${template.id}-title` },
    make("h3", { id: `${view.id}-${template.id}-title` }, template.title), make("p", {}, template.text));
  if (!rows.length) {
    section.append(make("p", { class: "empty" }, part.length ? "No row passes the filter." : template.empty));
    return section;
  }
  if (template.chart) {
    const box = make("div", { class: "picture", role: "group", "aria-label": `Chart: ${template.title}. The table below has its rows.` });
    section.append(make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${template.title}, chart` }, box));
    const details = make("details", {}, make("summary", {}, `Table of ${rows.length} ${rows.length === 1 ? "row" : "rows"}`));
    details.addEventListener("toggle", () => {
      if (details.open && details.childElementCount === 1) details.append(tableOf(template.title, template.columns, rows));
    });
    section.append(details);
    draw(box, template.chart, rows);
  } else {
    section.append(tableOf(template.title, template.columns, rows));
  }
  if (part.note) section.append(make("p", { class: "note" }, part.note));
  return section;
}

function chooser(label, values, chosen, changed) {
  const select = make("select", { id: `filter-${label}`, change: () => changed(select.value) },
    make("option", { value: "" }, "all"),
    ...values.map((value) => make("option", { value, selected: value === chosen }, value)));
  return make("span", {}, make("label", { for: select.id }, label), " ", select);
}

function filters(report, here) {
  return ["kernel", "device"].filter((name) => report.filters[name].length > 1).map((name) => chooser(name, report.filters[name], here.filter.get(name), (value) => {
    const filter = new URLSearchParams(here.filter);
    if (value) filter.set(name, value); else filter.delete(name);
    location.hash = address(here.view, here.id, filter);
  }));
}

function sizePicker(report, here) {
  const offered = report.sizes.filter((size) => size.id === here.id || passes(here.filter, size));
  const number = offered.findIndex((size) => size.id === here.id);
  const select = make("select", { id: "size-picker", change: () => { location.hash = address("size", select.value, here.filter); } },
    ...offered.map((size) => make("option", { value: size.id, selected: size.id === here.id }, size.title)));
  const step = (offset, text) => {
    const to = offered[number + offset];
    return to ? make("a", { href: address("size", to.id, here.filter) }, text) : make("span", { class: "off" }, text);
  };
  return make("p", { class: "picker" }, step(-1, "previous"), make("span", { class: "chosen" }, make("label", { for: select.id }, "Size"), " ", select), step(1, "next"));
}

function show(report) {
  drawing += 1;
  const here = place();
  const main = byId("main");
  const tabs = report.views.map((view) => [view.id, view.title]);
  if (report.sizes.length) tabs.splice(1, 0, ["size", "Sizes"]);
  byId("tabs").replaceChildren(...tabs.map(([id, title]) =>
    make("li", {}, make("a", { href: address(id, "", here.filter), "aria-current": id === here.view && "page" }, title))));
  byId("filters").replaceChildren(...filters(report, here));
  let view = report.views.find((one) => one.id === here.view);
  const content = [];
  if (here.view === "size") {
    const offered = report.sizes.filter((size) => passes(here.filter, size));
    view = report.sizes.find((size) => size.id === here.id) || (here.id ? null : offered[0]);
    if (view) content.push(sizePicker(report, { ...here, id: view.id }));
  }
  if (!view) {
    document.title = report.title;
    main.replaceChildren(make("h2", {}, "Not in this report"), make("p", {}, "This link leads to a row or view that this file does not have. It may be in a newer or larger report."));
    return;
  }
  document.title = `${view.title} - ${report.title}`;
  content.push(make("h2", {}, view.title), make("p", { class: "text" }, view.text));
  if (view.facts.length) content.push(make("dl", {}, ...view.facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])));
  const filter = here.view === "size" ? new URLSearchParams() : here.filter;
  content.push(...view.parts.map((part) => sectionOf(report, view, part, filter)));
  main.replaceChildren(...content);
}

(async () => {
  const report = await unpacked(byId("data").textContent);
  byId("about").replaceChildren(report.about);
  byId("title").textContent = report.title;
  window.addEventListener("hashchange", () => { show(report); byId("main").focus({ preventScroll: true }); window.scrollTo(0, 0); });
  show(report);
  document.body.dataset.ready = "yes";
})();

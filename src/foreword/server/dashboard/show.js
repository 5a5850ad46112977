// Numbers with their units, and elements that hold text. Text from the server becomes text nodes only.

export function make(tag, props = {}, ...parts) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...parts.filter((part) => part != null));
  return element;
}

export const byId = (id) => document.getElementById(id);

export const count = (number) => (number == null ? "–" : Math.round(number).toLocaleString("en-US"));

export const amount = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

export const share = (number) => (number == null ? "–" : `${(100 * number).toFixed(number > 0 && number < 0.1 ? 1 : 0)} %`);

export function seconds(number) {
  if (number == null) return "–";
  if (number === 0) return "0 s";
  if (number < 1) return `${Math.round(number * 1000)} ms`;
  if (number < 60) return `${number.toFixed(1)} s`;
  if (number < 3600) return `${Math.floor(number / 60)} min ${Math.floor(number % 60)} s`;
  return `${Math.floor(number / 3600)} h ${Math.floor((number % 3600) / 60)} min`;
}

// A table of `columns` [title, cell of a row, whether it is a number], or words where there are no rows.
export function table(rows, columns, empty) {
  if (!rows.length) return make("p", { class: "empty" }, empty);
  const kind = (number) => (number ? { class: "n" } : {});
  const head = make("tr", {}, ...columns.map(([title, , number]) => make("th", { scope: "col", ...kind(number) }, title)));
  const body = rows.map((row) => make("tr", {}, ...columns.map(([, cell, number]) => make("td", kind(number), cell(row)))));
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

export const meter = (value, max, label) => make("meter", { value, max: Math.max(max, 1), min: 0, "aria-label": label });

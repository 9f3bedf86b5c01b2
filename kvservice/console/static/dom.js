// Elements from data. Texts come from engines, tenants and clients: they only ever become text nodes and attributes.

export const byId = (id) => document.getElementById(id);

/** An element. `props`: attributes; `on…` a listener, `style` properties, `class` the class. Children: elements, texts. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else element.setAttribute(name === "class" ? "class" : name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Make `parent` have the children of `rows`, by key: elements that stay are kept, so that focus and widths stay too.
 * `make(row)` returns an element with a method `update(row)`.
 */
export function keyed(parent, rows, keyOf, make) {
  const old = new Map([...parent.children].map((child) => [child.rowKey, child]));
  let before = parent.firstElementChild;
  for (const row of rows) {
    const key = keyOf(row);
    let element = old.get(key);
    if (element) old.delete(key);
    else {
      element = make(row);
      element.rowKey = key;
    }
    element.update(row);
    if (element === before) before = before.nextElementSibling;
    else parent.insertBefore(element, before);
  }
  for (const element of old.values()) element.remove();
}

/** A bar of parts: [{kind, share, title}]. Its text is for those who do not see it. */
export function bar(className = "bar") {
  const element = h("div", { class: className, role: "img" });
  element.update = (parts, label) => {
    element.setAttribute("aria-label", label);
    const shown = parts.filter((part) => part.share > 0);
    keyed(element, shown, (part) => part.kind, (part) => {
      const span = h("span", { class: `b-${part.kind}` });
      span.update = (now) => {
        span.style.width = `${Math.max(now.share * 100, 0.6).toFixed(2)}%`;
        span.title = now.title ?? "";
      };
      return span;
    });
  };
  return element;
}

/**
 * A table that keeps its rows. Columns: {key, label, kind: "num" | "wide" | "text" | "name" | "state", sort(row), cell(row, td)}.
 * `cell` fills the given td, which is the same for a row as long as the row is there. With `cards`, a narrow screen shows
 * each row as a card.
 */
export class Table {
  constructor(home, { columns, keyOf, empty, sorted = null, label, cards = false }) {
    this.home = home;
    this.columns = columns;
    this.keyOf = keyOf;
    this.sorted = sorted; // {key, down}
    this.rows = [];
    this.more = h("p", { class: "more", hidden: true });
    this.empty = h("p", { class: "empty", hidden: true }, empty);
    this.body = h("tbody");
    this.heads = columns.map((column) => this.head(column));
    const table = h("table", { class: cards ? "cards" : undefined, "aria-label": label }, h("thead", {}, h("tr", {}, this.heads)), this.body);
    this.frame = h("div", { class: "scroll" }, table);
    home.replaceChildren(this.frame, this.empty, this.more);
  }

  head(column) {
    const kind = column.kind === "num" ? "num" : undefined;
    if (!column.sort) return h("th", { scope: "col", class: kind }, column.label);
    const button = h("button", { type: "button", class: "sort", onclick: () => this.sortBy(column) }, column.label);
    return h("th", { scope: "col", class: kind }, button);
  }

  sortBy(column) {
    const same = this.sorted?.key === column.key;
    this.sorted = { key: column.key, down: same ? !this.sorted.down : column.kind === "num" || column.kind === "wide" };
    this.update(this.rows, this.total);
  }

  update(rows, total = rows.length) {
    this.rows = rows;
    this.total = total;
    this.frame.hidden = rows.length === 0;
    this.empty.hidden = rows.length > 0;
    this.more.hidden = total <= rows.length;
    setText(this.more, `and ${total - rows.length} more`);
    this.columns.forEach((column, index) => {
      const mine = this.sorted?.key === column.key;
      if (mine) this.heads[index].setAttribute("aria-sort", this.sorted.down ? "descending" : "ascending");
      else this.heads[index].removeAttribute("aria-sort");
    });
    keyed(this.body, this.inOrder(rows), this.keyOf, () => this.row());
  }

  inOrder(rows) {
    const column = this.columns.find((one) => one.key === this.sorted?.key);
    if (!column) return rows;
    const sign = this.sorted.down ? -1 : 1;
    return [...rows].sort((a, b) => {
      const [x, y] = [column.sort(a), column.sort(b)];
      return sign * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y);
    });
  }

  row() {
    const cells = this.columns.map((column) => h("td", { class: column.kind, "data-label": column.label }));
    const element = h("tr", {}, cells);
    element.update = (row) => this.columns.forEach((column, index) => column.cell(row, cells[index]));
    return element;
  }
}

/** Fill a cell with a text, and a second line below it. */
export function fill(td, text, second) {
  if (second === undefined) return setText(td, text);
  if (!td.lines) {
    td.lines = [h("div"), h("div", { class: "second" })];
    td.replaceChildren(...td.lines);
  }
  setText(td.lines[0], text);
  setText(td.lines[1], second);
  td.lines[1].hidden = second === "";
}

/** Fill a cell with a button that opens something. */
export function fillLink(td, text, second, open) {
  if (!td.link) {
    td.link = h("button", { type: "button", class: "link", onclick: () => td.open() });
    td.below = h("div", { class: "second" });
    td.replaceChildren(td.link, td.below);
  }
  td.open = open;
  setText(td.link, text);
  setText(td.below, second);
}

export function fillPill(td, text, kind, second = "") {
  if (!td.pill) {
    td.pill = h("span", { class: "pill" });
    td.below = h("div", { class: "second" });
    td.replaceChildren(td.pill, td.below);
  }
  td.pill.className = `pill ${kind}`;
  setText(td.pill, text);
  setText(td.below, second);
}

/** Fill a cell with a bar of what is used, 0 to 1, and a text below it; without a bound (null) with the text alone. */
export function fillBar(td, share, text, kind = "sealed") {
  if (!td.bar) {
    td.bar = bar();
    td.below = h("div", { class: "second" });
    td.replaceChildren(h("div", { class: "cell-bar" }, td.bar, td.below));
  }
  td.bar.hidden = share === null;
  td.bar.update([{ kind, share: Math.min(share ?? 0, 1) }], text);
  setText(td.below, text);
}

// The list of blocks: asked for by a click, because each answer costs the shards some work.

import { Table, byId, fill, h, setText } from "./dom.js";
import { count, plural, size, span } from "./format.js";

const STATES = ["sealed", "leased", "writing", "reserved", "quarantined"];

export function showBlocks(page, ask) {
  const form = byId("filters");
  const home = byId("blocks");
  let table = null;
  let note = null;

  const options = (id, names, all) => {
    const select = byId(id);
    const kept = select.value;
    select.replaceChildren(h("option", { value: "" }, all), ...names.map((name) => h("option", { value: name }, name)));
    if (names.includes(kept)) select.value = kept;
  };
  const offer = () => {
    options("filter-node", page().nodes.map((row) => row.node_id), "all");
    options("filter-model", [...new Set(page().models.map((row) => row.model))], "all");
  };
  options("filter-state", STATES, "sealed or leased");
  offer();
  form.addEventListener("focusin", (event) => {
    if (event.target.tagName === "SELECT") offer();
  });

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const query = Object.fromEntries([...new FormData(form)].filter(([, value]) => value));
    try {
      const answer = await ask(query);
      if (!table) {
        const frame = h("div");
        note = h("p", { class: "hint", role: "status" });
        home.replaceChildren(note, frame);
        table = makeTable(frame);
      }
      const silent = answer.problems.length ? `; ${answer.problems.join("; ")}` : "";
      setText(note, (answer.complete ? plural(answer.blocks.length, "slot") : `the first ${plural(answer.blocks.length, "slot")}; there are more`) + silent);
      table.update(answer.blocks);
    } catch (error) {
      table = null;
      home.replaceChildren(h("p", { class: "notice", role: "alert" }, error.message));
    }
  });
}

function makeTable(home) {
  const number = (key, label, text) => ({ key, label, kind: "num", sort: (row) => row[key] ?? 0, cell: (row, td) => fill(td, text(row[key] ?? 0)) });
  return new Table(home, {
    label: "Blocks",
    cards: true,
    empty: "No block fits.",
    keyOf: (row) => `${row.node_id} ${row.slot}`,
    columns: [
      {
        key: "key",
        label: "Block",
        kind: "text",
        cell: (row, td) => {
          if (!td.code) td.replaceChildren((td.code = h("code")));
          setText(td.code, row.key || `slot ${row.slot}`);
        },
      },
      { key: "node_id", label: "Node", kind: "name", sort: (row) => row.node_id, cell: (row, td) => fill(td, row.node_id) },
      { key: "model", label: "Model", kind: "wide", sort: (row) => row.model ?? "", cell: (row, td) => fill(td, row.model || "–", row.tenant ?? "") },
      { key: "state", label: "State", kind: "text", sort: (row) => row.state, cell: (row, td) => fill(td, row.state, [row.tier, row.copy].filter(Boolean).join(", ")) },
      number("position", "Position", count),
      number("bytes", "Bytes", size),
      number("age_seconds", "Age", span),
      number("idle_seconds", "Idle", span),
      number("uses", "Uses", count),
    ],
  });
}

// What opens above the page: one request in words, one node in detail.

import { Table, bar, byId, fill, fillPill, h, setText } from "./dom.js";
import { ago, count, percent, plural, rate, size, span, words } from "./format.js";
import { STATES, STATE_WORDS, byState, causeWords, poolParts, requestParts } from "./sections.js";

const dialog = byId("dialog");
const body = byId("dialog-body");
let refresh = null; // what a new reading changes in the open dialog

byId("dialog-close").addEventListener("click", () => dialog.close());
dialog.addEventListener("close", () => {
  refresh = null;
  body.replaceChildren();
});
dialog.addEventListener("click", (event) => {
  if (event.target === dialog) dialog.close(); // on the backdrop
});

function show(title, ...children) {
  setText(byId("dialog-title"), title);
  body.replaceChildren(...children);
  body.scrollTop = 0;
  if (!dialog.open) dialog.showModal();
}

export const refreshDialog = (page) => refresh?.(page);

const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));

/** One request: what happened to its blocks, and why. `ask(id)` fetches the explanation. */
export async function openRequest(id, ask) {
  show(`Request ${id}`, h("p", { class: "empty" }, "Asking every node…"));
  try {
    const state = await ask(id);
    if (dialog.open) show(`Request ${state.request_id ?? id}`, ...explained(state, ask));
  } catch (error) {
    if (dialog.open) show(`Request ${id}`, h("p", { class: "notice" }, error.message));
  }
}

function explained(state, ask) {
  if (state.candidates.length) {
    return [
      h("p", { class: "lead" }, "Several requests begin with this. Which one?"),
      h("ul", {}, state.candidates.map((id) => h("li", {}, h("button", { type: "button", class: "link", onclick: () => openRequest(id, ask) }, id)))),
    ];
  }
  const silent = state.silent_nodes.map((node) => h("p", { class: "notice warn" }, `Node ${node} did not answer, so what it knows is missing here.`));
  silent.push(...state.unreadable.map((what) => h("p", { class: "notice warn" }, `Left out, because it cannot be read: ${what}`)));
  if (!state.requests.length) {
    const minutes = Math.round(state.keep_seconds / 60);
    return [
      h("p", { class: "lead" }, "No shard remembers this request."),
      h("p", {}, `A node keeps a record for ${plural(minutes, "minute")}, and at most the latest 4,096. A request is recorded when it asks for its prefix. Give the id that the API returned, or its beginning.`),
      ...silent,
    ];
  }
  return [...state.requests.flatMap(oneRecord), ...silent, ...state.hints.map((text) => h("p", { class: "notice warn" }, text))];
}

function oneRecord(row) {
  const parts = bar("bar big");
  parts.update(requestParts(row.blocks), inNumbers(row));
  const runs = h("div");
  new Table(runs, {
    label: "Blocks of the request",
    cards: true,
    empty: "No block was asked for.",
    keyOf: (one) => one.start,
    columns: [
      { key: "blocks", label: "Blocks", kind: "name", cell: (one, td) => fill(td, blockSpan(one)) },
      { key: "outcome", label: "What", cell: (one, td) => fillPill(td, OUTCOMES[one.outcome] ?? one.outcome, one.outcome === "missed" ? "warn" : "plain") },
      { key: "from", label: "From", kind: "name", cell: (one, td) => fill(td, placeName(one.node) || "–") },
      { key: "why", label: "Why", kind: "wide", cell: (one, td) => fill(td, one.miss_cause ? `${words(one.miss_cause)}: ${one.text}` : one.text) },
    ],
  }).update(row.diagnosis);
  return [
    h("p", { class: "lead" }, inWords(row)),
    h("div", {}, parts, h("p", { class: "second" }, inNumbers(row))),
    h(
      "dl",
      { class: "facts" },
      fact("Node", row.node),
      fact("Model", row.model),
      fact("Asked", ago(row.age_seconds)),
      fact("Answered after", row.answered ? span(row.took_seconds) : "never"),
      ...(row.handoff_node ? [fact("Waited for a hand-off from", row.handoff_node)] : []),
      fact("The engine", reportWords(row)),
    ),
    runs,
  ];
}

const OUTCOMES = { engine: "in the engine", local: "local", fetched: "fetched", missed: "computed" };

function blockSpan(one) {
  const last = one.start + one.count - 1;
  return one.count === 1 ? `${one.start}` : `${one.start}–${last} (${count(one.count)})`;
}

const inNumbers = ({ blocks }) =>
  `${count(blocks.engine)} in the engine, ${count(blocks.local)} local, ${count(blocks.fetched)} fetched, ${count(blocks.missed)} computed`;

/** What blocks came from: a node by its id, or a tier, whose name begins with `~`. */
const placeName = (source) => (source.startsWith("~") ? `${source.slice(1)} tier` : source);
const placeWords = (source) => (source.startsWith("~") ? `in the ${placeName(source)}` : `on ${source}`);

/** The request as a sentence or two. */
function inWords(row) {
  const { engine, local, fetched, missed } = row.blocks;
  const whole = row.blocks_asked;
  const found = engine + local + fetched;
  if (whole === 0) return "This request never asked for a prefix: its prompt is shorter than a block.";
  if (row.report && !row.report.asked) return `This request has ${plural(whole, "block")}, and its engine did not ask for them.`;
  if (!row.answered) return `This request asked for ${plural(whole, "block")} and never got an answer.`;
  const from = [...new Set(row.diagnosis.filter((one) => one.outcome === "fetched").map((one) => placeWords(one.node)))].join(", ");
  const places = [
    [engine, "in the engine itself"],
    [local, "in this node's memory"],
    [fetched, from],
  ].filter(([blocks]) => blocks);
  const sources = places.length === 1 ? [places[0][1]] : places.map(([blocks, place]) => `${count(blocks)} ${place}`);
  const took = ` The answer took ${span(row.took_seconds)}.`;
  const head = found === whole ? `All ${plural(whole, "block")} of the prompt were there` : `${count(found)} of ${plural(whole, "block")} of the prompt were there`;
  const where = sources.length ? `: ${sources.join(", ")}.` : ".";
  if (!missed) return head + where + took;
  const reasons = row.diagnosis.filter((one) => one.outcome === "missed");
  const first = reasons[0];
  const why = first ? ` The first was missed because ${lower(first.text)}` : "";
  const computed = ` ${missed === 1 ? "One had" : `${count(missed)} had`} to be computed.`;
  return `${head}${where}${computed}${why}${why && !why.endsWith(".") ? "." : ""}${took}`;
}

const lower = (text) => (/^[A-Z][a-z]/.test(text) ? text[0].toLowerCase() + text.slice(1) : text);

function reportWords(row) {
  if (!row.report) return "has not reported the end yet";
  if (row.report.load_failed) return "could not load the blocks and computed them";
  if (row.report.gave_up) return "stopped waiting for the answer";
  const { loaded_blocks: loaded, computed_blocks: computed } = row.report;
  return `loaded ${loaded ? count(loaded) : "none"}, computed ${computed ? count(computed) : "none"}`;
}

/** One node: its slots, its windows, its evictions. It changes while it is open. */
export function openNode(id, page) {
  const lead = h("p", { class: "lead" });
  const memory = bar("bar big");
  const facts = h("dl", { class: "facts" });
  const slots = h("div");
  const windows = h("div");
  const slotTable = new Table(slots, {
    label: "Slots by state",
    empty: "Nothing is known of its slots.",
    keyOf: (row) => row.state,
    columns: [
      {
        key: "state",
        label: "Slots",
        kind: "text",
        cell: (row, td) => {
          if (!td.word) td.replaceChildren(h("span", { class: `swatch ${row.state} b-${row.state}` }), " ", (td.word = h("span")));
          setText(td.word, STATE_WORDS[row.state] ?? row.state);
        },
      },
      { key: "slots", label: "Number", kind: "num", cell: (row, td) => fill(td, count(row.slots)) },
      { key: "bytes", label: "Bytes", kind: "num", cell: (row, td) => fill(td, size(row.bytes)) },
    ],
  });
  const windowTable = new Table(windows, {
    label: "Time windows",
    cards: true,
    empty: "No figures.",
    keyOf: (row) => row.name,
    columns: [
      { key: "name", label: "In the last", kind: "text", cell: (row, td) => fill(td, row.name === "start" ? `${span(row.seconds)}, since its start` : span(row.seconds)) },
      { key: "hit", label: "Hit rate", kind: "num", cell: (row, td) => fill(td, percent(row.hit_rate)) },
      { key: "asked", label: "Blocks asked", kind: "num", cell: (row, td) => fill(td, count(row.asked_blocks)) },
      { key: "stored", label: "Stored", kind: "num", cell: (row, td) => fill(td, size(row.stored_bytes)) },
      { key: "pulled", label: "Reads in", kind: "num", cell: (row, td) => fill(td, size(row.pulled_bytes)) },
      { key: "served", label: "Reads out", kind: "num", cell: (row, td) => fill(td, size(row.served_bytes)) },
      { key: "evicted", label: "Evicted", kind: "num", cell: (row, td) => fill(td, count(row.evicted_blocks)) },
    ],
  });
  refresh = (now) => {
    const row = now.nodes.find((one) => one.node_id === id);
    if (!row) return setText(lead, "This node is not known any more.");
    setText(lead, nodeInWords(row));
    memory.update(poolParts(row.pool), `${size(row.pool.used_bytes)} of ${size(row.pool.total_bytes)} used`);
    const evicted = Object.entries(row.evictions).filter(([, blocks]) => blocks);
    facts.replaceChildren(
      fact("Host", row.host || "–"),
      fact("Peers reach it at", row.address),
      fact("Blocks move by", row.transport || "–"),
      fact("Version", row.version || "–"),
      fact("Keys in the directory", count(row.lookup_keys ?? 0)),
      fact("Own mirror of the directory", row.mirror ? `${count(row.mirror.keys)} keys, ${span(row.mirror.age_seconds)} old` : "none"),
      fact("Pinned", row.pins ? `${plural(row.pins, "prompt")}, ${size(row.pinned_bytes)}` : "nothing"),
      fact("Evicted", evicted.length ? evicted.map(([cause, blocks]) => `${count(blocks)}: ${causeWords(cause)}`).join("; ") : "nothing"),
    );
    const known = byState(row.pool);
    slotTable.update(STATES.filter((state) => known[state]).map((state) => known[state]));
    windowTable.update(row.state === "silent" ? [] : [...row.windows].sort((a, b) => a.seconds - b.seconds));
  };
  show(`Node ${id}`, lead, memory, facts, slots, windows);
  const opened = refresh;
  opened(page);
}

function nodeInWords(row) {
  if (row.state === "silent") return `This node does not answer (${row.error || "no reason given"}). Its blocks count as lost until it does; engines there compute without the cache.`;
  const percentUsed = row.pool.total_bytes ? percent(row.pool.used_bytes / row.pool.total_bytes) : "–";
  const state = row.state === "draining" ? "It leaves: it takes no new work and hands its blocks over." : "It is well.";
  return `${state} ${percentUsed} of its ${size(row.pool.total_bytes)} are in use. It reads ${rate(row.rates.pulled)} from others, and others read ${rate(row.rates.served)} from it.`;
}

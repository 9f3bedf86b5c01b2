// The sections of the page. Each is made once and has `update(page)`.

import { Table, bar, byId, fill, fillBar, fillLink, fillPill, h, keyed, setText } from "./dom.js";
import { ago, count, perSecond, percent, plural, rate, size, sizeParts, span, words } from "./format.js";

export const STATES = ["sealed", "leased", "writing", "reserved", "quarantined", "free"];
const STATE_WORDS = {
  sealed: "readable",
  leased: "being read",
  writing: "being written",
  reserved: "kept for engines",
  quarantined: "quarantined",
  free: "free",
};
const CAUSES = {
  pressure: "room for another block",
  slab_moved: "room for blocks of another size",
  quota: "its tenant is at its quota",
  cleared: "cleared with kvservice clear",
  aged: "older than max_age_seconds",
  drain: "its node left",
  owner_died: "its node fell silent",
  restarted: "its node restarted",
  corrupt: "its bytes were wrong",
};
export const causeWords = (cause) => CAUSES[cause] ?? words(cause);

const byState = (pool) => Object.fromEntries(pool.states.map((row) => [row.state, row]));
const windowOf = (row, name) => row.windows.find((one) => one.name === name) ?? {};

/** Parts of a memory bar. What slabs and headers take besides is shown as free room that is not there: nothing. */
export function poolParts(pool) {
  const rows = byState(pool);
  const whole = pool.total_bytes || 1;
  return STATES.filter((state) => state !== "free" && rows[state]).map((state) => ({
    kind: state,
    share: rows[state].bytes / whole,
    title: `${STATE_WORDS[state]}: ${size(rows[state].bytes)}`,
  }));
}

const poolInWords = (pool) =>
  `${size(pool.used_bytes)} of ${size(pool.total_bytes)} used: ` +
  pool.states.filter((row) => row.slots).map((row) => `${count(row.slots)} ${row.state}`).join(", ");

function problems() {
  const home = byId("problems");
  return (page) => {
    const refused = page.refused.map((row) => ({
      kind: "notice warn",
      key: `refused ${row.node_id} ${row.model} ${row.message}`,
      title: "Engine refused",
      text: `${row.model} at ${row.node_id} serves without the cache: ${refusedWords(row)}`,
    }));
    const rows = [
      ...page.problems.map((text) => ({ kind: "notice", key: text, title: "Problem", text })),
      ...refused,
      ...(page.restricted
        ? [{ kind: "notice warn", key: "restricted", title: "Partial view", text: "this service has tenants, and the console has no token for all of them: requests are left out" }]
        : []),
    ];
    home.hidden = rows.length === 0;
    keyed(home, rows, (row) => row.key, (row) => {
      const text = h("span");
      const element = h("p", { class: row.kind }, h("strong", {}, `${row.title}: `), text);
      element.update = (now) => setText(text, now.text);
      return element;
    });
  };
}

function refusedWords(row) {
  const fields = (row.differences ?? []).map((one) => `${one.field} is ${one.refused}, others have ${one.attached}`);
  return fields.length ? fields.join("; ") : row.message;
}

function tiles() {
  const made = {};
  const tile = (key, label) => {
    const value = h("p", { class: "value" });
    const sub = h("p", { class: "sub" });
    const element = h("div", { class: "tile", id: `tile-${key}` }, h("p", { class: "label" }, label), value, sub);
    const number = h("span");
    const unit = h("span", { class: "unit" });
    value.append(number, " ", unit);
    made[key] = (text, unitText, subText, bad = false) => {
      setText(number, text);
      setText(unit, unitText);
      setText(sub, subText);
      element.classList.toggle("bad", bad);
    };
    return element;
  };
  byId("tiles").append(
    tile("hits", "Hit rate, 1 min"),
    tile("nodes", "Nodes"),
    tile("memory", "Memory in use"),
    tile("pulled", "Read from other nodes"),
    tile("stored", "Stored by engines"),
    tile("evicted", "Evicted"),
  );
  return (page) => {
    const minute = windowOf(page, "1m");
    const start = windowOf(page, "start");
    const hit = minute.hit_rate ?? null;
    made.hits(
      percent(hit),
      "",
      hit === null
        ? start.hit_rate === null || start.hit_rate === undefined ? "nothing asked yet" : `nothing asked in the last minute; ${percent(start.hit_rate)} before`
        : `${percent(minute.local_hit_rate)} local, ${percent(minute.remote_hit_rate)} remote` + (page.tiers.length ? `, ${percent(minute.tier_hit_rate)} tiers` : ""),
    );
    const silent = page.states.silent ?? 0;
    const draining = page.states.draining ?? 0;
    const notes = [silent && `${silent} silent`, draining && `${draining} draining`].filter(Boolean);
    made.nodes(count((page.states.ok ?? 0) + draining), `of ${count(page.counts.nodes)} answer`, notes.join(", ") || "all well", silent > 0);
    made.memory(
      page.pool.total_bytes ? percent(page.pool.used_bytes / page.pool.total_bytes) : "–",
      "",
      `${size(page.pool.used_bytes)} of ${size(page.pool.total_bytes)}`,
    );
    const [pulled, pulledUnit] = sizeParts(page.rates.pulled);
    made.pulled(pulled, `${pulledUnit}/s`, `${size(start.pulled_bytes ?? 0)} since start`);
    const [stored, storedUnit] = sizeParts(page.rates.stored);
    made.stored(stored, `${storedUnit}/s`, `${size(start.stored_bytes ?? 0)} since start`);
    made.evicted(perSecond(page.rates.evicted), "blocks/s", `${count(start.evicted_blocks ?? 0)} since start`);
  };
}

function nodes(open) {
  byId("states").append(
    ...STATES.map((state) => h("li", {}, h("span", { class: `swatch ${state} b-${state}` }), STATE_WORDS[state])),
  );
  const memory = (row, td) => {
    if (!td.bar) {
      td.bar = bar();
      td.below = h("div", { class: "second" });
      td.replaceChildren(h("div", { class: "cell-bar" }, td.bar, td.below));
    }
    td.bar.update(poolParts(row.pool), poolInWords(row.pool));
    setText(td.below, row.state === "silent" ? "not known" : `${size(row.pool.used_bytes)} of ${size(row.pool.total_bytes)}`);
  };
  const silent = (row) => row.state === "silent";
  const number = (key, label, value, text) => ({
    key,
    label,
    kind: "num",
    sort: (row) => (silent(row) ? -1 : value(row)),
    cell: (row, td) => fill(td, silent(row) ? "–" : text(value(row))),
  });
  const table = new Table(byId("nodes"), {
    label: "Nodes",
    cards: true,
    empty: "No node is known. Start one with kvservice up, or kvservice shard.",
    keyOf: (row) => row.node_id,
    sorted: { key: "node", down: false },
    columns: [
      {
        key: "node",
        label: "Node",
        kind: "text",
        sort: (row) => row.node_id,
        cell: (row, td) => fillLink(td, row.node_id, row.host && row.host !== row.node_id ? row.host : "", () => open(row.node_id)),
      },
      {
        key: "state",
        label: "State",
        kind: "state",
        sort: (row) => row.state,
        cell: (row, td) => fillPill(td, row.state, row.state, row.error),
      },
      { key: "memory", label: "Memory", kind: "wide", sort: (row) => row.pool.used_percent ?? 0, cell: memory },
      {
        key: "hits",
        label: "Hit rate, 1 min",
        kind: "num",
        sort: (row) => windowOf(row, "1m").hit_rate ?? -1,
        cell: (row, td) => fill(td, percent(silent(row) ? null : windowOf(row, "1m").hit_rate)),
      },
      number("pulled", "Reads in", (row) => row.rates.pulled, rate),
      number("served", "Reads out", (row) => row.rates.served, rate),
      number("stored", "Stored", (row) => row.rates.stored, rate),
      number("asked", "Prefixes", (row) => row.rates.acquires, (value) => `${perSecond(value)}/s`),
      number("up", "Up", (row) => row.uptime_seconds, span),
    ],
  });
  return (page) => table.update(page.nodes, page.counts.nodes);
}

const TIER_PILLS = { open: "ok", failed: "silent" };

function tiers() {
  const number = (key, label, text) => ({ key, label, kind: "num", sort: (row) => row[key] ?? -1, cell: (row, td) => fill(td, text(row[key])) });
  const moved = (key, label) => ({
    key,
    label,
    kind: "num",
    sort: (row) => row[key],
    cell: (row, td) => fill(td, size(row[key]), row.rates[key] ? rate(row.rates[key]) : "idle"),
  });
  const table = new Table(byId("tiers"), {
    label: "Tiers below the memory",
    cards: true,
    empty: "No node has a tier.",
    keyOf: (row) => `${row.node_id} ${row.name}`,
    sorted: { key: "node", down: false },
    columns: [
      { key: "tier", label: "Tier", kind: "text", sort: (row) => row.name, cell: (row, td) => fill(td, row.name, row.shared ? "shared by all nodes" : "") },
      { key: "node", label: "Node", kind: "name", sort: (row) => row.node_id, cell: (row, td) => fill(td, row.node_id) },
      {
        key: "state",
        label: "State",
        kind: "state",
        sort: (row) => row.state,
        cell: (row, td) => fillPill(td, row.state, TIER_PILLS[row.state] ?? "draining", row.detail),
      },
      number("blocks", "Blocks", count),
      {
        key: "used",
        label: "Used",
        kind: "wide",
        sort: (row) => row.used_bytes,
        cell: (row, td) => {
          const text = row.budget_bytes ? `${size(row.used_bytes)} of ${size(row.budget_bytes)}` : row.shared ? "as the store allows" : size(row.used_bytes);
          fillBar(td, row.budget_bytes ? row.used_bytes / row.budget_bytes : null, text);
        },
      },
      number("waiting_blocks", "Waiting", count),
      moved("written_bytes", "Written"),
      moved("read_bytes", "Read back"),
      number("hit_share", "Hits", percent),
      number("busy", "Busy", count),
      number("dropped_blocks", "Dropped", count),
      number("failed_blocks", "Failed", count),
    ],
  });
  return (page) => {
    byId("tiers-card").hidden = page.tiers.length === 0;
    table.update(page.tiers, page.counts.tiers);
  };
}

function flows() {
  const home = byId("flows");
  const list = h("ul");
  const empty = h("p", { class: "empty" });
  const more = h("p", { class: "more" });
  home.append(list, empty, more);
  const shownMax = 10; // beyond these a list is no picture any more
  return (page) => {
    const shown = page.flows.filter((row) => row.bytes > 0).slice(0, shownMax);
    const fastest = Math.max(...shown.map((row) => row.rate), 0);
    const most = Math.max(...shown.map((row) => row.bytes), 1);
    const rows = shown.map((row) => ({ ...row, width: fastest ? row.rate / fastest : row.bytes / most, faint: !fastest }));
    empty.hidden = rows.length > 0;
    setText(
      empty,
      page.counts.nodes < 2
        ? "With one node there is nobody to read from."
        : "No node has read from another yet. It happens when a prompt's blocks lie elsewhere.",
    );
    more.hidden = page.counts.flows <= rows.length || rows.length < shownMax;
    setText(more, `and ${page.counts.flows - rows.length} quieter pairs`);
    keyed(list, rows, (row) => `${row.source} ${row.target}`, (row) => {
      const rateText = h("span");
      const total = h("span", { class: "second" });
      const fillBar = h("span");
      const element = h(
        "li",
        { class: "flow" },
        h("div", { class: "names" }, row.source, h("span", { class: "arrow", "aria-hidden": "true" }, "→"), h("span", { class: "hidden-word" }, " to "), row.target),
        h("div", { class: "rate" }, rateText, total),
        h("div", { class: "bar", "aria-hidden": "true" }, fillBar),
      );
      element.update = (now) => {
        setText(rateText, now.rate ? rate(now.rate) : "idle");
        setText(total, `${size(now.bytes)} in all`);
        fillBar.style.width = `${Math.round(100 * now.width)}%`;
        fillBar.style.opacity = now.faint ? "0.35" : "1";
      };
      return element;
    });
  };
}

function memory() {
  const home = byId("memory");
  const whole = bar("bar big");
  const table = h("div");
  home.append(whole, table);
  const rows = new Table(table, {
    label: "Slots by state",
    empty: "No memory is known yet.",
    keyOf: (row) => row.state,
    columns: [
      {
        key: "state",
        label: "Memory of the nodes",
        kind: "text",
        cell: (row, td) => {
          if (!td.word) {
            td.word = h("span");
            td.replaceChildren(h("span", { class: `swatch ${row.state} b-${row.state}` }), " ", td.word);
          }
          setText(td.word, STATE_WORDS[row.state] ?? row.state);
        },
      },
      { key: "slots", label: "Slots", kind: "num", cell: (row, td) => fill(td, count(row.slots)) },
      { key: "bytes", label: "Bytes", kind: "num", cell: (row, td) => fill(td, size(row.bytes)) },
      { key: "share", label: "Share", kind: "num", cell: (row, td) => fill(td, percent(row.share)) },
    ],
  });
  return (page) => {
    whole.update(poolParts(page.pool), poolInWords(page.pool));
    const known = byState(page.pool);
    rows.update(
      STATES.filter((state) => known[state]).map((state) => ({ ...known[state], share: known[state].bytes / (page.pool.total_bytes || 1) })),
    );
  };
}

function evictions() {
  const table = new Table(byId("evictions"), {
    label: "Evictions by reason",
    empty: "Nothing was evicted: every block that was stored is still there.",
    keyOf: (row) => row.cause,
    columns: [
      { key: "cause", label: "Reason", kind: "text", cell: (row, td) => fill(td, causeWords(row.cause)) },
      { key: "blocks", label: "Blocks", kind: "num", cell: (row, td) => fill(td, count(row.blocks)) },
      { key: "rate", label: "Now", kind: "num", cell: (row, td) => fill(td, `${perSecond(row.rate)}/s`) },
    ],
  });
  return (page) => table.update(page.evictions.filter((row) => row.blocks).sort((a, b) => b.blocks - a.blocks));
}

function models() {
  const table = new Table(byId("models"), {
    label: "Models",
    empty: "No engine is attached. Give vLLM the KVServiceConnector and it appears here.",
    keyOf: (row) => `${row.namespace} ${row.model} ${row.fingerprint}`,
    columns: [
      {
        key: "model",
        label: "Model",
        kind: "text",
        cell: (row, td) => fill(td, row.model, [row.namespace && `namespace ${row.namespace}`, `fingerprint ${row.fingerprint}`].filter(Boolean).join(", ")),
      },
      { key: "engines", label: "Engines", kind: "num", cell: (row, td) => fill(td, count(row.engines)) },
      { key: "nodes", label: "Nodes", kind: "num", cell: (row, td) => fill(td, count(row.nodes.length)) },
      { key: "hits", label: "Hits", kind: "num", cell: (row, td) => fill(td, percent(row.hit_rate)) },
      {
        key: "speed",
        label: "Prefill",
        kind: "num",
        cell: (row, td) => fill(td, row.prefill_tokens_per_second ? `${count(row.prefill_tokens_per_second)} tok/s` : "–"),
      },
    ],
  });
  return (page) => table.update(page.models, page.counts.models);
}

function tenants() {
  const table = new Table(byId("tenants"), {
    label: "Tenants",
    empty: "No tenants: all engines share the pool.",
    keyOf: (row) => row.name,
    columns: [
      { key: "name", label: "Tenant", kind: "text", cell: (row, td) => fill(td, row.name) },
      {
        key: "used",
        label: "Holds",
        kind: "wide",
        cell: (row, td) => {
          const text = row.quota_bytes ? `${size(row.used_bytes)} of ${size(row.quota_bytes)}` : `${size(row.used_bytes)}, no quota`;
          const share = row.quota_bytes ? row.used_bytes / row.quota_bytes : null;
          fillBar(td, share, text, share > 0.95 ? "writing" : "sealed");
        },
      },
      { key: "hits", label: "Hits", kind: "num", cell: (row, td) => fill(td, percent(row.hit_rate)) },
      { key: "refused", label: "Refused", kind: "num", cell: (row, td) => fill(td, count(Object.values(row.counters).reduce((a, b) => a + b, 0))) },
    ],
  });
  return (page) => table.update(page.tenants, page.counts.tenants);
}

function lookups() {
  const table = new Table(byId("lookups"), {
    label: "Lookup partitions",
    empty: "No lookup partition is known.",
    keyOf: (row) => row.address,
    columns: [
      {
        key: "partition",
        label: "Partition",
        kind: "text",
        cell: (row, td) => fill(td, row.error ? "–" : `${row.partition + 1} of ${row.partition_count}`, row.address),
      },
      { key: "state", label: "State", cell: (row, td) => fillPill(td, row.error ? "silent" : "ok", row.error ? "silent" : "ok", row.error) },
      { key: "keys", label: "Keys", kind: "num", cell: (row, td) => fill(td, row.error ? "–" : count(row.keys)) },
      { key: "nodes", label: "Nodes", kind: "num", cell: (row, td) => fill(td, row.error ? "–" : count(row.nodes_alive)) },
    ],
  });
  return (page) => table.update(page.lookups);
}

/** The blocks of a request by where they came from, as parts of a bar. */
export function requestParts({ engine = 0, local = 0, fetched = 0, missed = 0 }) {
  const whole = engine + local + fetched + missed || 1;
  return [
    { kind: "engine", share: engine / whole, title: `${count(engine)} in the engine` },
    { kind: "local", share: local / whole, title: `${count(local)} local` },
    { kind: "fetched", share: fetched / whole, title: `${count(fetched)} fetched` },
    { kind: "missed", share: missed / whole, title: `${count(missed)} to compute` },
  ];
}

function requests(open) {
  const table = new Table(byId("requests"), {
    label: "Slowest requests",
    cards: true,
    empty: "No request yet. Each that asks for its prefix appears here, the slowest answers first.",
    keyOf: (row) => `${row.node_id} ${row.request_id} ${row.asked_blocks}`,
    sorted: { key: "took", down: true },
    columns: [
      {
        key: "request",
        label: "Request",
        kind: "text",
        sort: (row) => row.request_id,
        cell: (row, td) => fillLink(td, row.request_id, "", () => open(row.request_id)),
      },
      { key: "took", label: "Answered after", kind: "num", sort: (row) => row.took_seconds, cell: (row, td) => fill(td, span(row.took_seconds)) },
      {
        key: "blocks",
        label: "Blocks",
        kind: "wide",
        sort: (row) => row.asked_blocks,
        cell: (row, td) => {
          if (!td.bar) {
            td.bar = bar();
            td.below = h("div", { class: "second" });
            td.replaceChildren(h("div", { class: "cell-bar" }, td.bar, td.below));
          }
          const missed = Math.max(row.asked_blocks - row.local_blocks - row.fetched_blocks, 0);
          const text = `${count(row.asked_blocks)} asked: ${count(row.local_blocks)} local, ${count(row.fetched_blocks)} fetched, ${count(missed)} to compute`;
          td.bar.update(requestParts({ local: row.local_blocks, fetched: row.fetched_blocks, missed }), text);
          setText(td.below, text);
        },
      },
      { key: "node", label: "Node", kind: "name", sort: (row) => row.node_id, cell: (row, td) => fill(td, row.node_id) },
      { key: "model", label: "Model", kind: "wide", sort: (row) => row.model, cell: (row, td) => fill(td, row.model, row.tenant ?? "") },
      { key: "age", label: "Asked", kind: "num", sort: (row) => row.age_seconds, cell: (row, td) => fill(td, ago(row.age_seconds)) },
    ],
  });
  return (page) => table.update(page.slowest);
}

/** All sections; returns the function that updates them. `open`: {node, request}, which open a dialog. */
export function sections(open) {
  const updates = [
    problems(),
    tiles(),
    nodes(open.node),
    flows(),
    tiers(),
    memory(),
    evictions(),
    models(),
    tenants(),
    lookups(),
    requests(open.request),
  ];
  return (page) => updates.forEach((update) => update(page));
}

export { STATE_WORDS, byState, plural };

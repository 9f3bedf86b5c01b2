// The page: signs in, listens to the console's events, and tells the sections and charts.

import { Chart, SIZE_STEPS } from "./charts.js";
import { openNode, openRequest, refreshDialog } from "./dialogs.js";
import { byId, h, setText } from "./dom.js";
import { showBlocks } from "./blocks.js";
import { percent, perSecond, rate, roundSize, span } from "./format.js";
import { causeWords, sections } from "./sections.js";

const POINTS_MAX = 900; // as many as the console keeps
const STALE_SECONDS = 5; // of the latest reading: then the page says how old it is
const RETRY_SECONDS = [1, 2, 4, 8]; // between attempts to connect
const KEPT = "kvservice-token";

let token = takeToken();
let page = null;
let points = [];
let receivedAt = 0;
let paused = false;
let seconds = 300;
let failure = "";
let updateSections = null;
let charts = null;

/** The token of the URL, which then disappears from the address bar; else the one that this tab has. */
function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem(KEPT, given);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem(KEPT);
}

async function request(path, options = {}) {
  const response = await fetch(path, { headers: { Authorization: `Bearer ${token}` }, cache: "no-store", ...options });
  if (response.ok) return response;
  const told = await response.json().catch(() => ({}));
  const error = new Error(told.error ?? `the console answered ${response.status}`);
  error.status = response.status;
  throw error;
}

const ask = async (path, query) => (await request(`${path}?${new URLSearchParams(query)}`)).json();
const explain = (id) => ask("api/explain", { request: id });

/** Listen until the connection ends. Each event has a name and JSON. */
async function listen() {
  const response = await request("api/events");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the console ended");
    text += value;
    for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
      const lines = text.slice(0, end).split("\n");
      text = text.slice(end + 2);
      const data = lines.find((line) => line.startsWith("data: "));
      if (data) take(JSON.parse(data.slice(6)), lines.includes("event: all"));
    }
  }
}

function take(told, all) {
  failure = told.failure ?? "";
  if (all) points = told.points;
  else points = [...points, ...(told.points ?? [])].slice(-POINTS_MAX);
  if (told.page) {
    page = told.page;
    receivedAt = performance.now();
  }
  if (!paused) draw();
  showAge();
}

async function stayConnected() {
  for (let attempt = 0; ; attempt += 1) {
    try {
      await listen();
    } catch (error) {
      if (error.status === 401) return signIn("This token is not the console's. It has a new one at every start, unless it was given one.");
      if (receivedAt && performance.now() - receivedAt < 5000) attempt = 0;
      const wait = RETRY_SECONDS[Math.min(attempt, RETRY_SECONDS.length - 1)];
      live("lost", `${error.status ? error.message : "Connection lost"}; trying again`);
      await new Promise((resolve) => setTimeout(resolve, wait * 1000));
    }
  }
}

function signIn(why) {
  sessionStorage.removeItem(KEPT);
  byId("loading").hidden = true;
  byId("page").hidden = true;
  byId("sign-in").hidden = false;
  if (why) setText(byId("sign-in-why"), why);
  live("", "Signed out");
  byId("token").focus();
}

function begin() {
  byId("sign-in").hidden = true;
  byId("loading").hidden = Boolean(page);
  stayConnected();
}

function live(state, text) {
  byId("live").dataset.state = state;
  setText(byId("live-text"), text);
}

/** Whether the numbers are of now. Called each second, also when nothing arrives. */
function showAge() {
  if (!page) {
    if (failure) setText(byId("loading"), failure);
    return;
  }
  const age = (performance.now() - receivedAt) / 1000;
  const stale = age > STALE_SECONDS;
  byId("page").classList.toggle("stale", stale);
  if (byId("live").dataset.state === "lost" && stale) return;
  if (failure) live("lost", failure);
  else if (paused) live("paused", "Paused");
  else if (stale) live("lost", `Last reading ${span(age)} ago`);
  else live("live", "Live");
}

function draw() {
  if (!page) return;
  if (!updateSections) makePage();
  document.title = `${page.service} · kvservice`;
  setText(byId("service"), page.service);
  updateSections(page);
  charts.update();
  refreshDialog(page);
}

function makePage() {
  byId("loading").hidden = true;
  byId("page").hidden = false;
  updateSections = sections({ node: (id) => openNode(id, page), request: (id) => openRequest(id, explain) });
  charts = makeCharts();
  showBlocks(() => page, (query) => ask("api/blocks", query));
}

const CAUSE_COLOURS = ["a", "b", "c", "d", "e", "f"];

function makeCharts() {
  const hits = new Chart({
    title: "Hit rate",
    ceiling: 1,
    format: percent,
    onAxis: (value) => `${Math.round(value * 100)}%`,
    empty: "No engine has asked for a prefix in this time.",
    series: [
      { name: "all", label: "all", colour: "--c-local", swatch: "b-local", value: (point) => point.local_hits === null ? null : Math.min(point.local_hits + point.remote_hits + point.tier_hits, 1) },
      { name: "remote", label: "from other nodes", colour: "--c-remote", swatch: "b-remote", value: (point) => point.remote_hits },
      ...(page.tiers.length ? [{ name: "tier", label: "from tiers", colour: "--c-b", swatch: "b-b", value: (point) => point.tier_hits }] : []),
    ],
  });
  const bytes = new Chart({
    title: "Bytes",
    format: rate,
    onAxis: roundSize,
    steps: SIZE_STEPS,
    empty: "Nothing was stored or read from other nodes in this time.",
    series: [
      { name: "stored", label: "stored", colour: "--c-stored", swatch: "b-stored", value: (point) => point.stored },
      { name: "pulled", label: "read from other nodes", colour: "--c-pulled", swatch: "b-pulled", value: (point) => point.pulled },
    ],
  });
  const evicted = new Chart({
    title: "Evictions",
    format: (value) => `${perSecond(value ?? 0)}/s`,
    onAxis: (value) => perSecond(value),
    empty: "Nothing was evicted in this time.",
    series: [],
  });
  byId("charts").append(hits.element, bytes.element, evicted.element);
  const update = () => {
    const causes = [...new Set(points.flatMap((point) => Object.entries(point.evicted).filter(([, blocks]) => blocks).map(([cause]) => cause)))].sort();
    evicted.setSeries(causes.map((cause, index) => {
      const letter = CAUSE_COLOURS[index % CAUSE_COLOURS.length];
      return { name: cause, label: causeWords(cause), colour: `--c-${letter}`, swatch: `b-${letter}`, value: (point) => point.evicted[cause] ?? 0 };
    }));
    for (const chart of [hits, bytes, evicted]) chart.update(points, seconds);
  };
  const choices = [[60, "1 min"], [300, "5 min"], [900, "15 min"]].map(([length, label]) =>
    h("button", { type: "button", "aria-pressed": String(length === seconds), onclick: (event) => {
      seconds = length;
      for (const button of byId("spans").children) button.setAttribute("aria-pressed", String(button === event.currentTarget));
      update();
    } }, label));
  byId("spans").append(...choices);
  return { update };
}

byId("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("token").value.trim();
  sessionStorage.setItem(KEPT, token);
  byId("token").value = "";
  begin();
});

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  openRequest(byId("request").value.trim(), explain);
});

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  setText(byId("pause"), paused ? "Go on" : "Pause");
  if (!paused) draw();
  showAge();
});

const { THEMES, chosenTheme, chooseTheme } = window.kvserviceTheme;
const nameTheme = () => setText(byId("theme"), `Theme: ${chosenTheme()}`);
byId("theme").addEventListener("click", () => {
  chooseTheme(THEMES[(THEMES.indexOf(chosenTheme()) + 1) % THEMES.length]);
  nameTheme();
});

addEventListener("hashchange", () => {
  if (!location.hash.includes("token=")) return;
  token = takeToken();
  location.reload();
});

nameTheme();
setInterval(showAge, 1000);
if (token) begin();
else signIn("");

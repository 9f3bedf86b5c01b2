// node console.mjs URL SHOTS OTHERS: plays a person at the console, and prints one line of JSON for each check.
// Everything runs against a real service under load. SHOTS is a folder for pictures, or "". OTHERS is JSON: the URL of a
// console whose every name is `hostile`, and the pids of `n1` and of the `console`.

import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { join } from "node:path";

const [url, shots, others] = process.argv.slice(2);
const { hostile, pids } = JSON.parse(others);
const site = createRequire(join(process.env.KVSERVICE_TEST_SITE, "package.json"));
const { chromium } = site("playwright-core");
const axe = readFileSync(site.resolve("axe-core/axe.min.js"), "utf8");

const WIDE = { width: 1440, height: 900 };
const PHONE = { width: 390, height: 844 };
const LOADED = 20_000; // milliseconds for what takes one or two on an idle machine
const complaints = []; // of the browser's console, of all pages
let ended = false; // the console was told to end
const browser = await chromium.launch({ executablePath: process.env.KVSERVICE_TEST_BROWSER, args: ["--no-sandbox"] });

async function open(options = {}, address = url) {
  const context = await browser.newContext({ viewport: WIDE, colorScheme: "light", ...options });
  const page = await context.newPage();
  page.setDefaultTimeout(LOADED);
  page.on("console", (message) => {
    // what the browser itself says about an answer that a check asks for, and about a console that a check ended
    const expected = message.text().includes("status of 401") || (ended && message.text().includes("net::ERR_"));
    if (message.type() === "error" && !expected) complaints.push(message.text());
  });
  page.on("pageerror", (error) => complaints.push(String(error)));
  await page.goto(address);
  return page;
}

async function watching(options, address = url) {
  const page = await open(options, address);
  await page.waitForSelector("#nodes tbody tr");
  await page.waitForSelector("#requests tbody tr");
  return page;
}

const text = (page, selector) => page.locator(selector).first().innerText();

function must(condition, what) {
  if (!condition) throw new Error(what);
}

async function changes(page, selector, milliseconds) {
  const before = await text(page, selector);
  await page.waitForFunction(
    ([where, old]) => document.querySelector(where).innerText !== old,
    [selector, before],
    { timeout: milliseconds, polling: 100 },
  );
}

const checks = {
  async content() {
    const page = await watching();
    const seen = await page.locator("#page").innerText();
    for (const word of ["n0", "n1", "Qwen/Qwen3-8B", "readable", "room for another block", "1 of 1", "No tenants", "from tiers"]) {
      must(seen.includes(word), `the page does not say ${word}`);
    }
    await page.waitForFunction(() => /1 min\s+[\d.]+%/.test(document.getElementById("tile-hits").innerText));
    must(/2\s+of 2 answer/.test(await text(page, "#tile-nodes")), "not two nodes");
    must((await page.locator("#flows .flow").count()) === 2, "not a flow each way");
    const bars = await page.locator("#flows .bar span").evaluateAll((all) => all.map((one) => one.style.width));
    must(bars.includes("100%") && bars.every((width) => parseFloat(width) <= 100), `bars of flows: ${bars}`);
    must((await page.locator("#charts canvas").count()) === 3, "not three charts");
    must(!page.url().includes("token"), "the token stays in the address bar");
    await page.waitForFunction(() => document.querySelectorAll("#tiers tbody tr").length === 2);
    const disk = await text(page, "#tiers tbody tr");
    must(/disk/.test(disk) && /open/.test(disk) && /of 64\.0 MiB/.test(disk), `no disk: ${disk}`);
    await page.context().close();
  },

  async "numbers change within 3 s"() {
    const page = await watching();
    await changes(page, "#tile-stored .sub", 3000);
    await changes(page, "#tile-pulled .sub", 3000);
    await changes(page, "#charts .chart:nth-child(2) .legend", 3000);
    await changes(page, "#requests tbody", 3000);
    await changes(page, "#tiers tbody", 3000);
    await page.click("#pause");
    const before = await text(page, "#tile-stored .sub");
    await page.waitForTimeout(2500);
    must((await text(page, "#tile-stored .sub")) === before, "a paused page changes");
    await page.click("#pause");
    await changes(page, "#tile-stored .sub", 3000);
    await page.context().close();
  },

  async "hostile names are text"() {
    const page = await watching();
    must((await text(page, "#models")).includes("evil/<img src=x onerror=window.attacked=1>"), "no hostile model");
    await page.selectOption("#filter-model", "evil/<img src=x onerror=window.attacked=1>");
    await page.click("#filters button");
    await page.waitForSelector("#blocks tbody tr");
    must((await text(page, "#blocks tbody")).includes("<img src=x"), "no block of the hostile model");
    const hostile = await page.evaluate(async () => {
      const headers = { Authorization: `Bearer ${sessionStorage.getItem("kvservice-token")}` };
      return (await (await fetch("api/explain?request=chatcmpl-", { headers })).json()).candidates;
    });
    must(hostile.length > 0, "no candidates");
    await page.fill("#request", "<svg onload=window.attacked=1>");
    await page.press("#request", "Enter");
    await page.waitForSelector("#dialog .lead");
    must((await text(page, "#dialog")).includes("<svg onload=window.attacked=1>"), "the id is not shown as it is");
    await unhurt(page);
    await page.context().close();
  },

  async "hostile names of every kind are text"() {
    const page = await watching({}, hostile);
    await page.click("#pause");
    for (const id of ["service", "problems", "nodes", "tiers", "flows", "evictions", "models", "tenants", "lookups", "requests"]) {
      must((await text(page, `#${id}`)).includes("<img src=x onerror=window.attacked=1>"), `no hostile name in ${id}`);
    }
    await page.click("#nodes .link");
    must((await text(page, "#dialog")).includes("<img src=x"), "no hostile name in the dialog");
    await page.keyboard.press("Escape");
    await page.click("#requests .link");
    await page.waitForSelector("#dialog .lead");
    await unhurt(page);
    must((await page.title()).startsWith("<img src=x"), "the title is not the service's name");
    await fits(page, "a page of long names");
    await page.context().close();
  },

  async "a request is explained in words"() {
    const page = await watching();
    await page.click("#pause");
    const id = await text(page, "#requests .link");
    await page.click("#requests .link");
    await page.waitForSelector("#dialog .lead");
    must((await text(page, "#dialog-title")).includes(id), "another request");
    const lead = await text(page, "#dialog .lead");
    must(/of (the prompt|\d+ blocks)|All \d+ blocks/.test(lead), `no sentence: ${lead}`);
    must(!/~/.test(await text(page, "#dialog")), "a tier without words");
    must((await page.locator("#dialog tbody tr").count()) >= 1, "no blocks");
    if (shots) await page.screenshot({ path: join(shots, "explain.png") });
    await page.context().close();
  },

  async "a node opens and stays up to date"() {
    const page = await watching();
    await page.click("#nodes .link");
    must((await text(page, "#dialog .lead")).startsWith("It is well."), "not well");
    await changes(page, "#dialog-body", 3000);
    await page.context().close();
  },

  async "every action by keyboard"() {
    const page = await watching();
    await page.click("#pause"); // rows of requests would come and go
    await page.evaluate(() => document.activeElement.blur());
    const wanted = await page.evaluate(() => {
      const all = [...document.querySelectorAll("a[href], button, input, select")];
      return all.filter((one) => one.offsetParent !== null || one.className === "skip").map((one, index) => (one.dataset.at = index)).length;
    });
    const reached = new Set();
    for (let step = 0; step < wanted + 8; step += 1) {
      await page.keyboard.press("Tab");
      const at = await page.evaluate(() => document.activeElement.dataset.at);
      if (at !== undefined) reached.add(at);
    }
    must(reached.size === wanted, `Tab reaches ${reached.size} of ${wanted} controls`);
    await page.focus("#nodes .link");
    await page.keyboard.press("Enter");
    await page.waitForSelector("#dialog[open]");
    await page.keyboard.press("Escape");
    must(await page.evaluate(() => !document.getElementById("dialog").open), "Escape does not close");
    must(await page.evaluate(() => document.activeElement.closest("#nodes") !== null), "the focus is lost");
    await page.focus("#nodes th .sort");
    const order = () => page.getAttribute("#nodes th", "aria-sort");
    const before = await order();
    await page.keyboard.press("Enter");
    must((await order()) !== before, "Enter does not sort");
    await page.focus("#spans button");
    await page.keyboard.press("Space");
    must((await page.getAttribute("#spans button", "aria-pressed")) === "true", "Space does not choose");
    await page.focus("#request");
    await page.keyboard.type("chatcmpl-");
    await page.keyboard.press("Enter");
    await page.waitForSelector("#dialog .link");
    await page.keyboard.press("Tab");
    await page.keyboard.press("Escape");
    await page.focus("#theme");
    await page.keyboard.press("Enter");
    must((await text(page, "#theme")) === "Theme: light", "the theme does not change");
    await page.focus("#filter-state");
    await page.keyboard.press("ArrowDown");
    await page.focus("#filters button");
    await page.keyboard.press("Enter");
    await page.waitForSelector("#blocks tbody tr");
    await page.context().close();
  },

  async "focus stays while numbers change"() {
    const page = await watching();
    await page.focus("#nodes tbody tr:nth-child(2) .link");
    await changes(page, "#tile-stored .sub", 3000);
    await changes(page, "#tile-stored .sub", 3000);
    must((await page.evaluate(() => document.activeElement.innerText)) === "n1", "the focus went");
    await page.context().close();
  },

  async "every number fits its tile"() {
    for (const width of [320, 400, 768, 1024, 1280, 1366]) {
      const page = await watching({ viewport: { width, height: 900 } });
      await page.waitForFunction(() => /%/.test(document.getElementById("tile-hits").innerText));
      const wide = await page.locator(".tile .value").evaluateAll((all) =>
        all.filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.innerText));
      must(wide.length === 0, `at ${width} px these are wider than their tile: ${wide}`);
      await page.context().close();
    }
  },

  async "no horizontal scroll on a phone"() {
    for (const colorScheme of ["light", "dark"]) {
      const page = await watching({ viewport: PHONE, colorScheme, isMobile: true, hasTouch: true });
      await fits(page, "the page");
      await page.click("#filters button");
      await page.waitForSelector("#blocks tbody tr");
      await fits(page, "blocks");
      if (shots) await page.screenshot({ path: join(shots, `phone-${colorScheme}.png`) });
      await page.click("#requests .link");
      await page.waitForSelector("#dialog .lead");
      await fits(page, "a request");
      must(await page.evaluate(() => {
        const body = document.getElementById("dialog-body");
        return body.scrollWidth <= body.clientWidth;
      }), "a request is wider than its dialog");
      await page.context().close();
    }
  },

  async "no serious finding of axe"() {
    for (const colorScheme of ["light", "dark"]) {
      for (const viewport of [WIDE, PHONE]) {
        const page = await watching({ viewport, colorScheme });
        await page.click("#pause");
        await judged(page, `${colorScheme} ${viewport.width}`);
        if (shots && viewport === WIDE) await page.screenshot({ path: join(shots, `${colorScheme}.png`) });
        if (shots && viewport === WIDE) await page.screenshot({ path: join(shots, `${colorScheme}-whole.png`), fullPage: true });
        await page.click("#requests .link");
        await page.waitForSelector("#dialog .lead");
        await judged(page, `${colorScheme} ${viewport.width}, a request`);
        await page.context().close();
      }
    }
    const page = await open({}, url.replace(/#.*/, ""));
    await page.waitForSelector("#sign-in:not([hidden])");
    await judged(page, "sign-in");
    await page.context().close();
  },

  async "sign-in asks for the token"() {
    const [address, token] = url.split("#token=");
    const page = await open({}, address);
    await page.waitForSelector("#sign-in:not([hidden])");
    must(await page.evaluate(() => document.activeElement.id === "token"), "the field has no focus");
    await page.keyboard.type("wrong-wrong-wrong-wrong-wrong");
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.getElementById("sign-in-why").innerText.includes("not the console's"));
    must((await page.locator("#nodes tbody tr").count()) === 0, "data without a token");
    await page.fill("#token", token);
    await page.keyboard.press("Enter");
    await page.waitForSelector("#nodes tbody tr");
    await page.reload();
    await page.waitForSelector("#nodes tbody tr");
    await page.context().close();
  },

  async "a dead node is seen"() {
    const page = await watching();
    process.kill(pids.n1, "SIGKILL");
    await page.waitForFunction(() => document.querySelector("#nodes").innerText.includes("silent"));
    await page.waitForFunction(() => document.querySelector("#problems").innerText.includes("n1"));
    must((await text(page, "#tile-nodes")).includes("1 silent"), "the tile does not say so");
    await judged(page, "a dead node");
    if (shots) await page.screenshot({ path: join(shots, "dead.png") });
    await changes(page, "#tile-stored .sub", LOADED); // the other node works on
    await page.context().close();
  },

  async "a console that ended is seen"() {
    const page = await watching();
    ended = true;
    process.kill(pids.console, "SIGTERM");
    await page.waitForFunction(() => document.getElementById("live").innerText.includes("trying again"));
    must((await page.getAttribute("#live", "data-state")) === "lost", "it looks as if all were well");
    await page.context().close();
  },

  async "no complaint in the browser's console"() {
    must(complaints.length === 0, complaints.join("\n"));
  },
};

async function fits(page, what) {
  const [wide, there] = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
  must(wide <= there, `${what} is ${wide} px wide, the screen ${there}`);
}

async function judged(page, what) {
  await page.evaluate(axe);
  const found = await page.evaluate(async () => (await axe.run(document)).violations.map((one) => ({
    impact: one.impact, id: one.id, where: one.nodes.map((node) => `${node.target} ${node.failureSummary}`).slice(0, 3),
  })));
  const bad = found.filter((one) => ["serious", "critical"].includes(one.impact));
  must(bad.length === 0, `${what}: ${JSON.stringify(bad, null, 1)}`);
}

async function unhurt(page) {
  must(await page.evaluate(() => window.attacked === undefined), "a name became a script");
  must((await page.locator("main img, dialog img, main svg, dialog svg").count()) === 0, "a name became an element");
}

for (const [name, check] of Object.entries(checks)) {
  let problem = "";
  try {
    await check();
  } catch (error) {
    problem = String(error.stack ?? error).slice(0, 4000);
    for (const context of browser.contexts()) {
      if (shots && context.pages()[0]) await context.pages()[0].screenshot({ path: join(shots, `failed-${name.replaceAll(" ", "-")}.png`) });
      await context.close();
    }
  }
  console.log(JSON.stringify({ name, problem }));
}
await browser.close();

// node picture.mjs URL OUT SECONDS: what the console at this URL shows after so many seconds, as a PNG.

import { createRequire } from "node:module";
import { join } from "node:path";

const [url, out, seconds] = process.argv.slice(2);
const { chromium } = createRequire(join(process.env.KVSERVICE_TEST_SITE, "package.json"))("playwright-core");
const browser = await chromium.launch({ executablePath: process.env.KVSERVICE_TEST_BROWSER, args: ["--no-sandbox"] });
const page = await browser.newPage({ viewport: { width: 1440, height: 1300 }, colorScheme: "light" });
await page.goto(url);
await page.waitForSelector("#tiers tbody tr", { timeout: 60_000 });
await page.getByRole("button", { name: "1 min", exact: true }).click();
await page.waitForTimeout(Number(seconds) * 1000);
await page.screenshot({ path: out });
await browser.close();

// A visitor of the page reads one of its samples, asks what is offered to ask, gets the right answers, and finds it all after a reload.
// The short sample by default; CEDRA_SAMPLE=notebook.txt reads the long one.

import assert from "node:assert/strict";
import { mkdtemp, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { chromium } from "playwright-core";
import { environment, FLAGS } from "./harness.mjs";
import { serve } from "./server.mjs";

const dist = new URL("../../www/dist/", import.meta.url).pathname;
const SAMPLE = process.env.CEDRA_SAMPLE ?? "short.txt";

test(`the page reads ${SAMPLE} and answers what it offers to ask`, async (t) => {
  const sample = JSON.parse(await readFile(join(dist, "samples/samples.json"), "utf8")).find(({ file }) => file === SAMPLE);
  const profile = await mkdtemp(join(tmpdir(), "cedra-samples-"));
  const server = await serve({ "/": dist });
  const options = { executablePath: process.env.CEDRA_CHROMIUM ?? "/usr/bin/chromium", headless: true, chromiumSandbox: false, args: FLAGS, env: environment() };
  const context = await chromium.launchPersistentContext(profile, options);
  t.after(async () => {
    await context.close();
    await server.close();
    await rm(profile, { recursive: true, force: true });
  });
  const page = await context.newPage();
  page.setDefaultTimeout(0);
  const problems = [];
  page.on("pageerror", (error) => problems.push(String(error)));
  const idle = () => page.waitForSelector("#composer:not([hidden]) #send:not([hidden])");
  const facts = () => page.locator("#document-facts").innerText();
  const seconds = (since) => Math.round((Date.now() - since) / 1000);
  let asked = 0;
  const ask = async (question) => {
    await page.fill("#question", question);
    await page.click("#send");
    await page.waitForFunction((count) => document.querySelectorAll("#turns .answer").length === count, ++asked);
    await idle();
    return (await page.locator("#turns .answer").allInnerTexts()).at(-1);
  };

  await page.goto(server.url);
  await page.waitForSelector("#engine >> text=Ready.");
  const begun = Date.now();
  await page.click(`.samples button:has-text("${sample.title}")`);
  await idle();
  t.diagnostic(`${await facts()} Read in ${seconds(begun)} s`);
  assert.equal(await page.locator("#suggestions button").first().innerText(), sample.questions[0].question);
  const asking = Date.now();
  for (const { question, answer } of sample.questions) {
    const said = await ask(question);
    assert.ok(said.includes(answer), `${question} ${said}`);
  }
  t.diagnostic(`${sample.questions.length} questions answered in ${seconds(asking)} s`);

  server.log.length = 0;
  await page.reload();
  const back = Date.now();
  await page.waitForSelector("#engine >> text=Ready.");
  await idle();
  assert.match(await facts(), /opened again without reading it/);
  const { question, answer } = sample.questions.at(-1);
  const again = await ask(question);
  assert.ok(again.includes(answer), `${question} ${again}`);
  t.diagnostic(`after a reload: ${await facts()} Opened and asked in ${seconds(back)} s`);
  assert.equal(server.sent(/safetensors$/).bytes, 0, "no weight comes over the network again");
  assert.deepEqual(problems, []);
});

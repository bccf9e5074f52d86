// The demo page as it is deployed, under a path of its own, in a browser: a text is read, asked about, cut, branched, found again after a
// reload and without a network. `npm run build:page` makes it.

import assert from "node:assert/strict";
import { mkdtemp, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { chromium } from "playwright-core";
import { environment, FLAGS } from "./harness.mjs";
import { serve } from "./server.mjs";

const root = new URL("../..", import.meta.url).pathname;
const dist = join(root, "www/dist");
const SLOW = 600_000;

const NOTE = "The scheduler was restarted twice this week, and the queue was longer than usual. Nothing else happened on the hosts.\n\n";
const TEXT = `The port of heron is 6077.\n\n${NOTE}The owner of \`zorbel\` is Ada.\n\n${NOTE}const GRID_SIZE: usize = 512;\n\n${NOTE}`;
const PORT = { question: "What is the port of heron?", answer: "The port of heron is 6077." };
const GRID = { question: "What is the value of GRID_SIZE?", answer: "The value of GRID_SIZE is 512." };
let server, context, page, profile;
const problems = [];
const requests = [];

const watch = (page) => {
  page.setDefaultTimeout(SLOW);
  page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
  page.on("pageerror", (error) => problems.push(String(error)));
};

before(async () => {
  profile = await mkdtemp(join(tmpdir(), "cedra-page-"));
  server = await serve({ "/a/path/": dist });
  context = await chromium.launchPersistentContext(profile, {
    executablePath: process.env.CEDRA_CHROMIUM ?? "/usr/bin/chromium",
    headless: true,
    chromiumSandbox: false,
    args: FLAGS,
    env: environment(),
    viewport: { width: 1280, height: 900 },
  });
  context.on("request", (request) => requests.push(request.url()));
  page = await context.newPage();
  watch(page);
  await page.goto(`${server.url}/a/path/`);
});
after(async () => {
  await context?.close();
  await server?.close();
  await rm(profile, { recursive: true, force: true });
});

const idle = () => page.waitForSelector("#composer:not([hidden]) #send:not([hidden])");
const answers = () => page.locator("#turns .answer").allInnerTexts();
const facts = () => page.locator("#document-facts").innerText();

/** Asks and waits for the answer, by keyboard alone. */
async function ask(question) {
  await page.focus("#question");
  await page.keyboard.type(question);
  await page.keyboard.press("Enter");
  await page.waitForFunction((question) => [...document.querySelectorAll("#turns .question")].some((found) => found.textContent === question), question);
  await idle();
  return (await answers()).at(-1);
}

test("a sample is read with progress until it is told to stop", async () => {
  await page.waitForSelector("#engine >> text=Ready.");
  assert.match(await page.locator("#figure-speed").innerText(), /not measured yet/);
  const { title } = JSON.parse(await readFile(join(dist, "samples/samples.json"), "utf8")).find(({ file }) => file === "notebook.txt");
  await page.click(`.samples button:has-text("${title}")`);
  await page.waitForFunction(() => Number(document.querySelector("#reading [role=progressbar]")?.getAttribute("aria-valuenow")) > 0);
  await page.click("#reading >> text=Stop");
  await page.waitForSelector("#turns >> text=Go on reading");
  const read = Number(/^([\d,]+) tokens read/.exec(await facts())[1].replace(",", ""));
  assert.ok(read > 0 && read < 90_000, `${read} tokens`);
  await page.click("#new");
});

test("a file is read, and a question is answered as it streams", async () => {
  await page.waitForSelector(".samples li");
  await page.setInputFiles("#files", { name: "facts.md", mimeType: "text/markdown", buffer: Buffer.from(TEXT) });
  await idle();
  assert.equal(await page.locator("#document-title").innerText(), "facts.md");
  // Looked at from inside, because an answer may be over before one has looked from here.
  await page.evaluate(() => {
    globalThis.streamed = new Set();
    new MutationObserver(() => {
      const answer = document.querySelector(".answer.busy");
      if (answer && !document.querySelector("#stop").hidden) globalThis.streamed.add(answer.textContent);
    }).observe(document.querySelector("#turns"), { childList: true, subtree: true });
  });
  await page.fill("#question", PORT.question);
  await page.click("#send");
  await page.waitForSelector("#turns .answer");
  await idle();
  assert.equal((await answers())[0], PORT.answer);
  const streamed = await page.evaluate(() => [...globalThis.streamed]);
  assert.ok(streamed.length > 2 && streamed.every((text) => PORT.answer.startsWith(text.trim())), JSON.stringify(streamed));
});

test("the figures show what was counted and measured", async () => {
  await page.waitForSelector("#looked .legend");
  assert.match(await page.locator("#looked").innerText(), /chose at most 128 entries/);
  assert.ok((await page.locator(".passages mark").count()) > 0, "no passage was chosen");
  assert.match(await page.locator("#figure-layers").innerText(), /the last layer \d/);
  assert.match(await page.locator("#figure-bytes").innerText(), /162 bytes[\s\S]*2,048 bytes/);
  assert.match(await page.locator("#figure-engram").innerText(), /12 rows for this token/);
  assert.match(await page.locator("#figure-speed").innerText(), /[\d.,]+\s+tokens a second, reading/);
});

test("the strip says by keyboard what is at a place", async () => {
  await page.focus(".strip input");
  for (let i = 0; i < 3; i++) await page.keyboard.press("ArrowRight");
  await page.waitForFunction(() => /^Token \d+: .*\[.+\]/.test(document.querySelector(".strip output").textContent));
});

test("an answer stops when it is told to, and the session goes on", async () => {
  await page.fill("#question", "What is");
  // As soon as there is something of an answer: no machine is through with it by then, and none still reads the question.
  await page.evaluate(() => {
    const observer = new MutationObserver(() => {
      if (!document.querySelector(".answer.busy")?.textContent) return;
      observer.disconnect();
      document.querySelector("#stop").click();
    });
    observer.observe(document.querySelector("#turns"), { childList: true, subtree: true });
  });
  await page.click("#send");
  await page.waitForFunction(() => document.querySelectorAll("#turns .answer").length === 2);
  await idle();
  assert.equal((await answers()).length, 2);
  assert.equal(await page.locator("#notice").innerText(), "");
});

test("a question is edited and asked again: the text is cut there", async () => {
  await page.locator("#turns > li").first().getByRole("button", { name: "Edit and ask again" }).click();
  await page.fill(".edit textarea", GRID.question);
  await page.click(".edit >> text=Ask again");
  await page.waitForFunction((question) => document.querySelector("#turns .question")?.textContent === question, GRID.question);
  await idle();
  assert.equal((await answers()).length, 1, "the turns behind it are gone");
  assert.equal((await answers())[0], GRID.answer);
});

test("a branch is a session of its own", async () => {
  await page.click("#turns >> text=Branch from here");
  await page.waitForSelector("#document-title >> text=(branch)");
  await page.waitForFunction(() => document.querySelectorAll("#session-list > li").length === 3);
  await ask("Who owns `zorbel`?");
  assert.equal((await answers()).length, 2);
  await page.locator("#session-list .open:not([aria-current])", { hasText: "facts.md" }).click();
  await page.waitForFunction(() => !document.querySelector("#document-title").textContent.includes("(branch)"));
  await idle();
  assert.equal((await answers()).length, 1, "the session that it comes from is as it was");
});

test("another tab is told that the session is open", async () => {
  const other = await context.newPage();
  other.setDefaultTimeout(SLOW);
  await other.goto(`${server.url}/a/path/`);
  await other.waitForSelector("#notice >> text=Another tab has this session open");
  await other.close();
});

test("without a network the page loads again, and the session goes on", async () => {
  await page.evaluate(() => navigator.serviceWorker.ready.then(() => undefined));
  await context.setOffline(true);
  await server.close();
  await page.reload();
  await page.waitForSelector("#engine >> text=Ready.");
  await idle();
  assert.match(await facts(), /opened again without reading it/);
  assert.equal((await answers()).length, 1, "turns are found in the tokens");
  assert.equal(await ask(PORT.question), PORT.answer);
  const [, again, read] = /(\d+) computed again, (\d+) read/.exec(await facts()) ?? [];
  // A window of 64, the remainder of a group, the history of the n-grams.
  assert.ok(Number(again) > 0 && Number(again) <= 64 + 1 + 3, `${again} computed again`);
  assert.ok(Number(read) > 0 && Number(read) < 40, `${read} read`);
});

test("every control has a name, and every picture words", async () => {
  const nameless = await page.evaluate(() =>
    [...document.querySelectorAll("button, a, input, textarea, [role=img], [role=progressbar], [role=group]")]
      .filter((element) => !element.closest("[hidden], [aria-hidden=true]"))
      .filter((element) => !(element.getAttribute("aria-label") || element.textContent.trim() || document.querySelector(`label[for="${element.id}"]`)))
      .map((element) => element.outerHTML.slice(0, 120)),
  );
  assert.deepEqual(nameless, []);
  const ids = await page.evaluate(() => [...document.querySelectorAll("[id]")].map(({ id }) => id));
  assert.equal(new Set(ids).size, ids.length, "an id is there twice");
  for (const landmark of ["header", "main", "nav", "footer"]) assert.equal(await page.locator(landmark).count(), 1, landmark);
  assert.equal(await page.locator("h1").count(), 1);
});

test("on a phone nothing scrolls sideways", async () => {
  await page.setViewportSize({ width: 360, height: 780 });
  const { scroll, width } = await page.evaluate(() => ({ scroll: document.documentElement.scrollWidth, width: document.documentElement.clientWidth }));
  assert.ok(scroll <= width, `${scroll} in ${width}`);
});

test("a session is deleted when that is confirmed", async () => {
  await page.locator("#session-list > li", { hasText: "(branch)" }).locator(".drop").click();
  await page.click(".sure >> text=Delete");
  await page.waitForFunction(() => document.querySelectorAll("#session-list > li").length === 2);
});

test("nothing was asked of another host, and nothing went wrong", () => {
  const others = requests.filter((url) => !url.startsWith(server.url) && !/^(data|blob):/.test(url));
  assert.deepEqual(others, []);
  // Without a network the browser reports each attempt to ask for the model's files; the engine has them.
  assert.deepEqual(problems.filter((text) => !/ERR_(INTERNET_DISCONNECTED|CONNECTION_REFUSED)/.test(text)), []);
});

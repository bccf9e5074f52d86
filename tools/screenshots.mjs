// Takes the pictures of docs/page.md: the demo page in its main states, at the size of a desk and of a phone, light and dark. They are written
// with a palette of 256 colours, so that they stay small.
//
//   npm run build:page && node tools/screenshots.mjs
//
// CEDRA_CHROMIUM is the browser to use instead of the system's, CEDRA_BROWSER_DRIVER what tests/browser/driver.c became.

import { mkdir, mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { crc32, deflateSync, inflateSync } from "node:zlib";
import { chromium } from "playwright-core";
import { environment, FLAGS } from "../tests/browser/harness.mjs";
import { serve } from "../tests/browser/server.mjs";

const root = new URL("..", import.meta.url).pathname;
const out = join(root, "docs/screenshots");
const SLOW = 600_000;

/** Rows of RGB bytes of a PNG as browsers write it: 8 bits, no interlacing, with or without alpha. */
function decode(png) {
  const [width, height, channels] = [png.readUInt32BE(16), png.readUInt32BE(20), png[25] === 6 ? 4 : 3];
  const parts = [];
  for (let at = 8; at < png.length; at += 12 + png.readUInt32BE(at)) {
    if (png.toString("latin1", at + 4, at + 8) === "IDAT") parts.push(png.subarray(at + 8, at + 8 + png.readUInt32BE(at)));
  }
  const raw = inflateSync(Buffer.concat(parts));
  const stride = width * channels;
  const lines = Buffer.alloc(stride * height);
  for (let y = 0; y < height; y++) {
    const filter = raw[y * (stride + 1)];
    for (let i = 0; i < stride; i++) {
      const left = i >= channels ? lines[y * stride + i - channels] : 0;
      const up = y > 0 ? lines[(y - 1) * stride + i] : 0;
      const corner = y > 0 && i >= channels ? lines[(y - 1) * stride + i - channels] : 0;
      const paeth = () => {
        const [a, b, c] = [Math.abs(up - corner), Math.abs(left - corner), Math.abs(left + up - 2 * corner)];
        return a <= b && a <= c ? left : b <= c ? up : corner;
      };
      const guess = [0, left, up, (left + up) >> 1, filter === 4 ? paeth() : 0][filter];
      lines[y * stride + i] = raw[y * (stride + 1) + 1 + i] + guess;
    }
  }
  return { width, height, at: (i) => (lines[i * channels] << 16) | (lines[i * channels + 1] << 8) | lines[i * channels + 2] };
}

/** The 256 colours that stand for all: boxes of colours are halved at their median, the one with the most spread first. */
function palette(counts) {
  const channel = (color, shift) => (color >> shift) & 255;
  const boxed = (colors) => {
    const spread = [16, 8, 0].map((shift) => {
      const values = colors.map(([color]) => channel(color, shift));
      return [Math.max(...values) - Math.min(...values), shift];
    });
    const [size, shift] = spread.sort((a, b) => b[0] - a[0])[0];
    return { colors, size: size * Math.log2(1 + colors.reduce((sum, [, n]) => sum + n, 0)), shift };
  };
  const boxes = [boxed([...counts])];
  while (boxes.length < 256) {
    boxes.sort((a, b) => b.size - a.size);
    const { colors, size, shift } = boxes[0];
    if (size === 0) break;
    colors.sort(([a], [b]) => channel(a, shift) - channel(b, shift));
    boxes.splice(0, 1, boxed(colors.slice(0, colors.length >> 1)), boxed(colors.slice(colors.length >> 1)));
  }
  // A box's commonest colour stays what it is: backgrounds do not change.
  return boxes.map(({ colors }) => [colors.reduce((best, one) => (one[1] > best[1] ? one : best))[0], colors]);
}

/** The same picture with a palette. */
function compressed(png) {
  const { width, height, at } = decode(png);
  const counts = new Map();
  for (let i = 0; i < width * height; i++) counts.set(at(i), (counts.get(at(i)) ?? 0) + 1);
  const colors = palette(counts);
  const index = new Map(colors.flatMap(([, from], i) => from.map(([color]) => [color, i])));
  const rows = Buffer.alloc((width + 1) * height);
  for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) rows[y * (width + 1) + 1 + x] = index.get(at(y * width + x));
  const chunk = (type, data) => {
    const body = Buffer.concat([Buffer.from(type, "latin1"), data]);
    const frame = Buffer.alloc(8);
    frame.writeUInt32BE(data.length, 0);
    frame.writeUInt32BE(crc32(body), 4);
    return Buffer.concat([frame.subarray(0, 4), body, frame.subarray(4)]);
  };
  const head = Buffer.alloc(13);
  head.writeUInt32BE(width, 0);
  head.writeUInt32BE(height, 4);
  head.set([8, 3, 0, 0, 0], 8);
  const table = Buffer.from(colors.flatMap(([color]) => [color >> 16, (color >> 8) & 255, color & 255]));
  return Buffer.concat([png.subarray(0, 8), chunk("IHDR", head), chunk("PLTE", table), chunk("IDAT", deflateSync(rows, { level: 9 })), chunk("IEND", Buffer.alloc(0))]);
}

const profile = await mkdtemp(join(tmpdir(), "cedra-shots-"));
const server = await serve({ "/demo/": join(root, "www/dist") });
const context = await chromium.launchPersistentContext(profile, {
  executablePath: process.env.CEDRA_CHROMIUM ?? "/usr/bin/chromium",
  headless: true,
  chromiumSandbox: false,
  args: FLAGS,
  env: environment(),
  colorScheme: "light",
  reducedMotion: "reduce",
});
const page = await context.newPage();
page.setDefaultTimeout(SLOW);
const SIZES = { desktop: { width: 1440, height: 900 }, phone: { width: 390, height: 844 } };

/** A state at both sizes, light and dark. */
async function shoot(state, from) {
  for (const [size, viewport] of Object.entries(SIZES)) {
    await page.setViewportSize(viewport);
    for (const colorScheme of ["light", "dark"]) {
      await page.emulateMedia({ colorScheme });
      await page.evaluate((from) => {
        const place = from && document.querySelector(from);
        scrollTo({ top: place ? place.getBoundingClientRect().top + scrollY - 20 : 0, behavior: "instant" });
      }, from);
      await page.waitForTimeout(300);
      const bytes = compressed(await page.screenshot({ timeout: SLOW }));
      await writeFile(join(out, `${state}-${size}-${colorScheme}.png`), bytes);
      console.log(`${state}-${size}-${colorScheme}.png: ${Math.round(bytes.length / 1000)} kB`);
    }
  }
  await page.emulateMedia({ colorScheme: "light" });
  await page.setViewportSize(SIZES.desktop);
}

const idle = () => page.waitForSelector("#composer:not([hidden]) #send:not([hidden])");
const ask = async (question) => {
  await page.fill("#question", question);
  await page.click("#send");
  await page.waitForSelector(".answer.busy");
  await idle();
};

try {
  await mkdir(out, { recursive: true });
  await page.setViewportSize(SIZES.desktop);
  await page.goto(`${server.url}/demo/`);
  await page.waitForSelector(".samples li");
  await shoot("start");
  // The beginning of the short sample: a CPU reads slowly.
  const sample = await readFile(join(root, "www/public/samples/short.txt"), "utf8");
  await page.setInputFiles("#files", { name: "notebook.md", mimeType: "text/markdown", buffer: Buffer.from(sample.slice(0, sample.indexOf("\n\n", 1700))) });
  await idle();
  for (const question of ["What is the value of TABLE_ROWS?", "What is the port of heron?"]) await ask(question);
  await page.waitForTimeout(1000);
  await shoot("answers", "#ask");
  await shoot("figures", "#figure-engram");
  await page.reload();
  await idle();
  await ask("Which port does heron have?");
  await page.waitForTimeout(1000);
  await shoot("reload", "#ask");
  await page.goto(`${server.url}/demo/?draft=5`);
  await idle();
  await ask("What is TABLE_ROWS?");
  await page.waitForTimeout(1000);
  await shoot("drafted", "#turns li:last-child");
} finally {
  await context.close();
  await server.close();
  await rm(profile, { recursive: true, force: true });
}

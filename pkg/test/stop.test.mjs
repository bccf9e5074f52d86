import assert from "node:assert/strict";
import { test } from "node:test";
import { StopMatcher } from "../dist/stop.js";

const run = (stops, pieces) => {
  const matcher = new StopMatcher(stops);
  let shown = "";
  for (const piece of pieces) {
    const { text, stopped } = matcher.push(piece);
    shown += text;
    if (stopped) return { shown, stopped };
  }
  return { shown: shown + matcher.finish(), stopped: false };
};

/** All ways to cut a text in two places, and character by character. */
const cuts = (text) => {
  const all = [[text], [...text]];
  for (let a = 0; a <= text.length; a++) {
    for (let b = a; b <= text.length; b++) all.push([text.slice(0, a), text.slice(a, b), text.slice(b)]);
  }
  return all;
};

test("a stop string ends the text wherever it is cut, and nothing of it shows", () => {
  const cases = [
    ["one two\n\nthree", ["\n\n"], "one two", true],
    ["aaab and more", ["aab"], "a", true],
    ["abcabd", ["abd"], "abc", true],
    ["first of two", ["two", "of"], "first ", true],
    ["abcd", ["bcd", "abcd"], "", true],
    ["nothing of it \n", ["\n\n", "it is"], "nothing of it \n", false],
    ["a tail of <|en", ["<|end|>"], "a tail of <|en", false],
  ];
  for (const [text, stops, shown, stopped] of cases) {
    for (const pieces of cuts(text)) assert.deepEqual(run(stops, pieces), { shown, stopped }, JSON.stringify([stops, pieces]));
  }
});

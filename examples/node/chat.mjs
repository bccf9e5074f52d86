// Two questions about one text, in Node. The second reads only what is new.
//
//   npm install webgpu
//   node examples/node/chat.mjs [model folder or URL]

import { create } from "webgpu";
import { Engine } from "cedra";

globalThis.navigator ??= {};
navigator.gpu = create([]);

const model = process.argv[2] ?? new URL("../../models/pocket/", import.meta.url);
const engine = await Engine.load(model, { context: 1024 });

const messages = [];
for (const question of [
  "The port of heron is 6077.\n\nThe owner of `zorbel` is Ada.\n\nconst GRID_SIZE: usize = 512;\n\nWhat is the port of heron?",
  "What is the value of GRID_SIZE?",
]) {
  console.log(`> ${question.replaceAll("\n\n", " ")}`);
  messages.push({ role: "user", content: question });
  const stream = await engine.chat.completions.create({
    messages,
    stream: true,
    stream_options: { include_usage: true },
    temperature: 0,
    max_tokens: 32,
  });
  let content = "";
  for await (const { choices, usage } of stream) {
    const piece = choices[0]?.delta.content ?? "";
    process.stdout.write(piece);
    content += piece;
    if (usage) console.log(`\n${usage.prompt_tokens} tokens, ${usage.prompt_tokens_details.cached_tokens} of them known`);
  }
  messages.push({ role: "assistant", content });
}
engine.close();

"""A quick look at a checkpoint in PyTorch, and what only this code can do: leaving parts of the architecture out.

    python evaluate.py --work work [--lengths 256,1024] [--cases 40] [--out ablations.json]

Bits per byte of held-out documentation, and how often every token of a value is the most likely one (teacher-forced, which is the
greedy text as long as it is right), for each variant. What a model can do is measured in Cedra: see `cases.py`.
"""

import argparse
import collections
import json
import math
import random

import torch
import torch.nn.functional as F

import cases
import checkpoint
import data
import facts
import model as M

VARIANTS = {
    "native": {},
    "no candidate pool": dict(pool=False),
    "all entries": dict(sparse=False, pool=False),
    "newest entries": dict(recent=True, pool=False),
    "no Engram": dict(engram=False),
}


@torch.no_grad()
def bits_per_byte(model, tokenizer, texts, options):
    """every text by itself, windows of 1,024 tokens with at least 512 before a prediction"""
    nats, size = 0.0, 0
    for text in texts:
        ids, at = [0] + tokenizer.encode(text).ids, 1
        size += len(text.encode())
        while at < len(ids):
            low = max(0, at - 512)
            high = min(len(ids), low + 1024)
            logits = model.logits(torch.tensor([ids[low:high]]), M.Options(**options))[0, at - low - 1 : -1]
            nats += float(F.cross_entropy(logits, torch.tensor(ids[at:high]), reduction="sum"))
            at = high
    return nats / math.log(2) / size


@torch.no_grad()
def hits(model, tokenizer, task, options):
    """kind of value -> [right, asked]: every question of a task, each behind the document alone"""
    special = {name: tokenizer.token_to_id(text) for name, text in data.SPECIAL.items()}
    out = collections.defaultdict(lambda: [0, 0])
    head = [special["bos"], special["user"]]
    for q in task["questions"]:
        prompt = head + tokenizer.encode(f"{task['document']}\n\n{q['question']}").ids + [special["assistant"], special["answer"]]
        encoded, start = tokenizer.encode(q["answer"]), q["answer"].rindex(q["value"])
        x = model(torch.tensor([prompt + encoded.ids]), M.Options(**options))[len(prompt) - 1 : -1]
        best = (x @ model.head.t()).argmax(-1).tolist()
        inside = [a < start + len(q["value"]) and b > start for a, b in encoded.offsets]
        out[q["kind"]][0] += all(b == i for b, i, value in zip(best, encoded.ids, inside) if value)
        out[q["kind"]][1] += 1
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="work")
    parser.add_argument("--checkpoint", default="", help="by default last.pt of the work folder")
    parser.add_argument("--lengths", default="256,1024")
    parser.add_argument("--cases", type=int, default=44, help="questions of a length")
    parser.add_argument("--bytes", type=int, default=30000)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, state = checkpoint.trained(options.work, options.checkpoint)
    tokenizer = checkpoint.tokenizer(options.work)
    documents = cases.Documents(options.work, tokenizer)
    texts = [task["text"] for task in cases.texts(documents, options.bytes)]
    result = dict(step=state["step"], tokens=state["tokens"], seconds=state["used"], variants={})
    for variant in options.variants.split(","):
        switches, row = VARIANTS[variant], {}
        row["bits_per_byte"] = bits_per_byte(model, tokenizer, texts, switches)
        for length in map(int, options.lengths.split(",")):
            total = collections.Counter()
            right = collections.Counter()
            number = 0
            while sum(total.values()) < options.cases:
                r = random.Random(99_000 + length + number)
                kinds = [facts.KINDS[(number * 5 + i) % len(facts.KINDS)] for i in range(5 if length < 1024 else 11)]
                document, stated, _, _ = documents.with_facts(r, length, kinds)
                found = hits(model, tokenizer, dict(document=document, questions=[cases.asked(*s) for s in stated]), switches)
                for kind, (good, asked) in found.items():
                    right[kind] += good
                    total[kind] += asked
                number += 1
            row[length] = dict(right=sum(right.values()), asked=sum(total.values()), kinds={k: [right[k], total[k]] for k in sorted(total)})
        result["variants"][variant] = row
        print(variant, json.dumps(row), flush=True)
    if options.out:
        with open(options.out, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()

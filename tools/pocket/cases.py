"""Makes the tasks of an evaluation for `examples/measure.rs`, one JSON object a line.

    python cases.py --work work --out tasks.jsonl --lengths 256,1024,4096 --cases 50

Documents are paragraphs of held-out pages with facts at 0, 25, 50, 75 and 100 % of their depth; every fact is asked for once, behind
the document alone. A cell of the table is a length and a depth; `--cases` is how many questions it has at least. Kinds of value
take turns. At 4,096 tokens there are also questions about what the text does not say, and the same questions in one conversation.
"""

import argparse
import json
import random

from tokenizers import Tokenizer

import data
import facts
from tokenizer import load_docs

DEPTHS = (0, 25, 50, 75, 100)
# Facts of a document: a short one has no room for many.
FACTS = ((512, 5), (2048, 20), (8192, 40), (1 << 30, 55))
EXTRA = 4096  # the length of what is measured at one length only
SEED = 20_001


class Documents:
    """Paragraphs of held-out pages, in another order each time."""

    def __init__(self, work, tokenizer):
        pages = load_docs(f"{work}/docs.jsonl")
        held_out, training = data.split(pages)
        self.words = data.ordinary_words(training)
        self.tokenizer, self.pages = tokenizer, held_out
        texts = data.paragraphs(held_out)
        self.paragraphs = [(text, len(e.ids) + 1) for text, e in zip(texts, tokenizer.encode_batch(texts))]

    def filler(self, r, tokens):
        """paragraphs of about so many tokens"""
        out, count, before = [], 0, -1
        while before < count < tokens:
            before = count
            for text, length in r.sample(self.paragraphs, len(self.paragraphs)):
                if count < tokens and count + length <= tokens + 20:
                    out.append(text)
                    count += length
        return out

    def with_facts(self, r, length, kinds):
        """(document, [(depth, fact)], pairs that are used); `kinds` has a kind of value for each fact, depths take turns"""
        made, used = facts.Facts(r, self.words), set()
        stated = [(DEPTHS[i % len(DEPTHS)], made.fact(used, kind)) for i, kind in enumerate(kinds)]
        size = sum(len(self.tokenizer.encode(fact.statement).ids) + 1 for _, fact in stated)
        # A document that is as long as a context leaves room for a question and its answer.
        filler = self.filler(r, max(0, length - size - (128 if length >= 16384 else 0)))
        places = {depth: round(len(filler) * depth / 100) for depth in DEPTHS}
        out = []
        for i in range(len(filler) + 1):
            out += [fact.statement for depth, fact in stated if places[depth] == i]
            out += filler[i : i + 1]
        return "\n\n".join(out), stated, used, made


def asked(depth, fact):
    return dict(depth=depth, kind=fact.kind, question=fact.question, answer=fact.answer, value=fact.value)


def retrieval(documents, length, cases):
    """tasks with `cases` questions or more at each depth, and kinds of value evenly"""
    count = next(n for limit, n in FACTS if length <= limit)
    total, number, kinds = cases * len(DEPTHS), 0, []
    while number * count < total:
        r = random.Random(SEED + 1000 * length + number)
        kinds = [facts.KINDS[(number * count + i // len(DEPTHS) + 3 * (i % len(DEPTHS))) % len(facts.KINDS)] for i in range(count)]
        document, stated, _, _ = documents.with_facts(r, length, kinds)
        yield dict(task="questions", name="retrieval", length=length, document=document, questions=[asked(*s) for s in stated])
        number += 1


def absent(documents, cases):
    for number in range(-(-cases // 10)):
        r = random.Random(SEED + 7 + number)
        document, _, used, made = documents.with_facts(r, EXTRA, [r.choice(facts.KINDS) for _ in range(20)])
        questions = [
            dict(question=made.absent(used), answer=facts.NOT_SAID, value=facts.NOT_SAID, kind="absent", depth=0) for _ in range(10)
        ]
        yield dict(task="questions", name="absent", length=EXTRA, document=document, questions=questions)


def turns(documents, cases):
    for number in range(-(-cases // 10)):
        r = random.Random(SEED + 500_000 + number)
        document, stated, _, _ = documents.with_facts(r, EXTRA, [r.choice(facts.KINDS) for _ in range(10)])
        yield dict(task="questions", name="turns", length=EXTRA, document=document, turns=True, questions=[asked(*s) for s in stated])


def copying(documents, cases):
    """labelled snippets of ordinary words, one to be repeated"""
    for number in range(cases):
        r = random.Random(SEED + 900_000 + number)
        made = facts.Facts(r, documents.words)
        labels = r.sample("alpha beta gamma delta".split(), 3)
        snippets = {label: " ".join(made.word() for _ in range(8)) for label in labels}
        document = "\n\n".join(f"Snippet {label}: {text}" for label, text in snippets.items())
        label = r.choice(labels)
        question = dict(question=f"Repeat snippet {label}.", answer=snippets[label], value=snippets[label], kind="copy", depth=0)
        yield dict(task="questions", name="copying", length=128, tokens=48, document=document, questions=[question])


def texts(documents, limit):
    """held-out pages, at most 12,000 characters of each"""
    count = 0
    for page in documents.pages:
        if count >= limit:
            break
        text = page["text"][:12000]
        count += len(text.encode())
        yield dict(task="text", name="held-out", text=text)


def modes(documents, lengths, number):
    """a document, and what comes after it: more of the same, or a question with its answer"""
    for length in lengths:
        for i in range(number):
            r = random.Random(SEED + 300_000 + 100 * length + i)
            document, stated, _, _ = documents.with_facts(r, length, facts.KINDS)
            asked_for = "".join(f"<｜User｜>{f.question}<｜Assistant｜></think>{f.answer}<｜end▁of▁sentence｜>" for _, f in stated[1:5])
            _, first = stated[0]
            ending = f"\n\n{first.question}<｜Assistant｜></think>"
            document, following = f"<｜User｜>{document}{ending}", f"{first.answer}<｜end▁of▁sentence｜>{asked_for}"
            yield dict(task="modes", name="questions", length=length, document=document, following=following)
            words = "\n\n".join(documents.filler(r, length + 160))
            cut = words.index(" ", int(len(words) * length / (length + 160)))
            yield dict(task="modes", name="documentation", length=length, document=words[:cut], following=words[cut:][:400])


def drafts(documents, number, tokens):
    for i in range(number):
        r = random.Random(SEED + 700_000 + i)
        page = r.choice([page for page in documents.pages if len(page["text"]) > 2000] or documents.pages)["text"]
        start = r.randrange(max(1, len(page) - 1500))
        yield dict(task="draft", name="documentation", text=page[start : start + 1000], tokens=tokens)
        document, stated, _, _ = documents.with_facts(r, 512, facts.KINDS[:5])
        messages = [dict(role="user", content=f"{document}\n\n{stated[0][1].question}")]
        yield dict(task="draft", name="answers", messages=messages, tokens=tokens)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="work")
    parser.add_argument("--tokenizer", default="", help="folder of the tokenizer that lengths are measured with")
    parser.add_argument("--out", default="tasks.jsonl")
    parser.add_argument("--lengths", default="256,1024,4096,16384,65536")
    parser.add_argument("--cases", type=int, default=50, help="questions of a length and depth")
    parser.add_argument("--bytes", type=int, default=67000, help="of held-out documentation")
    parser.add_argument("--parts", default="text,drafts,modes,copying,absent,turns,retrieval")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(f"{options.tokenizer or options.work + '/tokenizer'}/tokenizer.json")
    documents = Documents(options.work, tokenizer)
    lengths = [int(n) for n in options.lengths.split(",")]
    some = max(1, options.cases // 5)
    made = dict(
        text=lambda: texts(documents, options.bytes),
        drafts=lambda: drafts(documents, options.cases, 64),
        modes=lambda: modes(documents, [n for n in lengths if n <= 16384], some),
        copying=lambda: copying(documents, options.cases),
        absent=lambda: absent(documents, options.cases),
        turns=lambda: turns(documents, options.cases),
        retrieval=lambda: (task for length in lengths for task in retrieval(documents, length, options.cases)),
    )
    with open(options.out, "w") as out:
        for part in options.parts.split(","):
            for task in made[part]():
                out.write(json.dumps(task, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

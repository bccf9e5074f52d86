"""Training samples, made as they are needed: documentation, retrieval documents with questions, text to copy, chat about functions.

A sample is `length` token ids, a loss weight for each, and for each token of an answer the position that it is copied from (-1
elsewhere), which the attention supervision in `train.py` uses. Sample number i of seed s is always the same.
"""

import collections
import json
import random
import re

import numpy as np

import facts
from tokenizer import load_docs

SPECIAL = dict(
    bos="<｜begin▁of▁sentence｜>",
    eos="<｜end▁of▁sentence｜>",
    user="<｜User｜>",
    assistant="<｜Assistant｜>",
    system="<｜System｜>",
    answer="</think>",
)
# What ends an answer, and that there is none, are few tokens beside what copying would go on with.
END = 3.5
# Loss weights: filler text and documentation, statements around a value, the value where it first stands (nobody can know it),
# questions, answers, the values in answers, and what is repeated.
TEXT, STATEMENT, STATED, QUESTION, ANSWER, VALUE, COPIED = 1.0, 0.5, 0.1, 0.3, 2.5, 4.0, 3.0


def split(docs):
    """(held-out pages, training pages), 1 : 39, the same at every call"""
    docs = list(docs)
    random.Random(1).shuffle(docs)
    return docs[: len(docs) // 40], docs[len(docs) // 40 :]


def ordinary_words(pages):
    """words of four to nine letters that occur 25 times or more"""
    count = collections.Counter(word for page in pages for word in re.findall(r"\b[a-z]{4,9}\b", page["text"]))
    return sorted(word for word, n in count.items() if n >= 25)


def paragraphs(pages):
    return [text for page in pages for text in re.split(r"\n\n(?=[^ \n])", page["text"]) if 60 < len(text) < 900]


def functions(pages):
    """(name, signature, first paragraph, item) of documented functions"""
    out = []
    for page in pages:
        item = re.search(r"# \w+ `?([\w:]+)", page["text"][:80])
        blocks = page["text"].split("\n\n")
        for block, after in zip(blocks, blocks[1:]):
            found = re.match(r"`(pub .*?fn (\w+).*)`$", block)
            if found and 30 < len(after) < 420 and not after.startswith(("```", "#", "`pub")):
                out.append((found.group(2), block[1:-1], after, item.group(1) if item else ""))
    return out


class Source:
    """What all samples are made from: encoded once."""

    def __init__(self, docs_file, tokenizer):
        self.tokenizer = tokenizer
        self.special = {name: tokenizer.token_to_id(text) for name, text in SPECIAL.items()}
        self.held_out, pages = split(load_docs(docs_file))
        self.words = ordinary_words(pages)
        self.functions = functions(pages)
        texts = paragraphs(pages)
        self.paragraphs = [(text, e.ids) for text, e in zip(texts, tokenizer.encode_batch(texts))]
        stream = []
        for e in tokenizer.encode_batch([page["text"] for page in pages]):
            stream += [self.special["bos"]] + e.ids + [self.special["eos"]]
        self.stream = np.array(stream, np.uint16)
        self.plain = {i for text in ("The", " the", " of", " is", ".", " =") for i in tokenizer.encode(text).ids}
        # Tokens that the text has, special ones aside.
        self.sayable = sorted(set(np.unique(self.stream).tolist()) - set(self.special.values()))


def aligned(ids, text, places, plain):
    """for each token the place among `places` of `text` that has it within the longest common run; -1 for `plain` tokens and others"""
    runs = {}
    for i in reversed(range(len(ids))):
        for p in places:
            if text[p] == ids[i]:
                runs[i, p] = 1 + runs.get((i + 1, p + 1), 0)
    for i, p in sorted(runs):  # a run counts as a whole
        runs[i, p] = max(runs[i, p], runs.get((i - 1, p - 1), 0))
    out = []
    for i, token in enumerate(ids):
        best = max((p for p in places if text[p] == token), key=lambda p: runs[i, p], default=-1)
        out.append(-1 if token in plain else best)
    return out


class Draft:
    """A sample in the making."""

    def __init__(self, source):
        self.source, self.ids, self.weights, self.copied = source, [], [], []

    def __len__(self):
        return len(self.ids)

    def add(self, ids, weight, copied=None):
        self.ids += ids
        self.weights += weight if isinstance(weight, list) else [weight] * len(ids)
        self.copied += copied or [-1] * len(ids)

    def special(self, *names, weight=QUESTION):
        self.add([self.source.special[name] for name in names], weight)

    def text(self, text, weight):
        self.add(self.source.tokenizer.encode(text).ids, weight)

    def pieces(self, pieces):
        """Adds pieces (text, weight) as one text: tokens reach over their borders, as they do in a text that somebody wrote. Returns
        the places of each piece's tokens."""
        encoded, at = self.source.tokenizer.encode("".join(text for text, _ in pieces)), len(self)
        ends = np.cumsum([len(text) for text, _ in pieces])
        starts = ends - [len(text) for text, _ in pieces]
        first, last = np.array(encoded.offsets).reshape(-1, 2).T
        places = [range(at + i, at + j) for i, j in zip(np.searchsorted(last, starts, "right"), np.searchsorted(first, ends, "left"))]
        of = np.searchsorted(ends, last, "left")  # a token counts as what it ends with
        self.add(encoded.ids, [pieces[i][1] for i in of])
        for place, (_, weight) in zip(places, pieces):
            if weight == STATED:  # of a value, every token that has some of it
                self.weights[place.start : place.stop] = [STATED] * len(place)
        return places

    def cut(self, length):
        return (
            np.array(self.ids[:length], np.int64),
            np.array(self.weights[:length], np.float32),
            np.array(self.copied[:length], np.int64),
        )


class Samples:
    """`make(number, length)` is a sample. Shares: documentation of all; of the rest text to copy; the rest of that is retrieval."""

    def __init__(self, source, seed, documentation, copying, chat=0.05):
        self.source, self.seed, self.shares = source, seed, (documentation, copying, chat * bool(source.functions))

    def make(self, number, length):
        """(ids, weights, copied from, whether it is documentation)"""
        self.random = random.Random(self.seed * 1_000_003 + number)
        self.facts = facts.Facts(self.random, self.source.words)
        documentation, copying, chat = self.shares
        k = self.random.random()
        if k < documentation:
            return *self.documentation(length), True
        rest = (k - documentation) / (1 - documentation)
        kind = self.copying if rest < copying else self.chat if rest < copying + chat else self.retrieval
        return *kind(length), False

    def documentation(self, length):
        start = self.random.randrange(len(self.source.stream) - length)
        ids = np.concatenate([[self.source.special["bos"]], self.source.stream[start : start + length - 1]]).astype(np.int64)
        return ids, np.full(length, TEXT, np.float32), np.full(length, -1, np.int64)

    def marked(self, text, value):
        """(ids, which of them belong to the value)"""
        encoded = self.source.tokenizer.encode(text)
        start = text.rindex(value)
        end = start + len(value)
        return encoded.ids, [a < end and b > start for a, b in encoded.offsets]

    def retrieval(self, length):
        text = Draft(self.source)
        text.special("bos", weight=0.0)
        if self.random.random() < 0.2:
            text.special("system")
            text.text(self.random.choice(("You answer questions about the document.", "Answer briefly.")), QUESTION)
        used = set()
        while len(text) < length:
            self.document(text, used, length - len(text))
        return text.cut(length)

    def document(self, text, used, room):
        """a document in a user's turn, then every fact of it asked for once, and some that it does not have"""
        r, pieces = self.random, []
        if r.random() < 0.4:  # many facts close together
            budget, gap = min(room * r.uniform(0.3, 0.7), 1500), r.choice((0, 30, 60, 120))
            count = 0
            while count < budget:
                if pieces and r.random() < gap / (gap + 20):
                    pieces.append((*self.filler(160 if gap else 20), None))
                else:
                    pieces.append(self.stated(used))
                count += pieces[-1][1] + 1
        else:  # a few facts in running text
            stated = [self.stated(used) for _ in range(r.randint(2, max(3, min(40, room // 80))))]
            count = sum(size + 1 for _, size, _ in stated)
            budget = room - 28 * len(stated) - 20
            while count < budget:
                pieces.append((*self.filler(min(200, max(4, budget - count))), None))
                count += pieces[-1][1] + 1
            for piece in stated:
                pieces.insert(r.randrange(len(pieces) + 1), piece)
        queue = [fact for *_, fact in pieces if fact]
        r.shuffle(queue)
        parts, where = [], {}
        for words, _, fact in pieces:
            if fact:
                before, behind = words.rsplit(fact.value, 1)
                where[fact] = len(parts) + 1
                parts += [(before, STATEMENT), (fact.value, STATED), (behind, STATEMENT)]
            else:
                parts.append((words, TEXT))
            parts.append(("\n\n", STATEMENT))
        absent, turns = r.choice((0.0, 0.15, 0.3)), []
        for fact in queue:
            turns += [None, fact] if r.random() < absent else [fact]
        for number, fact in enumerate(turns):
            question = fact.question if fact else self.facts.absent(used)
            text.special("user")
            if number == 0:
                places = text.pieces([*parts, (question, QUESTION)])
                asked = places[-1]
            else:
                asked = len(text)
                text.text(question, QUESTION)
                asked = range(asked, len(text))
            text.special("assistant", "answer")
            if fact:
                self.answer(text, fact, places[where[fact]], asked)
            else:
                text.text(facts.NOT_SAID, END)
            text.special("eos", weight=END)

    def stated(self, used):
        """(statement, its tokens, fact)"""
        fact = self.facts.fact(used)
        return fact.statement, len(self.source.tokenizer.encode(fact.statement).ids), fact

    def answer(self, text, fact, stated, asked):
        """the value is copied from where it is stated, what is asked about from the question"""
        ids, inside = self.marked(fact.answer, fact.value)
        at = [i for i, value in enumerate(inside) if value]
        copied = [-1 if value else p for value, p in zip(inside, aligned(ids, text.ids, asked, self.source.plain))]
        if [ids[i] for i in at] == [text.ids[p] for p in stated]:
            for i, p in zip(at, stated):
                copied[i] = p
        weights = [VALUE if value else ANSWER for value in inside]
        weights[0] = max(weights[0], END)  # whether there is an answer at all counts as much either way
        text.add(ids, weights, copied)

    def filler(self, limit):
        """(a text of so many tokens at most, its tokens)"""
        if self.random.random() < 0.12:
            text = "\n".join(self.facts.noise() for _ in range(self.random.randint(1, 5)))
            ids = self.source.tokenizer.encode(text).ids
        else:
            text, ids = self.random.choice(self.source.paragraphs)
        return (text, len(ids)) if len(ids) <= limit else (self.source.tokenizer.decode(ids[:limit]), limit)

    def copying(self, length):
        """a text to repeat, or labelled snippets of which one is asked for; mostly too long for a window"""
        r, text = self.random, Draft(self.source)
        text.special("bos", weight=0.0)
        while len(text) < length:
            size = int(4 * 4 ** (2 * r.random())) if r.random() < 0.4 else int(64 * max(1.0, length / 160) ** r.random())
            text.special("user")
            if r.random() < 0.4:
                labels = r.sample("alpha beta gamma delta first second third red blue green".split(), r.randint(2, 4))
                snippets, parts = {label: self.snippet(size // len(labels) + 3) for label in labels}, []
                for label in labels:
                    parts += [(f"Snippet {label}:", QUESTION), (" " + snippets[label], STATED), ("\n\n", STATEMENT)]
                label = r.choice(labels)
                parts.append((r.choice((f"Repeat snippet {label}.", f"What is snippet {label}?")), QUESTION))
                said, place = snippets[label], text.pieces(parts)[3 * labels.index(label) + 1]
            elif r.random() < 0.5:
                said = self.snippet(size)
                place = text.pieces([(said, STATED), ("\n\n" + self.again(), QUESTION)])[0]
            else:  # any tokens: to be copied, a token has to be said whatever came before it
                ids, start = [r.choice(self.source.sayable) for _ in range(size)], len(text)
                text.add(ids, STATED)
                text.text("\n\n" + self.again(), QUESTION)
                said, place = None, range(start, start + size)
            ids = self.source.tokenizer.encode(said).ids if said else text.ids[place.start : place.stop]
            copied = [place.start + i if text.ids[place.start + i] == token else -1 for i, token in enumerate(ids[: len(place)])]
            text.special("assistant", "answer")
            text.add(ids, COPIED, copied + [-1] * (len(ids) - len(copied)))
            text.special("eos", weight=END)
        return text.cut(length)

    def again(self):
        return self.random.choice(("Repeat this.", "Repeat the text above.", "Say it again."))

    def snippet(self, size):
        """ordinary words and names, or a paragraph"""
        r = self.random
        if r.random() < 0.7:
            names = (r.choice((self.facts.name, self.facts.word, self.facts.word))() for _ in range(max(2, size // 2)))
            return r.choice((" ", " ", ", ", "\n")).join(names)
        text, ids = r.choice(self.source.paragraphs)
        return self.source.tokenizer.decode(ids[: max(3, size)]).strip() or text

    def chat(self, length):
        """what a documented function does, or its signature"""
        r, text = self.random, Draft(self.source)
        text.special("bos", weight=0.0)
        while len(text) < length:
            name, signature, about, item = r.choice(self.source.functions)
            of = f" of `{item}`" if item and r.random() < 0.5 else ""
            k = r.random()
            if k < 0.6:
                question = r.choice((f"What does `{name}`{of} do?", f"Explain `{name}`{of}.", f"What is `{name}`{of} for?"))
            elif k < 0.85:
                question = f"What does this function do?\n\n```rust\n{signature}\n```"
            else:
                question = f"Show the signature of `{name}`{of}."
            text.special("user")
            text.text(question, STATEMENT)
            text.special("assistant", "answer")
            text.text(about if k < 0.85 else f"```rust\n{signature}\n```", TEXT)
            text.special("eos", weight=1.0)
        return text.cut(length)


def main():
    """Shows samples: python data.py [number ...]"""
    import argparse

    from tokenizers import Tokenizer

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--work", default="work")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("numbers", type=int, nargs="*", default=[0])
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(f"{options.work}/tokenizer/tokenizer.json")
    source = Source(f"{options.work}/docs.jsonl", tokenizer)
    print(
        json.dumps(
            dict(stream=len(source.stream), words=len(source.words), functions=len(source.functions), paragraphs=len(source.paragraphs))
        )
    )
    samples = Samples(source, 7, 0.0, 0.3)
    for number in options.numbers:
        ids, weights, copied, _ = samples.make(number, options.length)
        assert all(ids[p] == token for token, p in zip(ids, copied) if p >= 0)
        print(f"--- {number}: {sum(p >= 0 for p in copied)} tokens copied, mean weight {weights.mean():.2f}")
        print(tokenizer.decode(ids.tolist(), skip_special_tokens=False))


if __name__ == "__main__":
    main()

"""Bits per byte of the held-out documentation by `xz -9e` and by a token 5-gram, as JSON: what a model has to be better than.

python baselines.py --work work --out baselines.json
"""

import argparse
import collections
import json
import lzma
import math

import cases
import checkpoint
import data

ORDER, DISCOUNT = 5, 0.75
FILTERS = [dict(id=lzma.FILTER_LZMA2, preset=9 | lzma.PRESET_EXTREME, dict_size=64 << 20)]


def packed(text):
    return len(lzma.compress(text, format=lzma.FORMAT_XZ, filters=FILTERS))


def ngram(stream, texts, vocabulary):
    """bits of texts (lists of ids) by interpolated absolute discounting; only what the texts ask for is counted"""
    needed = {tuple(ids[i - k : i]) for ids in texts for i in range(1, len(ids)) for k in range(min(ORDER, i + 1))}
    counts = collections.defaultdict(dict)
    for i in range(len(stream)):
        for k in range(min(ORDER, i + 1)):
            context = tuple(stream[i - k : i])
            if context in needed:
                after = counts[context]
                after[stream[i]] = after.get(stream[i], 0) + 1
    totals, bits = {context: sum(after.values()) for context, after in counts.items()}, 0.0
    for ids in texts:
        for i in range(1, len(ids)):
            p = 1 / vocabulary
            for k in range(min(ORDER, i + 1)):
                context = tuple(ids[i - k : i])
                after = counts.get(context)
                if not after:
                    break
                p = max(after.get(ids[i], 0) - DISCOUNT, 0) / totals[context] + DISCOUNT * len(after) / totals[context] * p
            bits -= math.log2(p)
    return bits


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="work")
    parser.add_argument("--bytes", type=int, default=67000, help="of held-out documentation")
    parser.add_argument("--out", default="baselines.json")
    options = parser.parse_args()
    tokenizer = checkpoint.tokenizer(options.work)
    source = data.Source(f"{options.work}/docs.jsonl", tokenizer)
    texts = [task["text"] for task in cases.texts(cases.Documents(options.work, tokenizer), options.bytes)]
    held_out = "\n\n".join(texts).encode()
    training = "\n\n".join(page["text"] for page in data.split(data.load_docs(f"{options.work}/docs.jsonl"))[1]).encode()
    size = sum(len(text.encode()) for text in texts)
    ids = [[source.special["bos"]] + tokenizer.encode(text).ids for text in texts]
    found = {
        "bytes": size,
        "xz -9e": 8 * packed(held_out) / size,
        "xz -9e behind the training text": 8 * (packed(training + held_out) - packed(training)) / size,
        f"token {ORDER}-gram": ngram(source.stream.tolist(), ids, tokenizer.get_vocab_size()) / size,
    }
    with open(options.out, "w") as file:
        json.dump(found, file, indent=1)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

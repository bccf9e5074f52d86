"""The tokenizer, a byte-level BPE with the family's splits and special tokens, and the Engram constants that follow from it.

python tokenizer.py --docs work/docs.jsonl --out work/tokenizer
python tokenizer.py --docs work/docs.jsonl --out work/tokenizer --from models/pocket     # takes over a tokenizer
"""

import argparse
import json
import os
import shutil

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCABULARY = 4096
HEAD = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
TAIL = ["<｜User｜>", "<｜Assistant｜>", "<｜System｜>", "<think>", "</think>", "｜DSML｜", "<｜deepseek_image｜>", "<｜dspark_noise｜>"]
SPLITS = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
]
TRANSLATIONS = tuple(f"/rust-by-example/{language}/" for language in ("es", "ja", "ko", "zh"))


def load_docs(path):
    """pages in English"""
    with open(path) as file:
        pages = [json.loads(line) for line in file]
    return [p for p in pages if not any(t in p["src"] for t in TRANSLATIONS) and sum(ord(c) > 0x2FFF for c in p["text"]) < 20]


def train(texts):
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in SPLITS]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = VOCABULARY - len(TAIL)
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=HEAD, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != size:
        raise SystemExit(f"the text gives {tokenizer.get_vocab_size()} tokens, {size} are needed: gather more of it")
    tokenizer.add_special_tokens(TAIL)
    return tokenizer


def engram_map(tokenizer):
    """(compressed id of each token, their number): tokens that are the same but for case, accents and spaces have one"""
    keep = "\ue000"
    steps = [normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    steps += [normalizers.Replace(Regex(r"[ \t\r\n]+"), " "), normalizers.Replace(Regex(r"^ $"), keep), normalizers.Strip()]
    steps += [normalizers.Replace(keep, " ")]
    normalize, keys, out = normalizers.Sequence(steps), {}, []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = tokenizer.id_to_token(token) if "\ufffd" in text else (normalize.normalize_str(text) or text)
        out.append(keys.setdefault(key, len(keys)))
    return np.array(out, np.int64), len(keys)


def prime_above(n, taken):
    n += 1
    while n in taken or n < 2 or any(n % d == 0 for d in range(2, int(n**0.5) + 1)):
        n += 1
    return n


def engram_constants(config, token_map):
    """primes and offsets (layers, rows of a token), multipliers (layers, longest n-gram)"""
    size, heads, layers = config["engram_max_ngram_size"], config["engram_n_heads"], config["engram_layer_ids"]
    taken, primes, offsets, multipliers, compressed = set(), [], [], [], int(token_map.max()) + 1
    for layer in layers:
        row = []
        for _ in range(2, size + 1):
            prime = config["engram_vocab_size"] - 1
            for _ in range(heads):
                prime = prime_above(prime, taken)
                taken.add(prime)
                row.append(prime)
        primes.append(row)
        offsets.append(np.concatenate([[0], np.cumsum(row)[:-1]]))
        random = np.random.default_rng(10007 * layer)
        multipliers.append(random.integers(0, max(1, (2**63 - 1) // compressed // 2), size=size, dtype=np.int64) * 2 + 1)
    return tuple(np.array(values, np.int64) for values in (primes, offsets, multipliers))


def save(tokenizer, folder):
    os.makedirs(folder, exist_ok=True)
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    settings = dict(
        backend="tokenizers",
        bos_token=HEAD[0],
        clean_up_tokenization_spaces=False,
        eos_token=HEAD[1],
        model_max_length=1000000000000000019884624838656,
        pad_token=HEAD[2],
        tokenizer_class="TokenizersBackend",
    )
    with open(os.path.join(folder, "tokenizer_config.json"), "w") as file:
        json.dump(settings, file, ensure_ascii=False, indent=1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", default="work/docs.jsonl")
    parser.add_argument("--out", default="work/tokenizer")
    parser.add_argument("--from", dest="source", help="folder of a tokenizer to take over")
    options = parser.parse_args()
    texts = [page["text"] for page in load_docs(options.docs)]
    if options.source:
        os.makedirs(options.out, exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(f"{options.source}/{name}", f"{options.out}/{name}")
        tokenizer = Tokenizer.from_file(f"{options.out}/tokenizer.json")
    else:
        tokenizer = train(texts)
        save(tokenizer, options.out)
    some = texts[::20]
    tokens = sum(len(e.ids) for e in tokenizer.encode_batch(some))
    print(
        f"{tokenizer.get_vocab_size()} tokens, {engram_map(tokenizer)[1]} compressed, {sum(len(t.encode()) for t in some) / tokens:.2f} bytes a token"
    )


if __name__ == "__main__":
    main()

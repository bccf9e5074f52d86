#!/usr/bin/env python3
"""The family's forward pass in plain numpy: short, independent of the Rust code, and the yardstick of BENCHMARKS.md.

    numpy_reference.py MODEL                              time prefill, and greedy decoding by recomputing every token
    numpy_reference.py MODEL --check EXPECTED.json        compare with recorded greedy continuations
    numpy_reference.py MODEL --logits 0,5,1431            logits of the last token

MODEL is a folder in the released layout (FP8, FP4, BF16 or F32 weights); all arithmetic is float32. Prints one JSON
object. Run with OMP_NUM_THREADS=1 to time one thread. Needs numpy, nothing else.
"""
import argparse
import json
import math
import re
import struct
import sys
import time
import unicodedata
from pathlib import Path

import numpy as np

f32 = np.float32


# --- weights ------------------------------------------------------------------------------------------------------


def e4m3_values():
    """The 256 values of E4M3 codes."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    values[[127, 255]] = np.nan
    return np.where(codes & 128, -values, values).astype(f32)


E4M3 = e4m3_values()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], f32)
E2M1_SIGNED = np.concatenate([E2M1, -E2M1])


def read_tensors(path):
    """Every tensor of a safetensors file as (dtype, array of raw numbers)."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    kinds = {"F32": "<f4", "BF16": "<u2", "F8_E4M3": "u1", "F8_E8M0": "u1", "I8": "u1"}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        yield name, entry["dtype"], np.frombuffer(data[begin:end], kinds[entry["dtype"]]).reshape(entry["shape"])


def load(folder):
    """All weights as float32, packed ones multiplied out."""
    raw = {name: (dtype, array) for path in sorted(folder.glob("*.safetensors")) for name, dtype, array in read_tensors(path)}
    weights = {}
    for name, (dtype, array) in raw.items():
        if dtype == "F8_E8M0":
            continue
        if dtype == "F32":
            weights[name] = array
        elif dtype == "BF16":
            weights[name] = (array.astype(np.uint32) << 16).view(f32)
        else:
            if dtype == "F8_E4M3":
                values = E4M3[array]
            else:  # two FP4 codes a byte, the even column in the low nibble
                values = np.stack([E2M1_SIGNED[array & 15], E2M1_SIGNED[array >> 4]], -1).reshape(len(array), -1)
            scales = np.ldexp(f32(1), raw[name.removesuffix(".weight") + ".scale"][1].astype(np.int32) - 127)
            rows, columns = values.shape
            if len(scales) != rows:  # 32x32 blocks
                scales = np.repeat(scales, 32, 0)[:rows]
            weights[name] = (values * np.repeat(scales, 32, 1)[:, :columns]).astype(f32)
    return weights


# --- Engram constants ---------------------------------------------------------------------------------------------

WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # the Unicode property


def byte_alphabet():
    """Character of a byte-level vocabulary -> byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def token_map(folder, vocabulary):
    """Token id -> number of its normalised text, numbered by first appearance."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    pieces = {number: piece for piece, number in tokenizer["model"]["vocab"].items()}
    pieces |= {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    alphabet = byte_alphabet()
    numbers, result = {}, []
    for token in range(vocabulary):
        piece = pieces.get(token, "")
        text = piece
        if all(c in alphabet for c in piece):
            text = bytes(alphabet[c] for c in piece).decode(errors="replace")
        key = piece if "\ufffd" in text else normalise(text) or text
        result.append(numbers.setdefault(key, len(numbers)))
    return np.array(result)


def normalise(text):
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c.lower() for c in text if unicodedata.category(c) != "Mn")
    text = re.sub("[ \t\r\n]+", " ", text)
    return text if text == " " else re.sub(f"^[{WHITE_SPACE}]+|[{WHITE_SPACE}]+$", "", text)


def engram_constants(config, folder):
    """Token map, multipliers (layers, N), primes and row offsets (layers, (N-1) heads)."""
    taken, primes = set(), []
    for _ in config["engram_layer_ids"]:
        row = []
        for _ in range(config["engram_max_ngram_size"] - 1):
            candidate = config["engram_vocab_size"] - 1
            for _ in range(config["engram_n_heads"]):
                candidate += 1
                while candidate in taken or any(candidate % d == 0 for d in range(2, math.isqrt(candidate) + 1)):
                    candidate += 1
                taken.add(candidate)
                row.append(candidate)
        primes.append(row)
    bound = max(1, (2**63 - 1) // config["engram_compressed_vocab_size"] // 2)
    multipliers = [
        np.random.default_rng(10007 * layer).integers(0, bound, config["engram_max_ngram_size"], np.int64) * 2 + 1
        for layer in config["engram_layer_ids"]
    ]
    primes = np.array(primes)
    return token_map(folder, config["vocab_size"]), np.array(multipliers), primes, np.cumsum(primes, 1) - primes


# --- arithmetic ---------------------------------------------------------------------------------------------------


def sigmoid(x):
    return (1 / (1 + np.exp(-x.astype(np.float64)))).astype(f32)


def softplus(x):
    x = x.astype(np.float64)
    return (np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))).astype(f32)


def rms_norm(x, weight, eps):
    return (weight * (x / np.sqrt((x * x).mean(-1, keepdims=True) + f32(eps)))).astype(f32)


def ceil_power_of_two(x):
    mantissa, exponent = np.frexp(x.astype(f32))
    return np.ldexp(f32(1), np.where(mantissa == 0.5, exponent - 1, exponent)).astype(f32)


def nearest(x, grid):
    """The nearest value of an ascending grid, ties to the even index."""
    i = np.clip(np.searchsorted(grid, x), 1, len(grid) - 1)
    low, high = grid[i - 1], grid[i]
    middle = (low + high) / 2
    return np.where((x > middle) | ((x == middle) & (i % 2 == 0)), high, low).astype(f32)


def quantise(x, form):
    """What a cache gives back for x (..., channels): `fp8`, `nvfp4` or `mxfp4`."""
    group = 16 if form == "nvfp4" else 32
    channels = x.shape[-1]
    x = np.concatenate([x, np.zeros((*x.shape[:-1], -channels % group), f32)], -1)
    groups = x.reshape(*x.shape[:-1], -1, group)
    largest = np.abs(groups).max(-1, keepdims=True)
    limit, grid = (448, E4M3[:127]) if form == "fp8" else (6, E2M1)
    if form == "fp8":
        scale = ceil_power_of_two(np.maximum(largest, f32(1e-4)) * f32(1 / 448))
    elif form == "nvfp4":
        scale = nearest(np.clip(largest / f32(6), f32(2**-9), f32(448)), E4M3[:127])
    else:
        scale = ceil_power_of_two(np.maximum(largest, f32(6 * 2.0**-126)) * f32(1 / 6))
    values = np.clip(groups / scale, -limit, limit)
    return (np.copysign(nearest(np.abs(values), grid), values) * scale).reshape(x.shape)[..., :channels].astype(f32)


def frequencies(config, compressed):
    """Rotary frequencies: plain for window-only layers, YaRN for those with a ratio."""
    channels = config["qk_rope_head_dim"]
    theta = config["compress_rope_theta"] if compressed else config.get("rope_theta", 10000.0)
    result = (1 / f32(theta) ** (np.arange(0, channels, 2, dtype=f32) / f32(channels))).astype(f32)
    if compressed:
        yarn = config.get("rope_scaling") or config["rope_parameters"]

        def turns(rotations):
            length = yarn["original_max_position_embeddings"]
            return channels * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low, high = max(math.floor(turns(yarn["beta_fast"])), 0), min(math.ceil(turns(yarn["beta_slow"])), channels - 1)
        ramp = np.clip((np.arange(channels // 2, dtype=f32) - low) / max(high - low, 1e-3), 0, 1).astype(f32)
        result = result / f32(yarn["factor"]) * ramp + result * (1 - ramp)
    return result


def rotate(x, positions, frequency, direction=1):
    """Rotates adjacent pairs of the last channels of x (T, ..., channels) by position times frequency."""
    width = 2 * len(frequency)
    angle = positions.astype(f32)[:, None] * frequency
    shape = (len(positions), *(1,) * (x.ndim - 2), len(frequency))
    cos, sin = np.cos(angle).reshape(shape), direction * np.sin(angle).reshape(shape)
    y = x.copy()
    a, b = x[..., -width::2], x[..., 1 - width :: 2]
    y[..., -width::2], y[..., 1 - width :: 2] = a * cos - b * sin, a * sin + b * cos
    return y


def top(scores, count):
    """Mask (T, C) of the `count` best finite scores a row; among equals the lower index wins."""
    order = np.argsort(-scores, 1, kind="stable")[:, :count]
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, order, np.take_along_axis(scores, order, 1) > -np.inf, 1)
    return mask


# --- the model ----------------------------------------------------------------------------------------------------


class Model:
    def __init__(self, folder, cache_quant=True):
        self.config = json.loads((folder / "config.json").read_text())
        self.config = self.config.get("text_config", self.config)
        self.weights = load(folder)
        self.cache_quant = cache_quant
        self.decoder_floor = 0  # layers from the last KV source on see no window key before this position
        self.eps = self.config["rms_norm_eps"]
        self.engram_layers = self.config.get("engram_layer_ids") or []
        if self.engram_layers:
            self.engram = engram_constants(self.config, folder)

    def cached(self, x, form):
        return quantise(x, form) if self.cache_quant else x

    def linear(self, x, name):
        return x @ self.weights[name + ".weight"].T

    def norm(self, x, name):
        return rms_norm(x, self.weights[name + ".weight"], self.eps)

    def mix(self, prefix, streams):
        """Hyper-connection weights from the streams (T, n, h): pre (T, n), post (T, n), comb (T, n in, n out)."""
        n, eps = self.config["hc_mult"], f32(self.config["hc_eps"])
        flat = streams.reshape(len(streams), -1)
        m = flat @ self.weights[prefix + "_fn"].T / np.sqrt((flat * flat).mean(-1, keepdims=True) + f32(self.eps))
        m = m * np.repeat(self.weights[prefix + "_scale"], [n, n, n * n]) + self.weights[prefix + "_base"]
        pre, post, comb = sigmoid(m[:, :n]) + eps, 2 * sigmoid(m[:, n : 2 * n]), m[:, 2 * n :].reshape(-1, n, n)
        comb = np.exp(comb - comb.max(-1, keepdims=True))
        comb = comb / comb.sum(-1, keepdims=True) + eps
        comb = comb / (comb.sum(-2, keepdims=True) + eps)
        for _ in range(self.config["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(-1, keepdims=True) + eps)
            comb = comb / (comb.sum(-2, keepdims=True) + eps)
        return pre, post, comb

    @staticmethod
    def collapse(streams, pre):
        return (pre[..., None] * streams).sum(1)

    @staticmethod
    def expand(y, streams, post, comb):
        return post[..., None] * y[:, None] + np.einsum("tio,tih->toh", comb, streams)

    def experts(self, prefix, x):
        limit = f32(self.config["swiglu_limit"])
        scores = np.sqrt(softplus(self.linear(x, prefix + "gate")))
        chosen = np.argsort(-(scores + self.weights[prefix + "gate.bias"]), 1, kind="stable")
        chosen = chosen[:, : self.config["num_experts_per_tok"]]
        gates = np.take_along_axis(scores, chosen, 1)
        if self.config["norm_topk_prob"] and chosen.shape[1] > 1:
            gates = gates / (gates.sum(-1, keepdims=True) + f32(1e-20))
        gates = gates * f32(self.config["routed_scaling_factor"])

        def expert(name, x, gate):
            a = np.minimum(self.linear(x, name + "w1"), limit)
            b = np.clip(self.linear(x, name + "w3"), -limit, limit)
            return self.linear(a * sigmoid(a) * b * gate, name + "w2")

        y = expert(prefix + "shared_experts.", x, f32(1))
        for e in np.unique(chosen):
            rows, slots = np.nonzero(chosen == e)
            y[rows] += expert(f"{prefix}experts.{e}.", x[rows], gates[rows, slots][:, None])
        return y

    def select(self, prefix, layer, x, latent_q, positions, frequency, shared):
        """Writes the layer's mask of global entries (T, C) to `shared["selected"]`."""
        config, ratio = self.config, self.config["compress_ratios"][layer]
        heads, width = config["index_n_heads"], config["index_head_dim"]
        keys = shared["keys"]
        queries = self.linear(latent_q, prefix + "indexer.wq_b").reshape(len(x), heads, width)
        queries = self.cached(rotate(queries, positions, frequency), "mxfp4")
        weight = self.linear(x, prefix + "indexer.weights_proj") * f32(width**-0.5 * heads**-0.5)
        scores = (np.maximum(np.einsum("thd,cd->thc", queries, keys), 0) * weight[..., None]).sum(1)
        visible = (positions + 1) // ratio
        scores = np.where(np.arange(len(keys)) < visible[:, None], scores, -np.inf)

        source, block = config.get("candidate_source_layer_id", -1), config.get("candidate_block_size", 1)
        if layer == source:  # keep the best blocks, the newest one among them
            padded = np.pad(scores, ((0, 0), (0, -len(keys) % block)), constant_values=-np.inf)
            best = padded.reshape(len(x), -1, block).max(-1)
            some = np.nonzero(visible)[0]
            best[some, (visible[some] - 1) // block] = np.inf
            kept = np.repeat(top(best, config["candidate_topk_blocks"]), block, 1)[:, : len(keys)]
            shared["candidates"] = kept & np.isfinite(scores)
        elif shared["candidates"] is not None:
            scores = np.where(shared["candidates"], scores, -np.inf)
        shared["selected"] = top(scores, config["index_topk"])

    def attention(self, layer, x, positions, shared):
        config, prefix = self.config, f"layers.{layer}.attn."
        ratio, heads, width = config["compress_ratios"][layer], config["num_attention_heads"], config["head_dim"]
        frequency, count = frequencies(config, ratio > 0), len(x)
        latent_q = self.norm(self.linear(x, prefix + "wq_a"), prefix + "q_norm")
        queries = rotate(self.linear(latent_q, prefix + "wq_b").reshape(count, heads, width), positions, frequency)
        keys = rotate(self.norm(self.linear(x, prefix + "wkv"), prefix + "kv_norm"), positions, frequency)
        keys = self.cached(keys, "fp8")
        age = positions[:, None] - positions
        seen = (age >= 0) & (age < config["sliding_window"])
        if layer >= max(config["kv_source_layer_ids"], default=config["num_hidden_layers"]):
            seen &= positions >= self.decoder_floor
        if ratio:
            if layer in config["kv_source_layer_ids"]:
                entries = count // ratio
                whole, starts = x[: entries * ratio], positions[: entries * ratio : ratio]
                latent = self.linear(whole, prefix + "compressor.wkv")
                if ratio > 1:
                    gate = self.linear(whole, prefix + "compressor.wgate").reshape(entries, ratio, width)
                    gate = np.exp(gate - gate.max(1, keepdims=True))
                    latent = (latent.reshape(entries, ratio, width) * gate / gate.sum(1, keepdims=True)).sum(1)
                latent = self.norm(latent, prefix + "compressor.norm")
                index_keys = self.norm(self.linear(latent, prefix + "indexer.wk"), prefix + "indexer.k_norm")
                shared["entries"] = self.cached(rotate(latent, starts, frequency), "nvfp4")
                shared["keys"] = self.cached(rotate(index_keys, starts, frequency), "mxfp4")
                shared["candidates"] = None
            if layer in config["index_source_layer_ids"]:
                self.select(prefix, layer, x, latent_q, positions, frequency, shared)
            keys, seen = np.concatenate([keys, shared["entries"]]), np.concatenate([seen, shared["selected"]], 1)

        logits = np.einsum("thd,kd->htk", queries, keys) * f32(width**-0.5)
        logits = np.where(seen, logits, -np.inf)
        sink = self.weights[prefix + "attn_sink"][:, None, None]
        largest = np.maximum(logits.max(-1, keepdims=True), sink)
        p = np.exp(logits - largest)
        p = p / (p.sum(-1, keepdims=True) + np.exp(sink - largest))  # the sink adds to the denominator only
        attended = rotate(np.einsum("htk,kd->thd", p, keys), positions, frequency, -1)
        groups = config["o_groups"]
        out = self.weights[prefix + "wo_a.weight"].reshape(groups, config["o_lora_rank"], -1)
        out = np.einsum("tgi,goi->tgo", attended.reshape(count, groups, -1), out)
        return self.linear(out.reshape(count, -1), prefix + "wo_b")

    def engram_rows(self, ids):
        """Table rows of each token: (T, Engram layers, (N-1) heads)."""
        tokens, multipliers, primes, offsets = self.engram
        heads, count = self.config["engram_n_heads"], self.config["engram_max_ngram_size"]
        before = np.full(count - 1, tokens[self.config["engram_pad_token_id"]])
        history = np.concatenate([before, tokens[ids]])
        grams = np.stack([history[count - 1 - s : len(history) - s] for s in range(count)], -1)
        products = grams[:, None] * multipliers
        mixed, rows = products[..., 0], []
        for s in range(1, count):
            mixed = mixed ^ products[..., s]
            rows.append(mixed[..., None] % primes[:, (s - 1) * heads : s * heads])
        return np.concatenate(rows, -1) + offsets

    def engram_add(self, layer, streams, rows):
        prefix, weights = f"layers.{layer}.engram.", self.weights
        n, h = self.config["hc_mult"], self.config["hidden_size"]
        kv = self.linear(weights[prefix + "embed.weight"][rows].reshape(len(rows), -1), prefix + "wkv")
        key, value = kv[:, : n * h].reshape(-1, n, h), kv[:, n * h :]
        match = (streams * (weights[prefix + "q_weight"] * weights[prefix + "k_weight"]) * key).sum(-1)
        for x in (streams, key):
            match = match / np.sqrt((x * x).mean(-1) + f32(self.eps))
        match = match * f32(h**-0.5)
        gate = sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(match), f32(1e-6))), match))
        return streams + gate[..., None] * value[:, None]

    def forward(self, ids, last_only=False):
        """Logits (T, V), or (1, V) of the last token."""
        ids, positions, shared = np.asarray(ids), np.arange(len(ids)), {}
        streams = np.repeat(self.weights["embed.weight"][ids][:, None], self.config["hc_mult"], 1)
        pre = np.zeros(streams.shape[:2], f32)
        pre[:, 0] = 1
        rows = self.engram_rows(ids) if self.engram_layers else None
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"layers.{layer}."
            if layer in self.engram_layers:
                streams = self.engram_add(layer, streams, rows[:, self.engram_layers.index(layer)])
            next_pre, post, comb = self.mix(prefix + "hc_attn", streams)
            y = self.attention(layer, self.norm(self.collapse(streams, pre), prefix + "attn_norm"), positions, shared)
            streams, pre = self.expand(y, streams, post, comb), next_pre
            next_pre, post, comb = self.mix(prefix + "hc_ffn", streams)
            y = self.experts(prefix + "ffn.", self.norm(self.collapse(streams, pre), prefix + "ffn_norm"))
            streams, pre = self.expand(y, streams, post, comb), next_pre
        x = self.collapse(streams, pre)
        return self.linear(self.norm(x[-1:] if last_only else x, "norm"), "head")

    def greedy(self, ids, count):
        """`count` greedy tokens, or fewer when the text ends; the whole sequence is recomputed for each."""
        ids, new = list(ids), []
        while len(new) < count and (not new or new[-1] != self.config["eos_token_id"]):
            new.append(int(self.forward(ids + new, last_only=True)[0].argmax()))
        return new


def check(model, expected):
    """Compares greedy continuations; a step whose recorded margin is below 1e-3 ends its case."""
    cases = json.loads(expected.read_text())["cases"]
    steps, wrong = 0, []
    for number, case in enumerate(cases):
        found = model.greedy(case["prompt_ids"], len(case["generated_ids"]))
        for step, (a, b, margin) in enumerate(zip(found, case["generated_ids"], case["margins"])):
            if margin < 1e-3:
                break
            steps += 1
            if a != b:
                wrong.append({"case": number, "step": step, "found": a, "expected": b, "margin": margin})
                break
    return {"cases": len(cases), "steps": steps, "wrong": wrong}


def bench(model, context, new):
    """Times the prefill of `context` tokens and `new` greedy tokens after them."""
    ids = np.random.default_rng(0).integers(3, model.config["vocab_size"] - 2, context)
    model.forward(ids[:8])
    start = time.perf_counter()
    model.forward(ids, last_only=True)
    prefill = time.perf_counter() - start
    start = time.perf_counter()
    sequence = list(ids)
    for _ in range(new):
        sequence.append(int(model.forward(sequence, last_only=True)[0].argmax()))
    decode = time.perf_counter() - start
    return {
        "context": context,
        "prefill_tokens_per_second": round(context / prefill, 2),
        "decode_tokens_per_second": round(new / decode, 3),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--context", type=int, default=512, help="prompt tokens to time (default 512)")
    parser.add_argument("--new", type=int, default=4, help="greedy tokens to time (default 4)")
    parser.add_argument("--cache-quant", choices=["on", "off"], default="on")
    parser.add_argument("--check", type=Path, metavar="EXPECTED.json")
    parser.add_argument("--logits", metavar="IDS")
    options = parser.parse_args()
    model = Model(options.model, options.cache_quant == "on")
    if options.check:
        result = check(model, options.check)
    elif options.logits:
        result = model.forward([int(i) for i in options.logits.split(",")], last_only=True)[0].tolist()
    else:
        result = bench(model, options.context, options.new)
    print(json.dumps(result))
    return 1 if options.check and result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Reduces the recorded reference data to what tests/golden_cpu.rs, tests/draft.rs and tests/mutations.rs carry in
tests/fixtures/golden.

    python3 tools/make_golden_fixture.py GOLDEN

A forward is causal, so the first rows of a record are a record of the first tokens. Six files, the tensors of a record named
`layer_NN.<name>` and `top.<name>`:

* record_noquant.safetensors: every layer's output and choices, and the logits, without cache quantisation (end to end);
* record_quant.safetensors: outputs and choices of the layers up to the first Reindex after the candidate source, with
  cache quantisation (layer by layer);
* quantisers.safetensors: values before and after each cache format;
* draft_noquant.safetensors, draft_quant.safetensors: one drafted block, without and with cache quantisation, and what the draft
  saw of the window before it; names as recorded;
* bounded.safetensors: logits of the last rows when the decoder sees no window key before them, without cache quantisation.
  GOLDEN has this record for another checkpoint only (golden/ckpt_f32): tools/numpy_reference.py makes this one, once it has
  made that one again.

The checkpoint they belong to is golden/ckpt_fp8fp4. Needs numpy for the last file.
"""
import array
import json
import os
import struct
import sys
from pathlib import Path

ROWS = 40
QUANT_LAYERS = 9
OUTPUTS = ("streams_out", "pre_mix_out", "moe_indices", "moe_weights", "topk", "candidates", "comp_kv")
PAIRS = {1: ["swa_kv"], 4: ["comp_kv"], 6: ["index_k", "index_q"]}
SIZES = {"F32": 4, "I32": 4, "I64": 8, "BOOL": 1}
TARGET = os.path.join(os.path.dirname(__file__), "..", "tests", "fixtures", "golden")


def read(path):
    """name -> (dtype, shape, bytes)"""
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = file.read()
    header.pop("__metadata__", None)
    return {k: (v["dtype"], v["shape"], data[slice(*v["data_offsets"])]) for k, v in header.items()}


def write(path, tensors):
    header, data = {}, b""
    # Widest numbers first: every tensor stays aligned.
    for name, (dtype, shape, raw) in sorted(tensors.items(), key=lambda t: (-SIZES[t[1][0]], t[0])):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)
    print(f"{path}: {len(tensors)} tensors, {os.path.getsize(path)} bytes")


def first(tensor, rows, columns=None):
    """The first rows of a tensor (after a batch axis of 1, if any), and the first columns of each."""
    dtype, shape, raw = tensor
    axis = 1 if shape[0] == 1 else 0
    size = SIZES[dtype]
    for n in shape[axis + 1:]:
        size *= n
    shape = shape[:axis] + [rows] + shape[axis + 1:]
    kept = [raw[i * size:(i + 1) * size] for i in range(rows)]
    if columns is not None:
        kept = [row[:columns * SIZES[dtype]] for row in kept]
        shape = shape[:-1] + [columns]
    return dtype, shape, b"".join(kept)


def record(folder, layers, ratios, logits):
    out = {}
    for layer in layers:
        for name, tensor in read(f"{folder}/layer_{layer:02d}.safetensors").items():
            if name in OUTPUTS:
                entries = ROWS // max(ratios[layer], 1)
                rows = entries if name == "comp_kv" else ROWS
                columns = entries if name == "candidates" else None
                out[f"layer_{layer:02d}.{name}"] = first(tensor, rows, columns)
    top = read(f"{folder}/top.safetensors")
    for name in ["engram_hash_ids"] + ["logits"] * logits:
        out[f"top.{name}"] = first(top[name], ROWS)
    return out


def draft(folder, window):
    out = read(f"{folder}/dspark.safetensors")
    dtype, [_, rows, width], raw = out["context_features"]
    out["context_features"] = dtype, [1, window, width], raw[(rows - window) * width * SIZES[dtype]:]
    for name in ("main_x", "attn_mask_visible", "confidence_from_normed", "block_tokens"):
        del out[name]
    return out


def bounded(golden, checkpoint):
    """Floor and logits of the rows from there on, of the whole recorded text."""
    from numpy_reference import Model

    tokens = array.array("q", read(f"{golden}/inputs.safetensors")["tokens"][2]).tolist()
    model = Model(Path(golden) / checkpoint, cache_quant=False)
    model.decoder_floor = floor = len(tokens) - model.config["sliding_window"]
    return floor, model.forward(tokens)[floor:]


def bounded_record(golden):
    known = read(f"{golden}/f32_noquant/bounded_replay.safetensors")
    floor, logits = bounded(golden, "ckpt_f32")
    recorded = array.array("f", known["logits_tail"][2])
    assert floor == array.array("q", known["floor"][2])[0]
    worst = max(abs(a - b) for a, b in zip(logits.ravel().tolist(), recorded, strict=True))
    print(f"bounded, ckpt_f32: numpy within {worst:.1e} of the record")
    assert worst < 2e-4
    floor, logits = bounded(golden, "ckpt_fp8fp4")
    return {
        "floor": ("I64", [1], struct.pack("<q", floor)),
        "logits_tail": ("F32", list(logits.shape), logits.astype("<f4").tobytes()),
    }


def main():
    golden = sys.argv[1]
    config = json.load(open(f"{golden}/ckpt_fp8fp4/config.json"))["text_config"]
    ratios, layers = config["compress_ratios"], config["num_hidden_layers"]
    write(f"{TARGET}/record_noquant.safetensors", record(f"{golden}/fp8fp4_f32compute_noquant", range(layers), ratios, True))
    write(f"{TARGET}/record_quant.safetensors", record(f"{golden}/fp8fp4_f32compute_quant", range(QUANT_LAYERS), ratios, False))
    pairs = {}
    for layer, names in PAIRS.items():
        tensors = read(f"{golden}/f32_quant/layer_{layer:02d}.safetensors")
        for name in [n + end for n in names for end in ("_prequant", "")]:
            pairs[f"layer_{layer:02d}.{name}"] = first(tensors[name], 8)
    write(f"{TARGET}/quantisers.safetensors", pairs)
    for quant in ("noquant", "quant"):
        record_of_draft = draft(f"{golden}/fp8fp4_f32compute_{quant}", config["sliding_window"])
        write(f"{TARGET}/draft_{quant}.safetensors", record_of_draft)
    write(f"{TARGET}/bounded.safetensors", bounded_record(golden))


main()

#!/usr/bin/env python3
"""Compares two trace files tensor by tensor, in the order of computation. Needs nothing but Python.

    python3 tools/compare_traces.py A.safetensors B.safetensors [--tolerance 1e-4]
"""
import argparse, array, json, struct, sys

CODES = {"F32": "f", "I32": "i", "I64": "q", "U32": "I"}
STAGES = """engram_hash_ids embeddings streams_in pre_mix_in engram_rows engram_kv engram_out attn_collapsed attn_in hc_attn_pre
hc_attn_post hc_attn_comb q_latent q_prerope swa_kv_prequant swa_kv comp_latent comp_kv_prequant comp_kv index_k_prequant index_k
index_q_prequant index_q index_w_raw index_scores topk candidates attended attended_derope wo_a_out attn_out streams_mid ffn_collapsed
ffn_in hc_ffn_pre hc_ffn_post hc_ffn_comb moe_scores moe_indices moe_weights routed_out shared_out ffn_out streams_out pre_mix_out
final_collapsed final_normed logits""".split()


def read(path):
    with open(path, "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        body = f.read()
    header.pop("__metadata__", None)
    tensors = {}
    for name, t in header.items():
        values = array.array(CODES[t["dtype"]])
        values.frombytes(body[t["data_offsets"][0]:t["data_offsets"][1]])
        tensors[name] = (t["shape"], values)
    return tensors


def order(name):
    layer, _, stage = name.rpartition(".")
    first = {"engram_hash_ids": -2, "embeddings": -1}.get(stage)
    number = first if first is not None else int(layer[6:]) if layer.startswith("layer_") else 10**6
    return number, STAGES.index(stage) if stage in STAGES else len(STAGES), name


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("a"), parser.add_argument("b")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative to a tensor's largest value")
    args = parser.parse_args()
    a, b = read(args.a), read(args.b)
    for name in sorted(set(a) ^ set(b), key=order):
        print(f"only in {'A' if name in a else 'B'}: {name}")
    first = None
    for name in sorted(set(a) & set(b), key=order):
        (sa, va), (sb, vb) = a[name], b[name]
        if sa != sb:
            print(f"{name:36} shapes differ: {sa} and {sb}")
            first = first or name
            continue
        # Infinite on both sides (scores of what is not visible) is equal.
        pairs = [(x, y) for x, y in zip(va, vb) if x != y]
        delta = max((abs(x - y) for x, y in pairs), default=0.0)
        scale = max((abs(x) for x in va if abs(x) != float("inf")), default=0.0) or 1.0
        off = not delta <= args.tolerance * scale
        print(f"{name:36} max |d| {delta:.2e}  relative {delta / scale:.1e}  differing {len(pairs)}/{len(va)}{'  <--' if off else ''}")
        if off and first is None:
            first = name
    print(f"first difference: {first}" if first else "no difference beyond the tolerance")
    return 1 if first else 0


if __name__ == "__main__":
    sys.exit(main())

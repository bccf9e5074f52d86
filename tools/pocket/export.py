"""Exports a training run in the released layout: matrices as FP8 and FP4 with power-of-two scales, the rest as BF16 and F32.

    python export.py --work work --out models/pocket [--draft work/draft.pt] [--expected tests/fixtures/pocket]

`--expected` is a folder for what Cedra's tests compare with: `expected.json`, greedy continuations of some prompts by this code on the
exported numbers, with the margin of every step and a drafted block, `engram_constants.json` and `config.json`.
"""

import argparse
import json
import os

import torch
from safetensors.torch import save_file

import checkpoint
import data
import draft as D
import model as M
import ops
import tokenizer as tk
from tokenizer import load_docs

FACTS = "The port of heron is 6077.\n\nThe owner of `zorbel` is Ada.\n\nconst GRID_SIZE: usize = 512;\n\n"
EXPECTED_TOKENS = 64


def pack(numbers, kind):
    """(packed matrix, scales) of numbers that the format holds exactly"""
    rows, columns = numbers.shape
    height = 32 if kind == "fp8" else 1
    blocks = numbers.view(rows // height, height, columns // 32, 32)
    largest = blocks.abs().amax((1, 3), keepdim=True)
    scale = ops.power_of_two_above(largest.clamp_min(6 * 2.0**-126) / 6 if kind == "fp4" else largest.clamp_min(1e-4) / 448)
    codes = (blocks / scale).reshape(rows, columns)
    scale = scale.view(rows // height, columns // 32).to(torch.float8_e8m0fnu)
    if kind != "fp4":
        packed = codes.to(torch.float8_e4m3fn)
        assert torch.equal(packed.float(), codes)
        return packed, scale
    nibbles = (codes.abs()[..., None] - checkpoint.GRID).abs().argmin(-1).to(torch.uint8)
    assert torch.equal(checkpoint.GRID[nibbles.long()], codes.abs())
    nibbles |= torch.signbit(codes).to(torch.uint8) << 3
    return (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).view(torch.int8).contiguous(), scale


def packed(tensors):
    out = {}
    for name, numbers in tensors.items():
        kind = checkpoint.stored_as(name)
        if kind in ("fp4", "fp8", "row8"):
            out[name], scale = pack(numbers, kind)
            out[name.removesuffix(".weight") + ".scale"] = scale
            assert torch.equal(checkpoint.unpack(out[name], scale), numbers), name
        else:
            out[name] = numbers if kind == "f32" else numbers.bfloat16()
    return out


def config(text):
    return dict(
        architectures=["DeepseekV41ForCausalLM"],
        model_type="deepseek_v41",
        dtype="bfloat16",
        bos_token_id=text["bos_token_id"],
        eos_token_id=text["eos_token_id"],
        pad_token_id=text["pad_token_id"],
        image_token_id=text["vocab_size"] - 2,
        tie_word_embeddings=False,
        quantization_config=dict(
            quant_method="fp8", fmt="e4m3", scale_fmt="ue8m0", weight_block_size=[32, 32], activation_scheme="dynamic"
        ),
        text_config=text | dict(dtype="bfloat16"),
    )


@torch.no_grad()
def greedy(model, ids, tokens, stop=1):
    """(what is made, margin of each step)"""
    made, margins = [], []
    while len(made) < tokens and stop not in made:
        best = (model(torch.tensor([ids + made]), M.Options())[-1] @ model.head.t()).topk(2)
        margins.append(round(float(best.values[0] - best.values[1]), 5))
        made.append(int(best.indices[0]))
    return made, margins


def prompts(tokenizer, docs_file):
    special = {name: tokenizer.token_to_id(text) for name, text in data.SPECIAL.items()}

    def plain(text):
        return [special["bos"]] + tokenizer.encode(text).ids

    def chat(*pieces):
        ids = [i for piece in pieces for i in (piece if isinstance(piece, list) else tokenizer.encode(piece).ids)]
        return [special["bos"], special["user"]] + ids + [special["assistant"], special["answer"]]

    held_out, _ = data.split(load_docs(docs_file))
    page = held_out[3 % len(held_out)]["text"][:2400]
    return [
        plain("# Struct `Vec`\n\nA contiguous growable array type"),
        plain("Ownership is a set of rules that"),
        chat("What does `push` do?"),
        chat(FACTS + "What is the port of heron?"),
        chat(FACTS + "What is the value of GRID_SIZE?"),
        chat(FACTS + "Who owns `zorbel`?"),
        chat("The access code of marlow is 7314.\n\n", tokenizer.encode(page).ids[:600], "\n\nWhat is the access code of marlow?"),
    ]


def drafted(model, stages, ids):
    """the block drafted behind ids, and its confidences in two orders of summation: with the C kernels and in plain PyTorch. Where they are
    apart, a value lay on the edge between two codes of its format, and either is right"""
    kernels = ops.K
    tokens, confidences = D.draft_block(model, stages, ids)
    try:
        ops.K = None
        return tokens, [confidences, D.draft_block(model, stages, ids)[1]]
    finally:
        ops.K = kernels


def expected(model, stages, tokenizer, state, docs_file):
    cases = []
    for ids in prompts(tokenizer, docs_file):
        made, margins = greedy(model, ids, EXPECTED_TOKENS)
        case = dict(prompt_ids=ids, generated_ids=made, margins=margins, min_margin=min(margins))
        case |= dict(prompt=tokenizer.decode(ids, skip_special_tokens=False), text=tokenizer.decode(made, skip_special_tokens=False))
        if stages:
            case["draft_anchor"] = made[0]
            case["draft_ids"], case["draft_confidences"] = drafted(model, stages, ids + made[:1])
        print(f"{case['prompt'][-50:]!r} -> {case['text'][:100]!r}, smallest margin {case['min_margin']}")
        cases.append(case)
    note = "greedy, float32 compute on the exported numbers, cache quantisation, top-k and candidate pool on; stops at id 1"
    return dict(note=note, step=state["step"], tokens=state["tokens"], cases=cases)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="work")
    parser.add_argument("--checkpoint", default="", help="by default last.pt of the work folder")
    parser.add_argument("--draft", help="draft stages: draft.pt")
    parser.add_argument("--out", default="export")
    parser.add_argument("--expected", help="folder for expected.json and engram_constants.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, state = checkpoint.trained(options.work, options.checkpoint)
    text, tensors, stages = dict(model.config), M.to_released(model), None
    if options.draft:
        trained = torch.load(options.draft, weights_only=False)
        text |= trained["config"]
        stages = D.Draft(model.config, text["num_nextn_predict_layers"]).eval()
        numbers = checkpoint.stored_numbers(trained["tensors"])
        with torch.no_grad():
            for name, tensor in stages.names().items():
                tensor.data.copy_(numbers[name].view(tensor.shape))
        tensors |= numbers
    os.makedirs(options.out, exist_ok=True)
    kept = {name: tensor.contiguous() for name, tensor in sorted(packed(tensors).items())}
    save_file(kept, f"{options.out}/model.safetensors", metadata=dict(format="pt"))
    with open(f"{options.out}/config.json", "w") as file:
        json.dump(config(text), file, indent=1, sort_keys=True)
    tokenizer = checkpoint.tokenizer(options.work)
    tk.save(tokenizer, options.out)
    print(f"{options.out}: {sum(os.path.getsize(os.path.join(options.out, f)) for f in os.listdir(options.out))} bytes")
    if options.expected:
        os.makedirs(options.expected, exist_ok=True)
        constants = dict(
            compressed_vocab=text["engram_compressed_vocab_size"], pad_compressed_id=int(model.token_map[text["engram_pad_token_id"]])
        )
        for name in ("primes", "offsets", "multipliers", "token_map"):
            constants[name] = getattr(model, name).tolist()
        made = expected(model, stages, tokenizer, state, f"{options.work}/docs.jsonl")
        for name, content, indent in (("engram_constants", constants, None), ("expected", made, 1), ("config", config(text), 1)):
            with open(f"{options.expected}/{name}.json", "w") as file:
                json.dump(content, file, indent=indent, ensure_ascii=False, sort_keys=name == "config")


if __name__ == "__main__":
    main()

"""Checkpoints in the released layout: reading them back as numbers, and making a model wider without changing what it computes."""

import json
import re

import torch
from safetensors.torch import load_file

FP4 = re.compile(r"(layers|mtp)\.\d+\.ffn\.experts\.\d+\.w[123]\.weight")
ROW8 = re.compile(r"layers\.\d+\.engram\.embed\.weight")
FP8 = re.compile(
    r"(layers|mtp)\.\d+\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|main_proj|ffn\.shared_experts\.w[123]|engram\.wkv)\.weight"
)
F32 = re.compile(
    r".*(hc_(attn|ffn)_(fn|base|scale)|attn_sink|gate\.bias|gate\.bias_vl)$|head\.weight|mtp\.\d+\.confidence_head\.proj\.weight"
)
GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def stored_as(name):
    """fp4, row8, fp8, f32 or bf16: how a tensor of this name is stored"""
    for kind, pattern in (("fp4", FP4), ("row8", ROW8), ("fp8", FP8), ("f32", F32)):
        if pattern.fullmatch(name):
            return kind
    return "bf16"


def unpack(q, scale):
    """the float32 numbers of a packed matrix"""
    scale = scale.float()
    if q.dtype == torch.int8:
        codes = q.view(torch.uint8)
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
        values = GRID[(codes & 7).long()] * (1 - 2.0 * (codes >> 3).float())
    else:
        values = q.float()
    rows, columns = values.shape
    return values * scale.repeat_interleave(-(-rows // scale.shape[0]), 0)[:rows].repeat_interleave(columns // scale.shape[1], 1)


def read(folder):
    """(text config, name -> float32 tensor) of a checkpoint in the released layout"""
    config = json.load(open(f"{folder}/config.json"))["text_config"]
    stored = load_file(f"{folder}/model.safetensors")
    out = {}
    for name, tensor in stored.items():
        if (
            name.endswith(".scale")
            and name[:-6] + ".weight" in stored
            and stored[name[:-6] + ".weight"].dtype in (torch.int8, torch.float8_e4m3fn)
        ):
            continue
        scale = stored.get(name.removesuffix(".weight") + ".scale") if tensor.dtype in (torch.int8, torch.float8_e4m3fn) else None
        out[name] = tensor.float() if scale is None else unpack(tensor, scale)
    return config, out


def widen_heads(tensors, old, new):
    """Tensors of a model with `head_dim` old as those of one with `head_dim` new (config dicts), which computes the same.

    The new channels lie before the rotated ones. Keys, which are values too, are zero there, so that the rest may begin at random;
    RMSNorm sees the same sum over more channels, and the softmax scale is smaller: both are made up for in the weights beside them.
    """
    was, now, rope = old["head_dim"], new["head_dim"], new["qk_rope_head_dim"]
    heads, groups = new["num_attention_heads"], new["o_groups"]
    at = torch.tensor(list(range(was - rope)) + list(range(now - rope, now)))
    out = {}
    for name, w in tensors.items():
        if re.search(r"attn\.(wkv|compressor\.wkv|compressor\.wgate)\.weight$", name):
            wide = torch.zeros(now, w.shape[1])
            wide[at] = w
        elif re.search(r"attn\.(kv_norm|compressor\.norm)\.weight$", name):
            wide = torch.full((now,), float(w.mean()) * (was / now) ** 0.5)
            wide[at] = w * (was / now) ** 0.5
        elif name.endswith("attn.wq_b.weight"):
            wide = torch.randn(heads, now, w.shape[1]) * w.std()
            wide[:, at] = w.view(heads, was, -1) * (now / was) ** 0.5
            wide = wide.view(heads * now, -1)
        elif name.endswith("attn.wo_a.weight"):
            wide = torch.randn(w.shape[0], heads // groups, now) * w.std()
            wide[:, :, at] = w.view(w.shape[0], heads // groups, was)
            wide = wide.view(w.shape[0], -1)
        elif name.endswith("attn.indexer.wk.weight"):
            wide = torch.randn(w.shape[0], now) * w.std()
            wide[:, at] = w
        else:
            wide = w
        out[name] = wide
    return out


def tokenizer(work):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(f"{work}/tokenizer/tokenizer.json")


def stored_numbers(tensors):
    """the numbers that an exported checkpoint stands for, as float32"""
    import ops

    def of(name, tensor):
        kind = stored_as(name)
        if kind in ("fp4", "fp8", "row8"):
            return ops.qdq_weight(tensor, kind)
        return tensor if kind == "f32" else tensor.bfloat16().float()

    return {name: of(name, tensor) for name, tensor in tensors.items()}


def trained(work, path=""):
    """(model with the numbers that an export stands for, what else the checkpoint says) of a training run"""
    import model as M
    import train

    state = torch.load(path or f"{work}/last.pt", weights_only=False)
    _, model = train.build(f"{work}/tokenizer")
    model.load_state_dict(state.pop("model"))
    M.from_released(model, stored_numbers(M.to_released(model)))
    return model.eval(), state

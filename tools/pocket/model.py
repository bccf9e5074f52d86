"""The model in PyTorch: whole sequences, differentiable, every part of the architecture.

Shapes: B sequences of T tokens, h hidden channels, n residual streams, H heads of D channels, C entries of the global cache.
Parameters are kept fused; `to_released` and `from_released` translate to the tensor names of the released layout.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import ops


@dataclass
class Options:
    """How a forward computes."""

    quant: bool = True  # cached values pass through their packed formats
    sparse: bool = True  # global entries are selected; otherwise all visible ones are attended to
    pool: bool = True  # Reindex layers choose among candidates only
    engram: bool = True
    recent: bool = False  # the newest entries are selected, whatever their scores
    wquant: bool = False  # weights pass through their storage formats
    aux: bool = False  # `losses` collects what the indexers are trained with
    # Attention supervision: for each row the position to look at (-1: none), the weight of the loss, heads by layer.
    sup: tuple | None = None
    floors: torch.Tensor | None = None  # (2, B): encoder's and decoder's; from there on, windows do not reach below
    probe: torch.Tensor | None = None  # places of tokens for `readouts`: what supervised heads would say of them
    losses: list = field(default_factory=list)
    readouts: list = field(default_factory=list)


def rope_frequencies(config, compressed):
    d, f32 = config["qk_rope_head_dim"], np.float32
    base = config["compress_rope_theta"] if compressed else config.get("rope_theta", 10000.0)
    f = (1.0 / (f32(base) ** (np.arange(0, d, 2, dtype=f32) / f32(d)))).astype(f32)
    if compressed:
        yarn = config.get("rope_scaling") or config["rope_parameters"]

        def correction(rotations):
            return d * math.log(yarn["original_max_position_embeddings"] / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low, high = max(math.floor(correction(yarn["beta_fast"])), 0), min(math.ceil(correction(yarn["beta_slow"])), d - 1)
        ramp = np.clip((np.arange(d // 2, dtype=f32) - low) / max(high - low, 1e-3), 0, 1).astype(f32)
        f = f / f32(yarn["factor"]) * ramp + f * (1 - ramp)
    return torch.from_numpy(f.astype(f32))


def matrix(rows, columns, std=None):
    return nn.Parameter(torch.randn(rows, columns) * (std or columns**-0.5))


def ones(*shape):
    return nn.Parameter(torch.ones(*shape))


class HyperConnection(nn.Module):
    def __init__(self, config):
        super().__init__()
        n, h = config["hc_mult"], config["hidden_size"]
        self.n, self.iterations, self.eps = n, config["hc_sinkhorn_iters"], config["hc_eps"]
        self.fn = matrix(n * (n + 2), n * h)
        base = torch.randn(n * (n + 2)) * 0.3
        base[:n] -= 1.0
        base[2 * n :] = (2.5 * torch.eye(n) + 0.1 * torch.randn(n, n)).flatten()
        self.base = nn.Parameter(base)
        self.scale = nn.Parameter(torch.full((3,), 0.2))

    def forward(self, streams):
        """(pre, post, combination) of each row"""
        n, v = self.n, streams.flatten(1)
        mix = (v @ self.fn.t()) * (torch.linalg.vector_norm(v, dim=-1, keepdim=True).square() / v.shape[1] + 1e-20).rsqrt()
        scale = torch.cat([self.scale[:1].expand(n), self.scale[1:2].expand(n), self.scale[2:].expand(n * n)])
        mix = mix * scale + self.base
        pre, post = mix[:, :n].sigmoid() + self.eps, 2 * mix[:, n : 2 * n].sigmoid()
        return pre, post, ops.sinkhorn(mix[:, 2 * n :], self.iterations, self.eps)


class Experts(nn.Module):
    def __init__(self, config, count=None, chosen=None):
        super().__init__()
        h, width = config["hidden_size"], config["moe_intermediate_size"]
        self.count, self.chosen = count or config["n_routed_experts"], chosen or config["num_experts_per_tok"]
        self.limit, self.scaling = config["swiglu_limit"], config["routed_scaling_factor"]
        self.normalise = config["norm_topk_prob"] and self.chosen > 1
        self.gate = matrix(self.count, h)
        self.w13 = nn.Parameter(torch.randn(self.count, 2 * width, h) * h**-0.5)
        self.w2 = nn.Parameter(torch.randn(self.count, h, width) * 0.5 * width**-0.5)
        self.sw13 = matrix(2 * width, h)
        self.sw2 = matrix(h, width, 0.5 * width**-0.5)
        for name in ("bias", "bias_vl", "load"):
            self.register_buffer(name, torch.zeros(self.count))

    def forward(self, x, o):
        stored = ops.ste_weight if o.wquant else lambda w, _: w
        scores = F.softplus(x @ self.gate.t()).sqrt()
        index = (scores.detach() + self.bias).topk(self.chosen, -1).indices
        gates = scores.gather(1, index)
        if self.normalise:
            gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
        if self.training:
            self.load += torch.bincount(index.flatten(), minlength=self.count)
        routed = ops.experts(x, gates * self.scaling, index, stored(self.w13, "fp4"), stored(self.w2, "fp4"), self.limit)
        return routed + ops.swiglu(x @ stored(self.sw13, "fp8").t(), self.limit) @ stored(self.sw2, "fp8").t()


class Attention(nn.Module):
    """Window attention, and with a ratio attention to the global cache. `shared` carries that cache and the selection from layer to
    layer: a Full layer makes them, a Reindex layer selects anew, a Reuse layer takes what is there."""

    def __init__(self, config, index, ratio):
        super().__init__()
        h, r = config["hidden_size"], config["q_lora_rank"]
        self.heads, self.width, self.groups = config["num_attention_heads"], config["head_dim"], config["o_groups"]
        self.config, self.index, self.ratio = config, index, ratio
        self.full = ratio and index in config["kv_source_layer_ids"]
        self.selects = ratio and index in config["index_source_layer_ids"]
        d, rank = self.width, config["o_lora_rank"]
        grouped = self.heads * d // self.groups
        self.wq_a, self.wq_b, self.wkv = matrix(r, h), matrix(self.heads * d, r), matrix(d, h)
        self.wo_a = nn.Parameter(torch.randn(self.groups, rank, grouped) * grouped**-0.5)
        self.wo_b = matrix(h, self.groups * rank, 0.5 * (self.groups * rank) ** -0.5)
        self.q_norm, self.kv_norm, self.sink = ones(r), ones(d), nn.Parameter(torch.zeros(self.heads))
        if self.full:
            self.c_wkv, self.c_norm = matrix(d, h), ones(d)
            self.i_wk, self.i_knorm = matrix(config["index_head_dim"], d), ones(config["index_head_dim"])
            if ratio > 1:
                self.c_wgate = matrix(d, h)
        if self.selects:
            self.i_wq, self.i_w = matrix(config["index_n_heads"] * config["index_head_dim"], r), matrix(config["index_n_heads"], h)

    def forward(self, x, shape, angles, shared, o):
        """x (B T, h) -> (B T, h); angles: cos and sin of the tokens, then of the entries"""
        (b, t), d, config = shape, self.width, self.config
        packed = ops.ste if o.quant else lambda v, _: v
        stored = ops.ste_weight if o.wquant else lambda w, _: w
        cos, sin = angles[:2]
        down = x @ torch.cat([stored(self.wq_a, "fp8"), stored(self.wkv, "fp8")]).t()
        rank = self.wq_a.shape[0]
        latent = ops.rms(down[:, :rank], self.q_norm)
        queries = ops.rope((latent @ stored(self.wq_b, "fp8").t()).view(b, t, self.heads, d), cos, sin)
        keys = packed(ops.rope(ops.rms(down[:, rank:], self.kv_norm).view(b, t, d), cos, sin), "fp8")
        entries = selection = target = None
        if self.ratio:
            if self.full:
                self.compress(x.view(b, t, -1), angles[2:], shared, packed)
            if self.selects:
                self.select(x, latent, shape, angles, shared, packed, stored, o)
            entries, selection, target = shared["entries"], shared.get("selection"), shared.get("target")
        supervision = (o.sup[0], o.sup[1], o.sup[2][self.index]) if o.sup and self.index in o.sup[2] else None
        if supervision and o.probe is not None and self.ratio == 1:
            o.readouts.append(self.readout(entries[:, o.probe], [a[:, o.probe] for a in angles[2:]], supervision[2], stored))
        floor = None if o.floors is None else o.floors[int(self.index >= max(config["kv_source_layer_ids"]))]
        window = config["sliding_window"]
        out = ops.attention(queries, keys, entries, self.sink, selection, target, window, self.ratio, supervision, floor)
        out = ops.rope(out, cos, sin, True).view(b * t, self.groups, -1)
        low = torch.bmm(out.transpose(0, 1), stored(self.wo_a, "fp8").transpose(1, 2))
        return torch.cat(list(low), -1) @ stored(self.wo_b, "fp8").t()

    def readout(self, entries, angles, heads, stored):
        """what the first heads put out when they look at one entry alone, from its own place: (B, places, h)"""
        latents = ops.rope(entries.contiguous(), *(a.contiguous() for a in angles), True)
        each, rank, out = self.heads // self.groups, self.wo_a.shape[1], 0
        down, up = stored(self.wo_a, "fp8").view(self.groups, rank, each, self.width), stored(self.wo_b, "fp8")
        for head in range(heads):
            group, place = divmod(head, each)
            out = out + (latents @ down[group, :, place].t()) @ up[:, group * rank : (group + 1) * rank].t()
        return out

    def compress(self, x, angles, shared, packed):
        b, t, _ = x.shape
        count, d = t // self.ratio, self.width
        x = x[:, : count * self.ratio]
        values = x @ self.c_wkv.t()
        if self.ratio > 1:
            shares = (x @ self.c_wgate.t()).view(b, count, self.ratio, d).softmax(2)
            values = (values.view(b, count, self.ratio, d) * shares).sum(2)
        latents = ops.rms(values, self.c_norm)
        index_keys = ops.rms(latents.detach() @ self.i_wk.t(), self.i_knorm)
        shared.clear()
        shared["entries"] = packed(ops.rope(latents, *angles), "nvfp4")
        shared["index_keys"] = packed(ops.rope(index_keys, *angles), "mxfp4")

    def select(self, x, latent, shape, angles, shared, packed, stored, o):
        """The indexer learns from attention (`aux`), and nothing else learns from the indexer."""
        shared.pop("target", None)
        if not (o.sparse or o.aux):
            return
        (b, t), config = shape, self.config
        heads, d = config["index_n_heads"], config["index_head_dim"]
        queries = (latent.detach() @ stored(self.i_wq, "fp8").t()).view(b, t, heads, d)
        queries = packed(ops.rope(queries, *angles[:2]), "mxfp4")
        weights = (x.detach() @ self.i_w.t()).view(b, t, heads) * (d * heads) ** -0.5
        scores = ops.index_scores(queries, shared["index_keys"], weights, self.ratio)
        if o.sparse:
            rank = scores.detach()
            if o.recent:
                newest = torch.arange(rank.shape[-1], dtype=rank.dtype, device=rank.device).expand_as(rank)
                rank = torch.where(torch.isfinite(rank), newest, rank)
            if self.index == config["candidate_source_layer_id"] and o.pool:
                shared["candidates"] = candidates(rank, self.ratio, config)
            elif "candidates" in shared:
                rank = rank.masked_fill(~shared["candidates"], -math.inf)
            shared["selection"] = ops.topk_mask(rank, config["index_topk"])
        if o.aux:
            shared["target"] = scores.new_zeros(scores.shape)  # attention adds to it, here and in the layers that reuse the selection
            o.losses.append((scores, shared["target"], self.ratio))


@torch.no_grad()
def candidates(scores, ratio, config):
    """entries of the best blocks, and of the newest one, for each row"""
    t, count = scores.shape[1:]
    size = config["candidate_block_size"]
    blocks = -(-count // size)
    visible = (torch.arange(t, device=scores.device) + 1) // ratio
    best = F.pad(scores, (0, blocks * size - count), value=-math.inf).unflatten(-1, (blocks, size)).amax(-1)
    newest = torch.arange(blocks, device=scores.device)[None] == ((visible - 1) // size)[:, None]
    best = best.masked_fill(newest & (visible > 0)[:, None], math.inf)
    top = best.topk(min(config["candidate_topk_blocks"], blocks), -1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, top.indices, top.values > -math.inf)
    return kept.repeat_interleave(size, -1)[..., :count] & torch.isfinite(scores)


class Engram(nn.Module):
    def __init__(self, config, rows):
        super().__init__()
        h, n = config["hidden_size"], config["hc_mult"]
        width = (config["engram_max_ngram_size"] - 1) * config["engram_n_heads"] * config["engram_head_dim"]
        self.n, self.h = n, h
        self.embed = nn.Parameter(torch.randn(rows, config["engram_head_dim"]) * 0.5)
        self.wkv = matrix((n + 1) * h, width, 0.5 * width**-0.5)
        self.qw, self.kw = ones(n, h), ones(n, h)

    def forward(self, streams, rows, o):
        n, h = self.n, self.h
        looked_up, w = F.embedding(rows, self.embed), self.wkv
        if o.wquant:
            looked_up, w = ops.ste_weight(looked_up, "row8"), ops.ste_weight(w, "fp8")
        kv = looked_up.flatten(1) @ w.t()
        key, value = kv[:, : n * h].view(-1, n, h), kv[:, None, n * h :]

        def mean_square(v):
            return (v * v).mean(-1) + 1e-20

        dot = (streams * (self.qw * self.kw) * key).sum(-1) * (mean_square(streams) * mean_square(key)).rsqrt() * h**-0.5
        gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
        return streams + gate[..., None] * value


class Layer(nn.Module):
    """A layer of the model, or with `experts` (count, chosen) of the draft."""

    def __init__(self, config, index, ratio, experts=None):
        super().__init__()
        h = config["hidden_size"]
        self.attn_hc, self.ffn_hc = HyperConnection(config), HyperConnection(config)
        self.attn_norm, self.ffn_norm = ones(h), ones(h)
        self.attn, self.ffn = Attention(config, index, ratio), Experts(config, *(experts or ()))
        self.engram = None
        if index in config["engram_layer_ids"] and experts is None:
            self.engram = Engram(config, config["engram_num_embeddings"][config["engram_layer_ids"].index(index)])

    def forward(self, streams, pre, attention, o):
        """`pre` is that of the sublayer before: a mix is made from the streams and its `pre` is used one sublayer later"""
        attn_pre, post, combination = self.attn_hc(streams)
        streams = ops.expand(attention(ops.collapse_norm(streams, pre, self.attn_norm)), streams, post, combination)
        ffn_pre, post, combination = self.ffn_hc(streams)
        streams = ops.expand(self.ffn(ops.collapse_norm(streams, attn_pre, self.ffn_norm), o), streams, post, combination)
        return streams, ffn_pre


def cos_sin(positions, frequencies):
    angles = positions[..., None] * frequencies
    return angles.cos().contiguous(), angles.sin().contiguous()


class Model(nn.Module):
    """config: the text config; engram: (token map, primes, offsets, multipliers)"""

    def __init__(self, config, engram):
        super().__init__()
        self.config = config
        h, vocabulary = config["hidden_size"], config["vocab_size"]
        self.embed = nn.Parameter(torch.randn(vocabulary, h) * 0.5)
        self.head = nn.Parameter(torch.randn(vocabulary, h) * 0.5 * h**-0.5)
        self.norm = ones(h)
        self.layers = nn.ModuleList(Layer(config, i, config["compress_ratios"][i]) for i in range(config["num_hidden_layers"]))
        for name, values in zip(("token_map", "primes", "offsets", "multipliers"), engram):
            self.register_buffer(name, torch.as_tensor(np.asarray(values)), persistent=False)
        self.register_buffer("plain_frequencies", rope_frequencies(config, False), persistent=False)
        self.register_buffer("yarn_frequencies", rope_frequencies(config, True), persistent=False)

    def hash(self, ids):
        """rows of the Engram tables (B, T, Engram layers, rows of a token)"""
        config = self.config
        size, heads = config["engram_max_ngram_size"], config["engram_n_heads"]
        pad, compressed, t = int(self.token_map[config["engram_pad_token_id"]]), self.token_map[ids], ids.shape[1]
        terms = torch.stack([F.pad(compressed, (k, 0), value=pad)[:, :t] for k in range(size)], -1)[:, :, None] * self.multipliers
        mixed, out = terms[..., 0], []
        for k in range(1, size):
            mixed = mixed ^ terms[..., k]
            out.append(mixed[..., None] % self.primes[:, (k - 1) * heads : k * heads])
        return torch.cat(out, -1) + self.offsets

    def forward(self, ids, o=None, positions=None, trace=None):
        """ids (B, T), positions (B, T) or 0, 1, … -> normed activations (B T, h). With `trace`, a list, what each layer left is
        added to it, and `taps` are what the draft sees."""
        o = o or Options()
        o.losses, o.readouts = [], []
        config, (b, t) = self.config, ids.shape
        n, ratios = config["hc_mult"], set(config["compress_ratios"][: len(self.layers)])
        positions = (torch.arange(t, device=ids.device).expand(b, t) if positions is None else positions).float()
        angles = {0: cos_sin(positions, self.plain_frequencies)}
        for ratio in ratios - {0}:
            firsts = positions[:, : t // ratio * ratio : ratio]
            angles[ratio] = cos_sin(positions, self.yarn_frequencies) + cos_sin(firsts, self.yarn_frequencies)
        streams = F.embedding(ids, self.embed).view(b * t, 1, -1).repeat(1, n, 1)
        pre = torch.zeros(b * t, n, device=streams.device)
        pre[:, 0] = 1
        shared, rows = {}, self.hash(ids).view(b * t, len(config["engram_layer_ids"]), -1)
        self.taps = []
        for i, layer in enumerate(self.layers):
            if layer.engram is not None and o.engram:
                streams = layer.engram(streams, rows[:, config["engram_layer_ids"].index(i)], o)
            if trace is not None and i in config["dspark_target_layer_ids"]:
                self.taps.append(streams.mean(1))

            def attention(x, attn=layer.attn):
                return attn(x, (b, t), angles[attn.ratio], shared, o)

            streams, pre = layer(streams, pre, attention, o)
            if trace is not None:
                trace.append(dict(streams=streams, pre=pre, selection=shared.get("selection"), candidates=shared.get("candidates")))
        return ops.collapse_norm(streams, pre, self.norm)

    def logits(self, ids, o=None, positions=None):
        return (self(ids, o, positions) @ self.head.t()).view(*ids.shape, -1)

    def readout_loss(self, o, ids):
        """cross-entropy of the tokens at the probed places, by what supervised heads would say of them alone"""
        targets = ids[:, o.probe].flatten()
        logits = [ops.rms(out.reshape(len(targets), -1), self.norm) @ self.head.t() for out in o.readouts]
        return sum(F.cross_entropy(row, targets) for row in logits) / len(logits)

    def index_loss(self, o):
        return sum(ops.index_kl(*entry) for entry in o.losses)


def layer_names(layer, prefix):
    """(released name, parameter, buffer or view of one) for one layer"""
    a, m, out = layer.attn, layer.ffn, {}
    width = m.sw2.shape[1]
    for sublayer in ("attn", "ffn"):
        for part in ("fn", "base", "scale"):
            out[f"hc_{sublayer}_{part}"] = getattr(getattr(layer, f"{sublayer}_hc"), part)
    out["attn_norm.weight"], out["ffn_norm.weight"] = layer.attn_norm, layer.ffn_norm
    for name in ("wq_a", "wq_b", "wkv", "wo_b", "q_norm", "kv_norm"):
        out[f"attn.{name}.weight"] = getattr(a, name)
    out["attn.attn_sink"] = a.sink
    out["attn.wo_a.weight"] = a.wo_a.data.view(-1, a.wo_a.shape[-1])
    if a.full:
        out["attn.compressor.wkv.weight"], out["attn.compressor.norm.weight"] = a.c_wkv, a.c_norm
        out["attn.indexer.wk.weight"], out["attn.indexer.k_norm.weight"] = a.i_wk, a.i_knorm
        if a.ratio > 1:
            out["attn.compressor.wgate.weight"] = a.c_wgate
    if a.selects:
        out["attn.indexer.wq_b.weight"], out["attn.indexer.weights_proj.weight"] = a.i_wq, a.i_w
    out["ffn.gate.weight"], out["ffn.gate.bias"], out["ffn.gate.bias_vl"] = m.gate, m.bias, m.bias_vl
    for e in range(m.count):
        out[f"ffn.experts.{e}.w1.weight"] = m.w13.data[e, :width]
        out[f"ffn.experts.{e}.w3.weight"] = m.w13.data[e, width:]
        out[f"ffn.experts.{e}.w2.weight"] = m.w2.data[e]
    out["ffn.shared_experts.w1.weight"], out["ffn.shared_experts.w3.weight"] = m.sw13.data[:width], m.sw13.data[width:]
    out["ffn.shared_experts.w2.weight"] = m.sw2
    if layer.engram is not None:
        out["engram.embed.weight"], out["engram.wkv.weight"] = layer.engram.embed, layer.engram.wkv
        out["engram.q_weight"], out["engram.k_weight"] = layer.engram.qw, layer.engram.kw
    return {prefix + name: tensor for name, tensor in out.items()}


def names(model):
    out = {"embed.weight": model.embed, "norm.weight": model.norm, "head.weight": model.head}
    for i, layer in enumerate(model.layers):
        out |= layer_names(layer, f"layers.{i}.")
    return out


def to_released(model):
    return {name: tensor.detach().clone().contiguous() for name, tensor in names(model).items()}


@torch.no_grad()
def from_released(model, tensors):
    for name, tensor in names(model).items():
        tensor.data.copy_(tensors[name].to(torch.float32).view(tensor.shape))

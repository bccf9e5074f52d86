"""The draft stages, trained on the frozen model by distilling what it would say next.

    python draft.py --work work --minutes 8 [--init models/pocket]     -> work/draft.pt

A block is the token that waits and noise; its rows see each other and a window of the text before them. The stages learn from
documentation and from questions alike. Minutes are of processor time. `--init` starts from the stages of a checkpoint, widened as the model was.
"""

import argparse
import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

import checkpoint
import data
import model as M
import ops
import train

LENGTH, SEQUENCES, ANCHORS = 512, 2, 96
IN_ANSWERS = 6.0  # blocks begin so much more often in answers, which are few tokens of a sequence
DECAY = 0.8  # a place in the block counts so much of the one before it
STAGES = 2


class Draft(nn.Module):
    def __init__(self, config, stages):
        super().__init__()
        h, vocabulary, rank = config["hidden_size"], config["vocab_size"], config["dspark_markov_rank"]
        self.config, self.stages, first = config, stages, config["num_hidden_layers"]
        experts = (config["dspark_n_routed_experts"], config["dspark_num_experts_per_tok"])
        self.layers = nn.ModuleList(M.Layer(config, first + i, 0, experts) for i in range(stages))
        self.main_proj = M.matrix(h, h * len(config["dspark_target_layer_ids"]))
        self.main_norm, self.norm = M.ones(h), M.ones(h)
        self.m_embed, self.m_head = nn.Parameter(torch.randn(vocabulary, rank) * 0.3), nn.Parameter(torch.zeros(vocabulary, rank))
        self.confidence = nn.Parameter(torch.zeros(1, h + rank))
        self.register_buffer("frequencies", M.rope_frequencies(config, False), persistent=False)

    def names(self):
        out = {}
        for i, layer in enumerate(self.layers):
            out |= M.layer_names(layer, f"mtp.{i}.")
        last = f"mtp.{self.stages - 1}."
        out["mtp.0.main_proj.weight"], out["mtp.0.main_norm.weight"] = self.main_proj, self.main_norm
        out[last + "norm.weight"], out[last + "confidence_head.proj.weight"] = self.norm, self.confidence
        out[last + "markov_head.embed.weight"], out[last + "markov_head.head.weight"] = self.m_embed, self.m_head
        return out

    def forward(self, seen, anchors, tokens, embed, o, first=0):
        """seen (B, T, taps h): what the model's target layers saw; anchors (B, N): places in it that blocks begin at; tokens (B, N):
        those that wait there; first: position of seen's first row -> normed rows and raw ones, (B, N, block, h)"""
        config = self.config
        (b, t, _), n, k = seen.shape, anchors.shape[1], config["dspark_block_size"]
        window, heads, d, blocks = (
            config["sliding_window"],
            config["num_attention_heads"],
            config["head_dim"],
            seen.shape[0] * anchors.shape[1],
        )
        packed = ops.ste if o.quant else lambda v, _: v
        stored = ops.ste_weight if o.wquant else lambda w, _: w
        main = ops.rms(seen.reshape(b * t, -1) @ stored(self.main_proj, "fp8").t(), self.main_norm)
        context_angles = M.cos_sin((torch.arange(t) + first).expand(b, t).float(), self.frequencies)
        block_angles = M.cos_sin((anchors.reshape(blocks, 1) + torch.arange(k) + first).float(), self.frequencies)
        places = anchors.view(b, n, 1) - window + torch.arange(window)
        visible = torch.cat([(places >= 0).view(blocks, window), torch.ones(blocks, k, dtype=torch.bool)], 1)
        places = places.clamp_min(0).view(b, n * window)
        ids = torch.full((blocks, k), config["dspark_noise_token_id"])
        ids[:, 0] = tokens.reshape(blocks)
        streams = F.embedding(ids, embed).view(blocks * k, 1, -1).repeat(1, config["hc_mult"], 1)
        pre = torch.zeros(blocks * k, config["hc_mult"])
        pre[:, 0] = 1
        for layer in self.layers:
            a = layer.attn

            def keys(x, a=a):
                return ops.rms(x @ stored(a.wkv, "fp8").t(), a.kv_norm)

            context = packed(ops.rope(keys(main).view(b, t, d), *context_angles), "fp8")
            context = context.gather(1, places[..., None].expand(-1, -1, d)).view(blocks, window, d)

            def attention(x, a=a, keys=keys, context=context):
                latent = ops.rms(x @ stored(a.wq_a, "fp8").t(), a.q_norm)
                queries = ops.rope((latent @ stored(a.wq_b, "fp8").t()).view(blocks, k, heads, d), *block_angles)
                own = packed(ops.rope(keys(x).view(blocks, k, d), *block_angles), "fp8")
                every = torch.cat([context, own], 1)
                logits = (queries.reshape(blocks, k * heads, d) @ every.transpose(1, 2)).view(blocks, k, heads, -1) * d**-0.5
                logits = logits.masked_fill(~visible[:, None, None], -math.inf)
                sink = a.sink.view(1, 1, heads, 1).expand(blocks, k, heads, 1)
                shares = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
                out = (shares.reshape(blocks, k * heads, -1) @ every).view(blocks, k, heads, d)
                out = ops.rope(out, *block_angles, True).reshape(blocks * k, a.groups, -1)
                low = torch.bmm(out.transpose(0, 1), stored(a.wo_a, "fp8").transpose(1, 2))
                return torch.cat(list(low), -1) @ stored(a.wo_b, "fp8").t()

            streams, pre = layer(streams, pre, attention, o)
        raw = (pre[..., None] * streams).sum(1)
        return ops.rms(raw, self.norm).view(b, n, k, -1), raw.view(b, n, k, -1)


@torch.no_grad()
def finish(stages, head, x, raw, anchor):
    """the drafted tokens and their confidences, from left to right"""
    previous, tokens, confidences = anchor, [], []
    for row, raw_row in zip(x[0, 0], raw[0, 0]):
        markov = stages.m_embed[previous]
        confidences.append(float(stages.confidence[0] @ torch.cat([raw_row, markov])))
        previous = int((row @ head.t() + stages.m_head @ markov).argmax())
        tokens.append(previous)
    return tokens, confidences


@torch.no_grad()
def draft_block(model, stages, ids, o=None):
    """what is drafted behind ids, whose last token waits"""
    o = o or M.Options()
    model(torch.tensor([ids[:-1]]), o, trace=[])
    seen = torch.cat(model.taps, -1).view(1, len(ids) - 1, -1)
    x, raw = stages(seen, torch.tensor([[len(ids) - 1]]), torch.tensor([[ids[-1]]]), model.embed, o)
    return finish(stages, model.head, x, raw, ids[-1])


def start_from(stages, folder):
    config, tensors = checkpoint.read(folder)
    if config["head_dim"] != stages.config["head_dim"]:
        tensors = checkpoint.widen_heads(tensors, config, stages.config)
    for name, tensor in stages.names().items():
        tensor.data.copy_(tensors[name].view(tensor.shape))


def losses(model, stages, ids, weights, o):
    """loss, and by place in the block how often the draft says what the model says, counted while all before was right"""
    (b, t), k = ids.shape, model.config["dspark_block_size"]
    with torch.no_grad():
        x = model(ids, M.Options(wquant=o.wquant), trace=[]).view(b, t, -1)
        seen = torch.cat(model.taps, -1).view(b, t, -1)
    answered = (weights >= data.ANSWER).float()[:, 9 : t - k]  # of the token that the anchor's row predicts
    anchors = torch.multinomial(1 + IN_ANSWERS * answered, ANCHORS) + 8
    places = (anchors[..., None] + torch.arange(k)).view(b, -1)
    tokens = ids.gather(1, places).view(b, ANCHORS, k)
    drafted, raw = stages(seen, anchors, tokens[..., 0], model.embed, o)
    markov = stages.m_embed[tokens]
    logits = drafted @ model.head.t() + markov @ stages.m_head.t()
    wanted = x.gather(1, places[..., None].expand(-1, -1, x.shape[-1])).view(b, ANCHORS, k, -1) @ model.head.t()
    hit = (logits.detach().argmax(-1) == wanted.argmax(-1)).float()
    alive = torch.cat([torch.ones(b, ANCHORS, 1), hit.cumprod(-1)[..., :-1]], -1)
    distilled = (-(wanted.softmax(-1) * logits.log_softmax(-1)).sum(-1) * DECAY ** torch.arange(k)).mean()
    confidence = torch.cat([raw.detach(), markov.detach()], -1) @ stages.confidence[0]
    judged = (F.binary_cross_entropy_with_logits(confidence, hit, reduction="none") * alive).sum() / alive.sum()
    accepted = hit.cumprod(-1).mean((0, 1))
    return distilled + 0.1 * judged, accepted


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="work")
    parser.add_argument("--checkpoint", default="", help="by default last.pt of the work folder")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--steps", type=int, default=10**9, help="stop after so many steps, whatever the time")
    parser.add_argument("--init", help="a checkpoint in the released layout whose stages to start from")
    parser.add_argument("--seed", type=int, default=77, help="of the samples: another one where --init has learned from these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model, _ = checkpoint.trained(options.work, options.checkpoint)
    model.requires_grad_(False)
    stages = Draft(model.config, STAGES).train()
    stages.norm.data.copy_(model.norm)
    if options.init:
        start_from(stages, options.init)
    optimizer = train.Optimizer(stages, 0, 1, None)
    source = data.Source(f"{options.work}/docs.jsonl", checkpoint.tokenizer(options.work))
    samples, o, began, step, recent = data.Samples(source, options.seed, 0.5, 0.1), M.Options(wquant=True), time.process_time(), 0, []
    while (used := time.process_time() - began) < options.minutes * 60 and step < options.steps:
        ids, weights = train.batch(samples, step * SEQUENCES, SEQUENCES, LENGTH)[:2]
        loss, accepted = losses(model, stages, ids, weights, o)
        loss.backward()
        step += 1
        fraction = min(1.0, max(used / (options.minutes * 60), step / options.steps))
        lr = min(1.0, step / 30) * min(1.0, (1 - fraction) / 0.4 + 0.02)
        optimizer.step(step, 0.02 * lr, 4e-3 * lr)
        stages.zero_grad(set_to_none=True)
        train.balance(stages, lr)
        recent.append((float(loss.detach()), accepted))
        if step % 25 == 0:
            mean = torch.stack([a for _, a in recent[-25:]]).mean(0)
            print(
                f"step {step}, {used:.0f} s, loss {sum(l for l, _ in recent[-25:]) / 25:.3f}, accepted by place "
                f"{[round(float(v), 2) for v in mean]}, tokens a round {1 + float(mean.sum()):.2f}",
                flush=True,
            )
    config = dict(num_nextn_predict_layers=STAGES, compress_ratios=model.config["compress_ratios"] + [0] * STAGES)
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in stages.names().items()}
    torch.save(dict(tensors=tensors, config=config, steps=step), f"{options.work}/draft.pt")


if __name__ == "__main__":
    main()

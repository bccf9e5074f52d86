"""Trains the pocket model; resumable.

    python train.py --work work --minutes 90                       from nothing
    python train.py --work work --minutes 90 --init models/pocket  from a checkpoint in the released layout, widened where the config is wider

Time decides the phase and the learning rate (`PHASES`), so that a slower machine takes fewer steps of the same plan. On a CPU it is processor
time of one process, so that others who use the machine take nothing away but speed. There,
processes of one thread each take parts of a step from a common heap: one that is held up does not hold up the others.
`stable.pt` is the state before the learning rate falls: copy it over `last.pt` to go on from there with more minutes.
"""

import argparse
import os
import signal
import time

import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from tokenizers import Tokenizer

import checkpoint
import data
import model as M
import tokenizer as tk

DENSE = dict(quant=False, sparse=False, pool=False, aux=False)
PACKED = dict(quant=True, sparse=False, pool=False, aux=True)
SPARSE = dict(quant=True, sparse=True, pool=True, aux=True)
# From this fraction of the plan: tokens of a sequence, tokens of a step, share of documentation, share of the rest that is text to copy,
# options.
PHASES = [
    (0.00, 256, 4096, 0.30, 0.3, DENSE),
    (0.15, 256, 4096, 0.40, 0.3, PACKED),
    (0.35, 512, 4096, 0.45, 0.3, PACKED),
    (0.55, 512, 4096, 0.45, 0.3, SPARSE),
    (0.72, 1024, 8192, 0.45, 0.2, SPARSE | dict(wquant=True)),
    (0.90, 2048, 8192, 0.40, 0.15, SPARSE | dict(wquant=True)),
]
GROWN_PHASES = [
    (0.00, 512, 4096, 0.40, 0.4, SPARSE),
    (0.22, 512, 4096, 0.42, 0.2, SPARSE),
    (0.45, 1024, 4096, 0.42, 0.2, SPARSE),
    (0.70, 1024, 4096, 0.42, 0.2, SPARSE | dict(wquant=True)),
    (0.86, 2048, 4096, 0.40, 0.18, SPARSE | dict(wquant=True)),
]
DECAY_FROM = 0.65
# Heads (per layer) that are told where to look while they copy, and how much that counts.
SUPERVISED = {4: 1, 5: 2, 6: 2, 7: 2}
SUPERVISION = 1.0
# What such a head would say of a token that it looks at alone has to be that token: at so many places of a sequence, with this weight. Values are
# few and most tokens are never one: looking at the right place is learned long before saying what stands there.
READOUT_PLACES, READOUT = 128, 0.3
FLOORS = 0.4  # share of sequences in which windows end at a floor, as they do after a bounded prefill


def text_config(vocabulary, compressed):
    return dict(
        vocab_size=vocabulary, hidden_size=128, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=1, head_dim=128, qk_rope_head_dim=16,
        q_lora_rank=96, o_lora_rank=64, o_groups=2, sliding_window=64, rms_norm_eps=1e-20, swiglu_limit=10.0,
        rope_theta=10000.0, compress_rope_theta=160000.0, max_position_embeddings=131072,
        rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=32, beta_fast=32, beta_slow=1, original_max_position_embeddings=4096),
        n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=128, scoring_func="sqrtsoftplus", topk_method="noaux_tc",
        norm_topk_prob=True, routed_scaling_factor=1.5, compress_ratios=[0, 0, 2, 2, 1, 1, 1, 1], kv_source_layer_ids=[2, 4], index_source_layer_ids=[2, 4, 6],
        index_n_heads=4, index_head_dim=64, index_topk=128, candidate_source_layer_id=4, candidate_topk_blocks=64, candidate_block_size=8,
        hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, engram_layer_ids=[1, 4], engram_max_ngram_size=4, engram_vocab_size=6000, engram_n_heads=2,
        engram_head_dim=32, engram_pad_token_id=2, engram_compressed_vocab_size=compressed, num_nextn_predict_layers=0, dspark_block_size=5,
        dspark_markov_rank=32, dspark_n_routed_experts=8, dspark_num_experts_per_tok=2, dspark_noise_token_id=vocabulary - 1, dspark_target_layer_ids=[5, 6, 7],
        bos_token_id=0, eos_token_id=1, pad_token_id=2, hidden_act="silu", attention_bias=False, attention_dropout=0.0, initializer_range=0.02,
        tie_word_embeddings=False, use_cache=True, model_type="deepseek_v41_text", dtype="float32",
    )  # fmt: skip


def build(folder, **changes):
    """(tokenizer, model) for the tokenizer in a folder; changes: of the config"""
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    token_map, size = tk.engram_map(tokenizer)
    config = text_config(tokenizer.get_vocab_size(), size) | changes
    primes, offsets, multipliers = tk.engram_constants(config, token_map)
    config["engram_num_embeddings"] = [int(row.sum()) for row in primes]
    return tokenizer, M.Model(config, (token_map, primes, offsets, multipliers))


def start_from(model, folder):
    config, tensors = checkpoint.read(folder)
    if config["head_dim"] != model.config["head_dim"]:
        tensors = checkpoint.widen_heads(tensors, config, model.config)
    M.from_released(model, tensors)


class Shared:
    """Sums over the processes of one machine, and a heap of work for them, in shared memory."""

    def __init__(self, size, world):
        context = mp.get_context("spawn")
        self.buffer, self.world = torch.zeros(world, size).share_memory_(), world
        self.barrier, self.next = context.Barrier(world), context.Value("l", 0)

    def take(self, total):
        """the next part of `total`, or None"""
        with self.next.get_lock():
            part = self.next.value
            self.next.value += 1
        return part if part < total else None

    def add_up(self, x, rank):
        n = x.numel()
        self.buffer[rank, :n].copy_(x.view(-1))
        self.barrier.wait()
        self.next.value = 0
        out = self.buffer[0, :n].clone()
        for other in range(1, self.world):
            out += self.buffer[other, :n]
        self.barrier.wait()
        return x.view(-1).copy_(out).view_as(x)


def newton_schulz(g, steps=5):
    x = g / (g.norm(dim=(1, 2), keepdim=True) + 1e-7)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2).contiguous()
    for _ in range(steps):
        a = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.transpose(1, 2) if tall else x


class Optimizer:
    """Muon for matrices inside layers (stacked by shape, shared out over the processes), Adam for the rest"""

    STACKED = ("wq_a", "wq_b", "wkv", "wo_b", "sw2", "c_wkv", "c_wgate", "i_wq", "i_wk")

    def __init__(self, model, rank, world, shared):
        self.rank, self.world, self.shared, width = rank, world, shared, model.config["moe_intermediate_size"]
        self.groups, self.adam = {}, []
        for name, q in model.named_parameters():
            leaf = name.split(".")[-1]
            if leaf in ("w13", "sw13"):
                view = q.data.view(-1, width, q.shape[-1])
            elif leaf in ("w2", "wo_a"):
                view = q.data
            elif leaf in self.STACKED:
                view = q.data[None]
            else:
                self.adam.append((name, q, torch.zeros_like(q), torch.zeros_like(q)))
                continue
            self.groups.setdefault(tuple(view.shape[1:]), []).append((name, q, view, torch.zeros_like(view)))

    def state(self):
        return dict(adam=[(a, b) for _, _, a, b in self.adam], muon={k: [x[3] for x in g] for k, g in self.groups.items()})

    def load(self, state):
        for (_, _, a, b), (x, y) in zip(self.adam, state["adam"]):
            a.copy_(x)
            b.copy_(y)
        for shape, group in self.groups.items():
            for entry, momentum in zip(group, state["muon"][shape]):
                entry[3].copy_(momentum)

    @torch.no_grad()
    def step(self, t, lr_muon, lr_adam, decay=0.02):
        norm = float(torch.stack([q.grad.norm() for _, q, _, _ in self.adam if q.grad is not None]).norm())
        clip, b1, b2 = min(1.0, 1.0 / (norm + 1e-6)), 0.9, 0.97
        for name, q, a, b in self.adam:
            if q.grad is None:
                continue
            g, leaf = q.grad * clip, name.split(".")[-1]
            a.lerp_(g, 1 - b1)
            b.lerp_(g * g, 1 - b2)
            lr = lr_adam * (2.0 if "engram.embed" in name else 0.3 if leaf in ("fn", "base", "scale", "gate") else 1.0)
            q.data.addcdiv_(a / (1 - b1**t), (b / (1 - b2**t)).sqrt().add_(1e-10), value=-lr)
        for shape, group in self.groups.items():
            total, i = sum(entry[2].shape[0] for entry in group), 0
            stack = torch.empty(total, *shape, device=group[0][2].device)
            for _, q, view, momentum in group:
                g = (q.grad if q.grad is not None else torch.zeros_like(q)).view_as(view)
                momentum.mul_(0.95).add_(g)
                torch.add(g, momentum, alpha=0.95, out=stack[i : i + view.shape[0]])
                i += view.shape[0]
            low, high = total * self.rank // self.world, total * (self.rank + 1) // self.world
            update = torch.zeros_like(stack)
            if high > low:
                update[low:high] = newton_schulz(stack[low:high])
            if self.world > 1:
                self.shared.add_up(update, self.rank)
            scale, i = lr_muon * max(1.0, shape[0] / shape[1]) ** 0.5, 0
            for _, _, view, _ in group:
                view.mul_(1 - lr_muon * decay).add_(update[i : i + view.shape[0]], alpha=-scale)
                i += view.shape[0]
        return norm


def positions(length, documentation, rng):
    """0, 1, …, with a few jumps ahead: long distances without long sequences. Jumps are even, at even places: groups of two stay whole."""
    out = np.arange(length)
    if rng.random() < (0.2 if documentation else 0.5):
        for _ in range(int(rng.integers(1, 4))):
            out[2 * int(rng.integers(1, length // 2)) :] += 2 * int(2 ** rng.uniform(3, 14.3))
    return out


def floors(length, rng):
    """(encoder floor, decoder floor): from there on, windows do not reach below"""
    if rng.random() >= FLOORS:
        return 0, 0
    at = int(rng.integers(1, length))
    return (at if rng.random() < 0.3 else 0), at


def batch(samples, number, count, length):
    """samples number … number + count - 1 as tensors: ids, weights, copied from, is documentation, positions, floors"""
    made = [samples.make(number + i, length) for i in range(count)]
    rng = np.random.default_rng((samples.seed, number))
    ids, weights, copied = (torch.from_numpy(np.stack([m[k] for m in made])) for k in range(3))
    kind = torch.tensor([m[3] for m in made])
    copied = torch.cat([copied[:, 1:], torch.full((count, 1), -1)], 1)  # the row that predicts a token looks at what it copies
    where = torch.from_numpy(np.stack([positions(length, m[3], rng) for m in made]))
    low = torch.tensor([floors(length, rng) for _ in made]).t()
    return ids, weights, copied, kind, where, low


def progress(used, step, options):
    """how much of the plan is done"""
    return max(used / 60 / options.minutes, step / options.steps if options.steps else 0.0)


def phase(fraction, phases):
    return [p for p in phases if fraction >= p[0]][-1]


def rate(step, fraction):
    return min(1.0, (step + 1) / 60) * (1.0 if fraction < DECAY_FROM else max(0.04, (1 - fraction) / (1 - DECAY_FROM)))


class Statistics:
    NAMES = ("loss", "kl", "readout", "text", "texts", "value", "values", "hits", "copies", "copied")

    def __init__(self):
        self.sums = torch.zeros(len(self.NAMES))

    def add(self, **sums):
        for name, value in sums.items():
            self.sums[self.NAMES.index(name)] += float(value)

    def row(self):
        s = dict(zip(self.NAMES, self.sums.tolist()))
        self.sums.zero_()
        return dict(
            loss=s["loss"],
            text=s["text"] / max(s["texts"], 1),
            value=s["value"] / max(s["values"], 1),
            hit=s["hits"] / max(s["values"], 1),
            copied=s["copied"] / max(s["copies"], 1),
            readout=s["readout"],
            kl=s["kl"],
        )


def part_of_step(model, samples, number, count, total, length, options, device, statistics):
    """gradients of `count` of a step's `total` sequences"""
    made = batch(samples, number, count, length)
    ids, weights, copied, kind, where, low = (x.to(device) for x in made)
    o = M.Options(
        **options, sup=(copied, SUPERVISION / (total * length), SUPERVISED), floors=low, probe=torch.randperm(length)[:READOUT_PLACES]
    )
    x = model(ids, o, where).view(count, length, -1)[:, :-1].reshape(count * (length - 1), -1)
    target = ids[:, 1:].reshape(-1)
    logits = x @ model.head.t()
    cross_entropy = F.cross_entropy(logits, target, reduction="none")
    weight = weights[:, 1:].reshape(-1)
    loss = (cross_entropy * weight).sum() / (total * (length - 1))
    readout = model.readout_loss(o, ids) * (count / total)
    whole = loss + READOUT * readout
    statistics.add(readout=readout.detach())
    if options["aux"]:
        kl = model.index_loss(o) * (count / total)
        whole = whole + kl
        statistics.add(kl=kl.detach())
    whole.backward()
    with torch.no_grad():
        text = kind[:, None].expand(count, length - 1).reshape(-1)
        value, copy = weight == data.VALUE, weight == data.COPIED
        hit = logits.argmax(-1) == target
        statistics.add(loss=loss, text=cross_entropy[text].sum(), texts=text.sum(), value=cross_entropy[value].sum(), values=value.sum())
        statistics.add(hits=hit[value].sum(), copies=copy.sum(), copied=hit[copy].sum())


def worker(rank, world, options, shared=None):
    device = torch.device(options.device)
    torch.set_num_threads(1 if options.device == "cpu" else 8)
    torch.manual_seed(0)
    tokenizer, model = build(f"{options.work}/tokenizer")
    source = data.Source(f"{options.work}/docs.jsonl", tokenizer)
    step, used, tokens, sequences = 0, 0.0, 0, 0
    last, log = f"{options.work}/last.pt", None
    if os.path.exists(last):
        state = torch.load(last, weights_only=False)
        model.load_state_dict(state["model"])
        step, used, tokens, sequences = state["step"], state["used"], state["tokens"], state["sequences"]
    elif options.init:
        start_from(model, options.init)
    phases = GROWN_PHASES if options.init else PHASES
    model.to(device).train()
    optimizer = Optimizer(model, rank, world, shared)
    if os.path.exists(last):
        optimizer.load(state["optimizer"])
    if rank == 0:
        print(f"{sum(q.numel() for q in model.parameters()) / 1e6:.2f} M parameters, step {step}", flush=True)
        log = open(f"{options.work}/log.csv", "a")
        if step == 0:
            log.write("step,seconds,tokens,length,rate,loss,text,value,hit,copied,readout,kl,norm,load,speed\n")
    samples = {p[3:5]: data.Samples(source, options.seed, *p[3:5]) for p in phases}
    statistics = Statistics()
    now = time.process_time if options.device == "cpu" else time.monotonic
    before, began, saved, since, counted = used, now(), time.monotonic(), time.monotonic(), tokens
    stop, fraction = [], progress(used, step, options)
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))  # the first process's word counts, as its clock does
    while True:
        clock = torch.tensor([before + now() - began if rank == 0 else 0.0, float(bool(stop))])
        if world > 1:
            shared.add_up(clock, rank)  # the first process's clock decides for all
        used, previous = float(clock[0]), fraction
        fraction = progress(used, step, options)
        if rank == 0 and previous < DECAY_FROM <= fraction:
            save(f"{options.work}/stable.pt", model, optimizer, step, used, tokens, sequences)
        if fraction >= 1 or clock[1]:
            break
        _, length, per_step, *shares, switches = phase(fraction, phases)
        length, per_step = length // options.shrink, per_step // options.shrink
        total = max(1, per_step // length)
        count = min(total, max(1, 1024 // length))
        parts = -(-total // count)
        if world == 1:
            mine = iter(range(parts))
        else:
            mine = iter(lambda: shared.take(parts), None)
        for part in mine:
            n = min(count, total - part * count)
            part_of_step(model, samples[tuple(shares)], sequences + part * count, n, total, length, switches, device, statistics)
        step, tokens, sequences = step + 1, tokens + total * length, sequences + total
        parameters = [q for q in model.parameters() if q.requires_grad]
        loads = [layer.ffn.load for layer in model.layers]
        for q in parameters:
            if q.grad is None:
                q.grad = torch.zeros_like(q)
        if world > 1:
            flat = shared.add_up(torch.cat([q.grad.view(-1) for q in parameters] + loads), rank)
            i = 0
            for x in [q.grad for q in parameters] + loads:
                x.view(-1).copy_(flat[i : i + x.numel()])
                i += x.numel()
        lr = rate(step, fraction)
        norm = optimizer.step(step, options.lr_muon * lr, options.lr_adam * lr)
        model.zero_grad(set_to_none=True)
        load = balance(model, lr)
        if step % options.log_every == 0:
            if world > 1:
                shared.add_up(statistics.sums, rank)
            row = statistics.row()
            if rank == 0:
                speed = (tokens - counted) / (time.monotonic() - since)
                row = {k: v / (options.log_every if k in ("loss", "kl", "readout") else 1) for k, v in row.items()}
                values = [step, round(used, 1), tokens, length, lr, *row.values(), norm, load, speed]
                log.write(",".join(f"{v:.4f}" if isinstance(v, float) else str(v) for v in values) + "\n")
                log.flush()
                since, counted = time.monotonic(), tokens
        if rank == 0 and time.monotonic() - saved > options.save_every:
            save(last, model, optimizer, step, used, tokens, sequences)
            saved = time.monotonic()
    if rank == 0:
        save(last, model, optimizer, step, used, tokens, sequences)
        print(f"step {step}, {tokens} tokens, {used:.0f} s", flush=True)


def balance(model, lr):
    """moves the routers' biases towards equal load; the largest load over the mean"""
    worst = 0.0
    for layer in model.layers:
        ffn = layer.ffn
        worst = max(worst, float(ffn.load.max() / ffn.load.mean()))
        ffn.bias += (0.004 * lr) * torch.sign(ffn.load.mean() - ffn.load)
        ffn.bias -= ffn.bias.mean()
        ffn.load.zero_()
    return worst


def save(path, model, optimizer, step, used, tokens, sequences):
    state = dict(
        model=model.state_dict(), optimizer=optimizer.state(), step=step, used=used, tokens=tokens, sequences=sequences, config=model.config
    )
    torch.save(state, path + ".new")
    os.replace(path + ".new", path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="work")
    parser.add_argument("--minutes", type=float, default=90)
    parser.add_argument("--init", help="a checkpoint in the released layout to start from")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--processes", type=int, default=2, help="on a CPU")
    parser.add_argument("--shrink", type=int, default=1, help="divides lengths and steps: a try-out")
    parser.add_argument("--steps", type=int, default=0, help="a plan of so many steps, where time does not end it before")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--lr-muon", type=float, default=0.02)
    parser.add_argument("--lr-adam", type=float, default=4e-3)
    parser.add_argument("--save-every", type=float, default=240, help="seconds")
    parser.add_argument("--log-every", type=int, default=10, help="steps")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    world = options.processes if options.device == "cpu" else 1
    if world > 1:
        signal.signal(signal.SIGTERM, lambda *_: [child.terminate() for child in mp.active_children()])
        mp.spawn(worker, (world, options, Shared(12_000_000, world)), nprocs=world)
    else:
        worker(0, 1, options)


if __name__ == "__main__":
    main()

"""Operators of the model. Every one has a plain PyTorch form, for any device; for float32 on a CPU a fused kernel replaces it (`kernels.c`,
called through ctypes) whose backward is written by hand. Without gcc, or with POCKET_PLAIN=1, the plain forms run.

Shapes as in `model.py`: B sequences, T tokens, H heads, D channels, N = B T rows, C entries.
"""

import ctypes
import hashlib
import math
import os
import subprocess
import tempfile

import torch
import torch.nn.functional as F

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "kernels.c")
FLAGS = "-O3 -march=native -ffast-math -fno-finite-math-only -D__FAST_MATH__ -shared -fPIC".split()
K = None


def load_kernels():
    """compiles the kernels once a machine and version of them"""
    global K
    with open(SOURCE, "rb") as file:
        version = hashlib.sha256(file.read()).hexdigest()[:16]
    library = os.path.join(tempfile.gettempdir(), f"pocket-kernels-{os.getuid()}-{version}.so")
    try:
        if not os.path.exists(library):
            made = f"{library}.{os.getpid()}"
            subprocess.run(["gcc", *FLAGS, SOURCE, "-o", made, "-lm"], check=True)
            os.replace(made, library)
        K = ctypes.CDLL(library)
        K.kl_rows.restype = ctypes.c_double
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no C kernels, plain PyTorch: {error}")


if not os.environ.get("POCKET_PLAIN"):
    load_kernels()


def fast(x):
    return K is not None and x.device.type == "cpu" and x.dtype == torch.float32


def p(t):
    return ctypes.c_void_p(None if t is None else t.data_ptr())


f, i64, ci = ctypes.c_float, ctypes.c_int64, ctypes.c_int


# ---- cache formats, straight-through -----------------------------------------------------------------------------
def power_of_two_above(x):
    return ((x.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def _e4m3(v):
    step = ((v.view(torch.int32) & 0x7F800000).view(torch.float32) * 0.125).clamp_min(2.0**-9)
    return torch.round(v / step) * step


def _e2m1(v):
    a = v.abs()
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    return torch.round(v / step) * step


@torch.no_grad()
def qdq(x, fmt):
    block = 16 if fmt == "nvfp4" else 32
    c = x.shape[-1]
    pad = -c % block
    g = F.pad(x, (0, pad)).unflatten(-1, (-1, block))
    amax = g.abs().amax(-1, keepdim=True)
    if fmt == "fp8":
        s = power_of_two_above(amax.clamp_min(1e-4) * (1 / 448))
        q = _e4m3((g / s).clamp(-448, 448))
    else:
        s = (
            _e4m3((amax.clamp_min(6 * 2.0**-9) / 6).clamp_max(448))
            if fmt == "nvfp4"
            else power_of_two_above(amax.clamp_min(6 * 2.0**-126) * (1 / 6))
        )
        q = _e2m1((g / s).clamp(-6, 6))
    return (q * s).flatten(-2)[..., :c]


@torch.no_grad()
def qdq_weight(w, fmt):
    """storage formats of the released checkpoint: fp8 = E4M3 with one power-of-two scale per 32x32 block, fp4 = E2M1 per 1x32, row8 = E4M3 per 1x32"""
    *lead, r, c = w.shape
    br = 32 if fmt == "fp8" else 1
    b = F.pad(w, (0, -c % 32, 0, -r % br))
    R, C = b.shape[-2] // br, b.shape[-1] // 32
    b = b.reshape(*lead, R, br, C, 32)
    amax = b.abs().amax((-3, -1), keepdim=True)
    if fmt == "fp4":
        s = power_of_two_above(amax.clamp_min(6 * 2.0**-126) / 6)
        q = _e2m1((b / s).clamp(-6, 6))
    else:
        s = power_of_two_above(amax.clamp_min(1e-4) / 448)
        q = _e4m3((b / s).clamp(-448, 448))
    return (q * s).reshape(*lead, R * br, C * 32)[..., :r, :c]


def ste_weight(w, fmt):
    return w + (qdq_weight(w.detach(), fmt) - w.detach())


def ste(x, fmt):
    return x + (qdq(x.detach(), fmt) - x.detach())


# ---- RMSNorm -------------------------------------------------------------------------------------------------------
class _Rms(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        x = x.contiguous()
        h = x.shape[-1]
        N = x.numel() // h
        out = torch.empty_like(x)
        rs = x.new_empty(N)
        K.rms_fwd(p(x), p(w), p(rs), p(out), i64(N), ci(h), f(eps))
        ctx.save_for_backward(x, w, rs)
        return out

    @staticmethod
    def backward(ctx, g):
        x, w, rs = ctx.saved_tensors
        h = x.shape[-1]
        g = g.contiguous()
        dx = torch.empty_like(x)
        dw = torch.zeros_like(w)
        K.rms_bwd(p(x), p(w), p(rs), p(g), p(dx), p(dw), i64(x.numel() // h), ci(h))
        return dx, dw, None


def rms(x, w, eps=1e-20):
    if fast(x):
        return _Rms.apply(x, w, eps)
    return w * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps))


# ---- RoPE ------------------------------------------------------------------------------------------------------------
class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cs, sn, inv):
        x = x.contiguous()
        nf = cs.shape[-1]
        N = cs.numel() // nf
        D = x.shape[-1]
        H = x.numel() // (N * D)
        y = torch.empty_like(x)
        K.rope(p(x), p(y), p(cs), p(sn), i64(N), ci(H), ci(D), ci(nf), f(-1.0 if inv else 1.0))
        ctx.a = (cs, sn, inv, N, H, D, nf)
        return y

    @staticmethod
    def backward(ctx, g):
        cs, sn, inv, N, H, D, nf = ctx.a
        g = g.contiguous()
        y = torch.empty_like(g)
        K.rope(p(g), p(y), p(cs), p(sn), i64(N), ci(H), ci(D), ci(nf), f(1.0 if inv else -1.0))
        return y, None, None, None


def rope(x, cs, sn, inv=False):
    """x [B,T,(H,)C]; cs/sn [B,T,nf]: rotate adjacent pairs of the last 2*nf channels"""
    if fast(x):
        return _Rope.apply(x, cs, sn, inv)
    if x.ndim == 4:
        cs, sn = cs.unsqueeze(2), sn.unsqueeze(2)
    if inv:
        sn = -sn
    n = 2 * cs.shape[-1]
    a, b = x[..., -n::2], x[..., -n + 1 :: 2]
    return torch.cat([x[..., :-n], torch.stack([a * cs - b * sn, a * sn + b * cs], -1).flatten(-2)], -1)


# ---- mHC ---------------------------------------------------------------------------------------------------------------
class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, l, iters, eps):
        l = l.contiguous()
        C = torch.empty_like(l)
        K.sinkhorn_fwd(p(l), p(C), i64(l.numel() // 16), ci(iters), f(eps))
        ctx.save_for_backward(l)
        ctx.a = (iters, eps)
        return C

    @staticmethod
    def backward(ctx, g):
        (l,) = ctx.saved_tensors
        g = g.contiguous()
        d = torch.empty_like(l)
        K.sinkhorn_bwd(p(l), p(g), p(d), i64(l.numel() // 16), ci(ctx.a[0]), f(ctx.a[1]))
        return d, None, None


def sinkhorn(l, iters, eps):
    if fast(l) and l.shape[-1] == 16:
        return _Sinkhorn.apply(l, iters, eps)
    n = math.isqrt(l.shape[-1])
    C = l.unflatten(-1, (n, n)).softmax(-1) + eps
    C = C / (C.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        C = C / (C.sum(-1, keepdim=True) + eps)
        C = C / (C.sum(-2, keepdim=True) + eps)
    return C.flatten(-2)


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, R, post, C):
        y, post, C = y.contiguous(), post.contiguous(), C.contiguous()
        N, _, h = R.shape
        out = torch.empty_like(R)
        K.expand_fwd(p(y), p(R), p(post), p(C), p(out), i64(N), ci(h))
        ctx.save_for_backward(y, R, post, C)
        return out

    @staticmethod
    def backward(ctx, g):
        y, R, post, C = ctx.saved_tensors
        N, _, h = R.shape
        g = g.contiguous()
        dy, dR, dp, dC = (torch.empty_like(t) for t in (y, R, post, C))
        K.expand_bwd(p(y), p(R), p(post), p(C), p(g), p(dy), p(dR), p(dp), p(dC), i64(N), ci(h))
        return dy, dR, dp, dC


def expand(y, R, post, C):
    """R'_o = post_o y + sum_i C[i][o] R_i;  y [N,h], R [N,n,h], C [N,n*n]"""
    n = R.shape[1]
    if fast(y) and n == 4:
        return _Expand.apply(y, R, post, C)
    return post[..., None] * y[:, None] + torch.einsum("tio,tih->toh", C.unflatten(-1, (n, n)), R)


class _CollapseNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, R, pre, w, eps):
        pre = pre.contiguous()
        N, _, h = R.shape
        c, out, rs = R.new_empty(N, h), R.new_empty(N, h), R.new_empty(N)
        K.collapse_norm_fwd(p(R), p(pre), p(w), p(c), p(rs), p(out), i64(N), ci(h), f(eps))
        ctx.save_for_backward(R, pre, w, c, rs)
        return out

    @staticmethod
    def backward(ctx, g):
        R, pre, w, c, rs = ctx.saved_tensors
        N, _, h = R.shape
        g = g.contiguous()
        dR, dp, dw = torch.empty_like(R), torch.empty_like(pre), torch.zeros_like(w)
        K.collapse_norm_bwd(p(R), p(pre), p(w), p(c), p(rs), p(g), p(dR), p(dp), p(dw), i64(N), ci(h))
        return dR, dp, dw, None


def collapse_norm(R, pre, w, eps=1e-20):
    if fast(R) and R.shape[1] == 4:
        return _CollapseNorm.apply(R, pre, w, eps)
    return rms((pre[..., None] * R).sum(1), w, eps)


# ---- SwiGLU and mixture of experts ----------------------------------------------------------------------------------
class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, H, lim):
        N, I2 = H.shape
        u = H.new_empty(N, I2 // 2)
        K.swiglu_fwd(p(H), p(None), p(u), i64(N), ci(I2 // 2), f(lim))
        ctx.save_for_backward(H)
        ctx.lim = lim
        return u

    @staticmethod
    def backward(ctx, g):
        (H,) = ctx.saved_tensors
        g = g.contiguous()
        d = torch.empty_like(H)
        K.swiglu_bwd(p(H), p(None), p(g), p(d), p(None), i64(H.shape[0]), ci(H.shape[1] // 2), f(ctx.lim))
        return d, None


def swiglu(H, lim):
    if fast(H):
        return _Swiglu.apply(H, lim)
    a, b = H.chunk(2, -1)
    return F.silu(a.clamp_max(lim)) * b.clamp(-lim, lim)


class _Experts(torch.autograd.Function):
    """tokens sorted by expert, one GEMM per expert; w13 [E,2I,h], w2 [E,h,I], gates [N,k], idx [N,k]"""

    @staticmethod
    def forward(ctx, x, gates, idx, w13, w2, lim):
        N, h = x.shape
        k = idx.shape[1]
        E, I2, _ = w13.shape
        I = I2 // 2
        order = torch.argsort(idx.reshape(-1))
        xs = x[order // k]
        g = gates.reshape(-1)[order].contiguous()
        ends = torch.bincount(idx.reshape(-1), minlength=E).cumsum(0).tolist()
        segs = [(a, b, e) for e, (a, b) in enumerate(zip([0] + ends, ends)) if b > a]
        H = x.new_empty(N * k, I2)
        u = x.new_empty(N * k, I)
        Y = x.new_empty(N * k, h)
        for a, b, e in segs:
            torch.mm(xs[a:b], w13[e].t(), out=H[a:b])
        K.swiglu_fwd(p(H), p(g), p(u), i64(N * k), ci(I), f(lim))
        for a, b, e in segs:
            torch.mm(u[a:b], w2[e].t(), out=Y[a:b])
        inv = torch.empty_like(order)
        inv[order] = torch.arange(N * k)
        ctx.save_for_backward(xs, g, order, inv, H, u, w13, w2)
        ctx.a = (segs, lim, N, k)
        return Y[inv].view(N, k, h).sum(1)

    @staticmethod
    def backward(ctx, dy):
        xs, g, order, inv, H, u, w13, w2 = ctx.saved_tensors
        segs, lim, N, k = ctx.a
        h = dy.shape[-1]
        I = u.shape[1]
        dY = dy[order // k]
        du = torch.empty_like(u)
        dw13, dw2 = torch.zeros_like(w13), torch.zeros_like(w2)
        dH = torch.empty_like(H)
        dg = torch.empty_like(g)
        for a, b, e in segs:
            torch.mm(dY[a:b], w2[e], out=du[a:b])
            torch.mm(dY[a:b].t(), u[a:b], out=dw2[e])
        K.swiglu_bwd(p(H), p(g), p(du), p(dH), p(dg), i64(N * k), ci(I), f(lim))
        dxs = torch.empty_like(xs)
        for a, b, e in segs:
            torch.mm(dH[a:b], w13[e], out=dxs[a:b])
            torch.mm(dH[a:b].t(), xs[a:b], out=dw13[e])
        return dxs[inv].view(N, k, h).sum(1), dg[inv].view(N, k), None, dw13, dw2, None


def experts(x, gates, idx, w13, w2, lim):
    if fast(x):
        return _Experts.apply(x, gates, idx, w13, w2, lim)
    E = w13.shape[0]
    comb = x.new_zeros(x.shape[0], E).scatter(1, idx, gates)  # dense over experts
    a, b = torch.einsum("nh,eih->eni", x, w13).chunk(2, -1)
    return torch.einsum("eni,ehi->nh", F.silu(a.clamp_max(lim)) * b.clamp(-lim, lim) * comb.t()[..., None], w2)


# ---- attention: sliding window + compressed entries, one softmax with a sink ---------------------------------------------
class _Attn(torch.autograd.Function):
    """Q [B,T,H,D], KV [B,T,D], CK [B,W,D] or None, sel [B,T,W] uint8 or None, tgt [B,T,W] or None (accumulated in place)"""

    @staticmethod
    def forward(ctx, Q, KV, CK, sink, sel, tgt, win, ratio, sup, floor):
        B, T, H, D = Q.shape
        O = torch.empty_like(Q)
        scale = D**-0.5
        saved = []
        bs = 64
        W = CK.shape[1] if CK is not None else 0
        for b in range(B):
            for t0 in range(0, T, bs):
                t1 = min(t0 + bs, T)
                lo = max(0, t0 - win + 1)
                nc = min(W, t1 // ratio) if ratio else 0
                nl = t1 - lo
                k = torch.cat([KV[b, lo:t1], CK[b, :nc]]) if nc else KV[b, lo:t1]
                P = Q[b, t0:t1].view(-1, D) @ k.t()
                K.attn_soft(
                    p(P),
                    f(scale),
                    p(sink),
                    p(sel[b, t0] if sel is not None and nc else None),
                    p(tgt[b, t0] if tgt is not None and nc else None),
                    i64(W),
                    ci(t1 - t0),
                    ci(H),
                    ci(nl),
                    ci(nc),
                    ci(t0),
                    ci(lo),
                    ci(win),
                    ci(ratio),
                    ci(0 if floor is None else int(floor[b])),
                )
                torch.mm(P, k, out=O[b, t0:t1].view(-1, D))
                saved.append((P, k, b, t0, t1, lo, nl, nc))
        ctx.saved = saved
        ctx.Q = Q
        ctx.s = (scale, KV.shape, None if CK is None else CK.shape, sink, win, ratio, sup)
        return O

    @staticmethod
    def backward(ctx, dO):
        scale, kvs, cks, sink, win, ratio, sup = ctx.s
        Q = ctx.Q
        B, T, H, D = Q.shape
        dO = dO.contiguous()
        dQ = torch.empty_like(Q)
        dKV = Q.new_zeros(kvs)
        dCK = Q.new_zeros(cks) if cks is not None else None
        ds = torch.zeros_like(sink)
        for P, k, b, t0, t1, lo, nl, nc in ctx.saved:
            do = dO[b, t0:t1].view(-1, D)
            q = Q[b, t0:t1].view(-1, D)
            dL = do @ k.t()
            K.attn_soft_bwd(p(P), p(dL), f(scale), p(ds), ci(t1 - t0), ci(H), ci(nl + nc))
            if sup:
                K.attn_sup(
                    p(P),
                    p(dL),
                    p(ds),
                    p(sup[0][b, t0]),
                    f(sup[1]),
                    f(scale),
                    ci(sup[2]),
                    ci(t1 - t0),
                    ci(H),
                    ci(nl),
                    ci(nc),
                    ci(t0),
                    ci(lo),
                    ci(win),
                    ci(ratio),
                )
            torch.mm(dL, k, out=dQ[b, t0:t1].view(-1, D))
            dk = dL.t() @ q
            dk.addmm_(P.t(), do)
            dKV[b, lo:t1] += dk[:nl]
            if nc:
                dCK[b, :nc] += dk[nl:]
        ctx.saved = None
        return dQ, dKV, dCK, ds, None, None, None, None, None, None


class _Extra(torch.autograd.Function):
    """identity on O that also sends gradient 1 to a scalar loss"""

    @staticmethod
    def forward(ctx, O, loss):
        return O.view_as(O)

    @staticmethod
    def backward(ctx, g):
        return g, g.new_ones(())


def attention(Q, KV, CK, sink, sel, tgt, win, ratio, sup=None, floor=None):
    """sup = (src [B,T] int64, weight, heads): adds -weight*log(attention on token src) of the first heads to the training loss (gradient only)"""
    if fast(Q):
        return _Attn.apply(Q.contiguous(), KV.contiguous(), None if CK is None else CK.contiguous(), sink, sel, tgt, win, ratio, sup, floor)
    B, T, H, D = Q.shape
    i = torch.arange(T, device=Q.device)
    vis = ((i[None] <= i[:, None]) & (i[None] > i[:, None] - win)).expand(B, T, T)
    keys = KV
    cv = None
    if floor is not None:
        fl = floor[:, None, None]
        vis = vis & ((i[None, None] >= fl) | (i[None, :, None] < fl))
    if CK is not None:
        cv = (torch.arange(CK.shape[1], device=Q.device)[None] < ((i + 1) // ratio)[:, None]).expand(B, T, -1)
        vis = torch.cat([vis, cv if sel is None else cv & sel.bool()], -1)
        keys = torch.cat([KV, CK], 1)
    Lg = torch.einsum("bthd,bkd->bhtk", Q, keys) * D**-0.5
    s = sink[None, :, None, None].expand(B, H, T, 1)
    if tgt is not None:
        with torch.no_grad():
            tgt += torch.cat([Lg.masked_fill(~torch.cat([vis[..., :T], cv], -1)[:, None], -math.inf), s], -1).softmax(-1)[..., T:-1].sum(1)
    P = torch.cat([Lg.masked_fill(~vis[:, None], -math.inf), s], -1).softmax(-1)[..., :-1]
    O = torch.einsum("bhtk,bkd->bthd", P, keys)
    if sup:
        src, lam, hs = sup
        ph = P[:, :hs]
        z = ph[..., :T].gather(-1, src.clamp_min(0)[:, None, :, None].expand(-1, hs, -1, 1))[..., 0]
        ok = ((src >= 0) & (src <= i))[:, None].expand_as(z)
        if CK is not None:
            c = src.clamp_min(0) // ratio
            z = (
                z
                + ph[..., T:].gather(-1, c.clamp_max(CK.shape[1] - 1)[:, None, :, None].expand(-1, hs, -1, 1))[..., 0]
                * (c < (i + 1) // ratio)[:, None]
            )
        ok = ok & (z > 1e-20)
        O = _Extra.apply(O, -lam * torch.where(ok, z, 1.0).log().sum())
    return O


# ---- indexer scores, KL loss, top-k ---------------------------------------------------------------------------------------
class _Index(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, w, ratio):
        B, T, H, D = q.shape
        W = k.shape[1]
        S = q.new_empty(B, T, W)
        ctx.save_for_backward(q, k, w)
        ctx.ratio = ratio
        for b in range(B):
            for t0 in range(0, T, 64):
                t1 = min(t0 + 64, T)
                nc = min(W, t1 // ratio)
                X = q[b, t0:t1].view(-1, D) @ k[b, :nc].t()
                K.index_fwd(p(X), p(w[b, t0]), p(S[b, t0]), i64(W), ci(t1 - t0), ci(H), ci(nc), ci(t0), ci(ratio))
        return S

    @staticmethod
    def backward(ctx, dS):
        q, k, w = ctx.saved_tensors
        B, T, H, D = q.shape
        W = k.shape[1]
        dS = dS.contiguous()
        dq, dk, dw = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(w)
        for b in range(B):
            for t0 in range(0, T, 64):
                t1 = min(t0 + 64, T)
                nc = min(W, t1 // ctx.ratio)
                if not nc:
                    continue
                qb = q[b, t0:t1].view(-1, D)
                X = qb @ k[b, :nc].t()
                K.index_bwd(p(X), p(w[b, t0]), p(dS[b, t0]), i64(W), p(dw[b, t0]), ci(t1 - t0), ci(H), ci(nc))
                torch.mm(X, k[b, :nc], out=dq[b, t0:t1].view(-1, D))
                dk[b, :nc].addmm_(X.t(), qb)
        return dq, dk, dw, None


def index_scores(q, k, w, ratio):
    if fast(q):
        return _Index.apply(q.contiguous(), k.contiguous(), w.contiguous(), ratio)
    T, W = q.shape[1], k.shape[1]
    S = (torch.einsum("bthd,bcd->bhtc", q, k).relu() * w.transpose(1, 2)[..., None]).sum(1)
    vis = torch.arange(W, device=q.device)[None] < ((torch.arange(T, device=q.device) + 1) // ratio)[:, None]
    return S.masked_fill(~vis, -math.inf)


class _KL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, S, tgt, ratio):
        B, T, W = S.shape
        d = torch.empty_like(S)
        l = K.kl_rows(p(S), p(tgt), p(d), i64(B * T), i64(W), i64(T), ci(ratio))
        ctx.save_for_backward(d)
        ctx.n = B * T
        return S.new_tensor(l / (B * T))

    @staticmethod
    def backward(ctx, g):
        (d,) = ctx.saved_tensors
        return d * (g / ctx.n), None, None


def index_kl(S, tgt, ratio):
    """mean over queries of KL(normalised head-summed attention || softmax of the index scores), visible entries only"""
    if fast(S):
        return _KL.apply(S, tgt.contiguous(), ratio)
    q = tgt / tgt.sum(-1, keepdim=True).clamp_min(1e-9)
    vis = torch.isfinite(S)
    ok = (vis.sum(-1) >= 2) & (tgt.sum(-1) > 1e-9)
    ls = torch.where(ok[..., None], S, 0.0).log_softmax(-1).masked_fill(~vis, 0)
    return ((q * ((q + 1e-12).log() - ls)).masked_fill(~vis, 0).sum(-1) * ok).sum() / ok.numel()


@torch.no_grad()
def topk_mask(S, k):
    S = S.detach().contiguous()
    W = S.shape[-1]
    if fast(S):
        m = torch.empty(S.shape, dtype=torch.uint8)
        K.topk_mask(p(S), p(m), i64(S.numel() // max(W, 1)), i64(W), ci(k))
        return m
    o = S.topk(min(k, W), -1).indices
    m = torch.zeros(S.shape, dtype=torch.bool, device=S.device).scatter(-1, o, True)
    return (m & torch.isfinite(S)).to(torch.uint8)

// Single-thread CPU kernels for the element-wise parts of the model, called through ctypes: ops.py compiles and describes them.
#include <math.h>
#include <string.h>
#include <stdint.h>
#define L 8
#define MINF(a, b) ((a) < (b) ? (a) : (b))
#define MAXF(a, b) ((a) > (b) ? (a) : (b))
typedef int64_t i64;
typedef uint8_t u8;

// ---- Sinkhorn on 4x4, 8 tokens at a time ----------------------------------------------------------------------
static void sink_core(float x[16][L], float (*Y)[16][L], float (*S)[4][L], float P0[16][L], int iters, float eps) {
  for (int i = 0; i < 4; i++) for (int k = 0; k < L; k++) {
    float m = MAXF(MAXF(x[4*i][k], x[4*i+1][k]), MAXF(x[4*i+2][k], x[4*i+3][k])), s = 0;
    for (int o = 0; o < 4; o++) { x[4*i+o][k] = expf(x[4*i+o][k] - m); s += x[4*i+o][k]; }
    s = 1.f / s;
    for (int o = 0; o < 4; o++) x[4*i+o][k] *= s;
  }
  if (P0) memcpy(P0, x, sizeof(float) * 16 * L);
  for (int i = 0; i < 16; i++) for (int k = 0; k < L; k++) x[i][k] += eps;
  int steps = 2 * iters - 1;                     // col, (row, col) x (iters-1)
  for (int t = 0; t < steps; t++) {
    int col = !(t & 1), a = col ? 1 : 4, b = col ? 4 : 1;
    for (int g = 0; g < 4; g++) for (int k = 0; k < L; k++) {
      float s = x[g*a][k] + x[g*a+b][k] + x[g*a+2*b][k] + x[g*a+3*b][k] + eps;
      if (S) S[t][g][k] = s;
      s = 1.f / s;
      for (int j = 0; j < 4; j++) x[g*a+j*b][k] *= s;
    }
    if (Y) memcpy(Y[t], x, sizeof(float) * 16 * L);
  }
}
void sinkhorn_fwd(const float* l, float* C, i64 N, int iters, float eps) {
  for (i64 n = 0; n < N; n += L) {
    float x[16][L]; int m = N - n < L ? N - n : L;
    for (int k = 0; k < L; k++) for (int i = 0; i < 16; i++) x[i][k] = k < m ? l[(n+k)*16+i] : 0;
    sink_core(x, 0, 0, 0, iters, eps);
    for (int k = 0; k < m; k++) for (int i = 0; i < 16; i++) C[(n+k)*16+i] = x[i][k];
  }
}
void sinkhorn_bwd(const float* l, const float* dC, float* dl, i64 N, int iters, float eps) {
  static float Y[64][16][L], S[64][4][L];
  for (i64 n = 0; n < N; n += L) {
    float x[16][L], P[16][L], d[16][L]; int m = N - n < L ? N - n : L;
    for (int k = 0; k < L; k++) for (int i = 0; i < 16; i++) { x[i][k] = k < m ? l[(n+k)*16+i] : 0; d[i][k] = k < m ? dC[(n+k)*16+i] : 0; }
    sink_core(x, Y, S, P, iters, eps);
    for (int t = 2 * iters - 2; t >= 0; t--) {
      int col = !(t & 1), a = col ? 1 : 4, b = col ? 4 : 1;
      for (int g = 0; g < 4; g++) for (int k = 0; k < L; k++) {
        float s = 0;
        for (int j = 0; j < 4; j++) s += d[g*a+j*b][k] * Y[t][g*a+j*b][k];
        float r = 1.f / S[t][g][k];
        for (int j = 0; j < 4; j++) d[g*a+j*b][k] = (d[g*a+j*b][k] - s) * r;
      }
    }
    for (int i = 0; i < 4; i++) for (int k = 0; k < L; k++) {
      float s = 0;
      for (int o = 0; o < 4; o++) s += d[4*i+o][k] * P[4*i+o][k];
      for (int o = 0; o < 4; o++) d[4*i+o][k] = P[4*i+o][k] * (d[4*i+o][k] - s);
    }
    for (int k = 0; k < m; k++) for (int i = 0; i < 16; i++) dl[(n+k)*16+i] = d[i][k];
  }
}
// ---- mHC expand / collapse (n = 4 streams) ------------------------------------------------------------------------
void expand_fwd(const float* y, const float* R, const float* post, const float* C, float* out, i64 N, int h) {
  for (i64 n = 0; n < N; n++) {
    const float *yn = y + n*h, *r = R + n*4*h, *p = post + n*4, *c = C + n*16; float* o = out + n*4*h;
    for (int q = 0; q < 4; q++) {
      float a = c[q], b = c[4+q], e = c[8+q], f = c[12+q], w = p[q];
      for (int i = 0; i < h; i++) o[q*h+i] = w*yn[i] + a*r[i] + b*r[h+i] + e*r[2*h+i] + f*r[3*h+i];
    }
  }
}
void expand_bwd(const float* y, const float* R, const float* post, const float* C, const float* g, float* dy, float* dR, float* dpost, float* dC, i64 N, int h) {
  for (i64 n = 0; n < N; n++) {
    const float *yn = y + n*h, *r = R + n*4*h, *p = post + n*4, *c = C + n*16, *gn = g + n*4*h;
    float *dyn = dy + n*h, *dr = dR + n*4*h;
    for (int i = 0; i < h; i++) dyn[i] = p[0]*gn[i] + p[1]*gn[h+i] + p[2]*gn[2*h+i] + p[3]*gn[3*h+i];
    for (int q = 0; q < 4; q++) {
      const float* cq = c + 4*q; float s0=0,s1=0,s2=0,s3=0,sp=0;
      for (int i = 0; i < h; i++) {
        float a=gn[i], b=gn[h+i], d=gn[2*h+i], e=gn[3*h+i], x=r[q*h+i];
        dr[q*h+i] = cq[0]*a + cq[1]*b + cq[2]*d + cq[3]*e;
        s0 += a*x; s1 += b*x; s2 += d*x; s3 += e*x; sp += yn[i]*gn[q*h+i];
      }
      float* dc = dC + n*16 + 4*q; dc[0]=s0; dc[1]=s1; dc[2]=s2; dc[3]=s3; dpost[n*4+q] = sp;
    }
  }
}
// collapse + RMSNorm: c = sum_i pre_i R_i ; out = w * c * rsqrt(mean c^2 + eps)
void collapse_norm_fwd(const float* R, const float* pre, const float* w, float* c, float* rs, float* out, i64 N, int h, float eps) {
  for (i64 n = 0; n < N; n++) {
    const float *r = R + n*4*h, *p = pre + n*4; float *cn = c + n*h, s = 0;
    for (int i = 0; i < h; i++) { float v = p[0]*r[i] + p[1]*r[h+i] + p[2]*r[2*h+i] + p[3]*r[3*h+i]; cn[i] = v; s += v*v; }
    s = 1.f / sqrtf(s / h + eps); rs[n] = s;
    for (int i = 0; i < h; i++) out[n*h+i] = w[i] * (cn[i] * s);
  }
}
void collapse_norm_bwd(const float* R, const float* pre, const float* w, const float* c, const float* rs, const float* g, float* dR, float* dpre, float* dw, i64 N, int h) {
  float t[4096];
  for (i64 n = 0; n < N; n++) {
    const float *r = R + n*4*h, *p = pre + n*4, *cn = c + n*h, *gn = g + n*h; float s = rs[n], k = 0;
    for (int i = 0; i < h; i++) { float u = gn[i]*w[i]; dw[i] += gn[i]*cn[i]*s; k += u*cn[i]; }
    k *= s*s / h;
    for (int i = 0; i < h; i++) t[i] = s * (gn[i]*w[i] - k*cn[i]);
    float* dr = dR + n*4*h;
    for (int q = 0; q < 4; q++) { float a = 0, pq = p[q]; for (int i = 0; i < h; i++) { dr[q*h+i] = pq*t[i]; a += t[i]*r[q*h+i]; } dpre[n*4+q] = a; }
  }
}
void rms_fwd(const float* x, const float* w, float* rs, float* out, i64 N, int h, float eps) {
  for (i64 n = 0; n < N; n++) {
    float s = 0; const float* a = x + n*h;
    for (int i = 0; i < h; i++) s += a[i]*a[i];
    s = 1.f / sqrtf(s / h + eps); rs[n] = s;
    for (int i = 0; i < h; i++) out[n*h+i] = w[i] * (a[i]*s);
  }
}
void rms_bwd(const float* x, const float* w, const float* rs, const float* g, float* dx, float* dw, i64 N, int h) {
  for (i64 n = 0; n < N; n++) {
    const float *a = x + n*h, *gn = g + n*h; float s = rs[n], k = 0;
    for (int i = 0; i < h; i++) { dw[i] += gn[i]*a[i]*s; k += gn[i]*w[i]*a[i]; }
    k *= s*s / h;
    for (int i = 0; i < h; i++) dx[n*h+i] = s * (gn[i]*w[i] - k*a[i]);
  }
}
// rotate adjacent pairs of the last 2*nf channels; cs/sn [N/H rows, nf]; sgn = -1 inverts
void rope(const float* x, float* y, const float* cs, const float* sn, i64 N, int H, int D, int nf, float sgn) {
  int d0 = D - 2*nf;
  for (i64 n = 0; n < N; n++) for (int h = 0; h < H; h++) {
    const float* a = x + (n*H+h)*D; float* b = y + (n*H+h)*D;
    memcpy(b, a, sizeof(float)*d0);
    for (int j = 0; j < nf; j++) {
      float c = cs[n*nf+j], s = sgn*sn[n*nf+j], u = a[d0+2*j], v = a[d0+2*j+1];
      b[d0+2*j] = u*c - v*s; b[d0+2*j+1] = u*s + v*c;
    }
  }
}
// u = silu(min(a,lim)) * clamp(b,+-lim) * g      H = [N, 2I] = [a | b]
void swiglu_fwd(const float* H, const float* g, float* u, i64 N, int I, float lim) {
  for (i64 n = 0; n < N; n++) {
    const float *a = H + n*2*I, *b = a + I; float w = g ? g[n] : 1.f;
    for (int i = 0; i < I; i++) { float x = MINF(a[i], lim), z = MAXF(MINF(b[i], lim), -lim); u[n*I+i] = w * z * x / (1.f + expf(-x)); }
  }
}
void swiglu_bwd(const float* H, const float* g, const float* du, float* dH, float* dg, i64 N, int I, float lim) {
  for (i64 n = 0; n < N; n++) {
    const float *a = H + n*2*I, *b = a + I; float *da = dH + n*2*I, *db = da + I; float w = g ? g[n] : 1.f, acc = 0;
    for (int i = 0; i < I; i++) {
      float x = MINF(a[i], lim), z = MAXF(MINF(b[i], lim), -lim), s = 1.f / (1.f + expf(-x)), f = x*s, d = du[n*I+i];
      acc += d*z*f;
      da[i] = a[i] <= lim ? d*w*z*(s + f*(1.f - s)) : 0.f;
      db[i] = (b[i] <= lim && b[i] >= -lim) ? d*w*f : 0.f;
    }
    if (dg) dg[n] = acc;
  }
}
// ---- attention block: rows = nq*H (head fastest), columns = [nl local keys | nc compressed] ------------------------
// local key j (absolute lo+j) visible to query t0+i when t0+i-W < lo+j <= t0+i; compressed c visible when c < (t0+i+1)/ratio
// and on the same side of `floor` as its query; sel (may be 0): [nq, stride] selection; tgt (may be 0): [nq, stride] receives sum over heads of the unpruned probabilities
void attn_soft(float* X, float scale, const float* sink, const u8* sel, float* tgt, i64 stride, int nq, int H, int nl, int nc, int t0, int lo, int W, int ratio, int floor) {
  int K = nl + nc;
  for (int i = 0; i < nq; i++) {
    int t = t0 + i, a = t - W + 1 - lo, b = t - lo + 1, v = ratio ? (t + 1) / ratio : 0;
    if (t >= floor && a < floor - lo) a = floor - lo;
    if (a < 0) a = 0; if (v > nc) v = nc;
    const u8* se = sel ? sel + i*stride : 0; float* tg = tgt ? tgt + i*stride : 0;
    for (int h = 0; h < H; h++) {
      float *x = X + (i64)(i*H+h)*K, *y = x + nl, m = sink[h], s = 0, sc = 0, sa = 0;
      for (int j = a; j < b; j++) m = MAXF(m, x[j]*scale);
      for (int j = 0; j < v; j++) m = MAXF(m, y[j]*scale);
      for (int j = 0; j < a; j++) x[j] = 0;
      for (int j = a; j < b; j++) { float e = expf(x[j]*scale - m); x[j] = e; s += e; }
      for (int j = b; j < nl; j++) x[j] = 0;
      s += expf(sink[h] - m);
      if (tg) {
        for (int j = 0; j < v; j++) { float e = expf(y[j]*scale - m); y[j] = e; sa += e; }
        float r = 1.f / (s + sa);
        for (int j = 0; j < v; j++) tg[j] += y[j]*r;
        if (se) for (int j = 0; j < v; j++) { float e = se[j] ? y[j] : 0.f; y[j] = e; sc += e; } else sc = sa;
      } else if (se) for (int j = 0; j < v; j++) { float e = se[j] ? expf(y[j]*scale - m) : 0.f; y[j] = e; sc += e; }
      else for (int j = 0; j < v; j++) { float e = expf(y[j]*scale - m); y[j] = e; sc += e; }
      for (int j = v; j < nc; j++) y[j] = 0;
      s = 1.f / (s + sc);
      for (int j = 0; j < K; j++) x[j] *= s;
    }
  }
}
void attn_soft_bwd(const float* P, float* dP, float scale, float* dsink, int nq, int H, int K) {
  for (int r = 0; r < nq*H; r++) {
    const float* p = P + (i64)r*K; float *d = dP + (i64)r*K, s = 0, t = 0;
    for (int j = 0; j < K; j++) { s += p[j]*d[j]; t += p[j]; }
    for (int j = 0; j < K; j++) d[j] = scale * p[j] * (d[j] - s);
    dsink[r % H] -= (1.f - t) * s;
  }
}
// attention supervision: loss -lam*log(p(target)) for the first `heads` heads; target = token src[i] (local and/or compressed)
void attn_sup(const float* P, float* dL, float* dsink, const i64* src, float lam, float scale, int heads, int nq, int H, int nl, int nc, int t0, int lo, int W, int ratio) {
  int K = nl + nc;
  for (int i = 0; i < nq; i++) {
    i64 s = src[i]; int t = t0 + i; if (s < 0 || s > t) continue;
    int a = s > t - W ? (int)s - lo : -1, c = ratio && (int)(s / ratio) < (t + 1) / ratio && (int)(s / ratio) < nc ? nl + (int)(s / ratio) : -1;
    for (int h = 0; h < heads; h++) {
      const float* p = P + (i64)(i*H+h)*K; float *d = dL + (i64)(i*H+h)*K, z = 0, tot = 0;
      if (a >= 0) z += p[a];
      if (c >= 0) z += p[c];
      if (z < 1e-20f) continue;
      for (int j = 0; j < K; j++) { d[j] += lam*scale*p[j]; tot += p[j]; }
      if (a >= 0) d[a] -= lam*scale*p[a]/z;
      if (c >= 0) d[c] -= lam*scale*p[c]/z;
      dsink[h] += lam*(1.f - tot);
    }
  }
}
// ---- indexer: S[i][c] = sum_h w[i][h] relu(X[i*H+h][c]) --------------------------------------------------------------
void index_fwd(const float* X, const float* w, float* S, i64 stride, int nq, int H, int nc, int t0, int ratio) {
  for (int i = 0; i < nq; i++) {
    int v = (t0 + i + 1) / ratio; if (v > nc) v = nc; float* s = S + i*stride;
    for (int c = 0; c < nc; c++) s[c] = 0;
    for (int h = 0; h < H; h++) { const float* x = X + (i64)(i*H+h)*nc; float a = w[i*H+h]; for (int c = 0; c < v; c++) s[c] += a * MAXF(x[c], 0.f); }
    for (int c = v; c < stride; c++) s[c] = -INFINITY;
  }
}
void index_bwd(float* X, const float* w, const float* dS, i64 stride, float* dw, int nq, int H, int nc) {
  for (int i = 0; i < nq; i++) for (int h = 0; h < H; h++) {
    float *x = X + (i64)(i*H+h)*nc, a = w[i*H+h], acc = 0; const float* d = dS + i*stride;
    for (int c = 0; c < nc; c++) { float on = x[c] > 0.f ? 1.f : 0.f; acc += on*d[c]*x[c]; x[c] = on*a*d[c]; }
    dw[i*H+h] = acc;
  }
}
// KL(p || softmax(S)) per row over the visible prefix; dS = (softmax(S) - p) * rowweight. Returns the summed loss.
double kl_rows(const float* S, const float* T, float* dS, i64 rows, i64 W, i64 Tlen, int ratio) {
  double tot = 0;
  for (i64 r = 0; r < rows; r++) {
    int v = (int)((r % Tlen + 1) / ratio); if (v > W) v = W; const float *s = S + r*W, *p = T + r*W; float* d = dS + r*W;
    float m = -INFINITY, z = 0, tz = 0, l = 0;
    for (int c = 0; c < v; c++) { m = MAXF(m, s[c]); tz += p[c]; }
    for (i64 c = 0; c < W; c++) d[c] = 0;
    if (v < 2 || tz < 1e-9f) continue;
    for (int c = 0; c < v; c++) { float e = expf(s[c] - m); d[c] = e; z += e; }
    float lz = logf(z), rz = 1.f / z, rt = 1.f / tz;
    for (int c = 0; c < v; c++) { float q = p[c]*rt; l += q * (logf(q + 1e-12f) - (s[c] - m - lz)); d[c] = d[c]*rz - q; }
    tot += l;
  }
  return tot;
}
// top-k selection per row over the visible prefix -> mask (ties: lowest index), k-th value found on order-preserving ints
void topk_mask(const float* S, u8* M, i64 rows, i64 W, int k) {
  static float buf[1 << 20];
  for (i64 r = 0; r < rows; r++) {
    const float* s = S + r*W; u8* m = M + r*W; i64 v = 0;
    for (i64 c = 0; c < W; c++) if (s[c] > -INFINITY) buf[v++] = s[c];
    if (v <= k) { for (i64 c = 0; c < W; c++) m[c] = s[c] > -INFINITY; continue; }
    i64 lo = 0, hi = v - 1, want = k - 1;                       // quickselect, descending
    while (lo < hi) {
      float p = buf[(lo + hi) >> 1]; i64 i = lo, j = hi;
      while (i <= j) { while (buf[i] > p) i++; while (buf[j] < p) j--; if (i <= j) { float t = buf[i]; buf[i] = buf[j]; buf[j] = t; i++; j--; } }
      if (want <= j) hi = j; else if (want >= i) lo = i; else break;
    }
    float kth = buf[want]; i64 n = 0;
    for (i64 c = 0; c < W; c++) { m[c] = s[c] > kth; n += m[c]; }
    for (i64 c = 0; c < W && n < k; c++) if (s[c] == kth) { m[c] = 1; n++; }
  }
}

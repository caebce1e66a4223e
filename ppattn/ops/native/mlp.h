// The MLP of a transformer block, alone or with the norm in front of it and the residual sum behind it.
#pragma once

#include "elementwise.h"
#include "linear.h"

namespace ppattn {

// mlp(x) = gelu(x w1 + b1) w2 + b2, x [rows, k], w1 [k, hidden], w2 [hidden, n]. With a norm (and k = n):
// x + keep * mlp(norm(x)), with one factor for every image of `tokens` rows unless `keep` is null.
struct Mlp {
  const float *w1, *b1, *w2, *b2;
  Index k, hidden, n;
  bool tanh_form;
  Norm norm = {nullptr, nullptr, 0.f};
  const float* keep = nullptr;
  Index tokens = 1;

  Index step(Index sums = 0) const { return chunk_rows(k + n + 2 * hidden, sums); }

  // Multiplies rows of `width` that belong to the rows r, r + 1, ... of x by the factors of their images.
  void scale(Index r, Index rows, Index width, float* y) const {
    for (Index i = 0; keep && i < rows; ++i)
      for (Index j = 0; j < width; ++j) y[i * width + j] *= keep[(r + i) / tokens];
  }
};

// x w1 + b1 is kept in `pre` unless null, the statistics of the norm in `stats`.
inline void mlp(const float* x, Mlp p, Index rows, float* stats, float* pre, float* y) {
  const Index step = p.step(), k = p.k, hidden = p.hidden, n = p.n;
  parallel(chunks_of(rows, step), [&](Index first, Index last) {
    Buffer activation(step * hidden), normed(step * k);
    for (Index r = first * step; r < std::min(rows, last * step); r += step) {
      const Index m = std::min(step, rows - r);
      const float* in = p.norm.w ? normed : x + r * k;
      float *before = pre ? pre + r * hidden : activation, *out = y + r * n;
      if (p.norm.w) p.norm.apply(x + r * k, m, k, normed, stats + 2 * r);
      gemm('N', 'N', m, hidden, k, 1.f, in, k, p.w1, hidden, 0.f, before, hidden);
      add_to_rows(p.b1, m, hidden, before);
      gelu_row(before, m * hidden, p.tanh_form, activation);
      gemm('N', 'N', m, n, hidden, 1.f, activation, hidden, p.w2, n, 0.f, out, n);
      add_to_rows(p.b2, m, n, out);
      p.scale(r, m, n, out);
      if (p.norm.w) add(x + r * k, m * k, out);
    }
  });
}

struct MlpGrads {  // any may be null
  float *x, *norm_w, *norm_b, *w1, *b1, *w2, *b2;
};

inline void mlp_grad(const float* x, Mlp p, const float* stats, const float* pre, const float* g, Index rows,
                     MlpGrads d) {
  const Index k = p.k, hidden = p.hidden, n = p.n, step = p.step((k + n) * hidden), chunks = chunks_of(rows, step);
  // Partial sums of a thread, one parameter after the other, and scratch.
  const Index b1 = k * hidden, w2 = b1 + hidden, b2 = w2 + hidden * n, norm = b2 + n, scratch = norm + 2 * k;
  const Index stride = scratch + std::max({hidden, n, 2 * k});
  const int threads = threads_for(chunks, stride);
  Buffer partial(threads * stride);
  parallel(chunks, threads, [&](Index first, Index last, int thread) {
    Buffer activation(step * hidden), slope(step * hidden), normed(step * k), dnormed(step * k), kept(step * n);
    float *sums = partial + thread * stride, *part = sums + scratch, beta = 0.f;
    fill_zero(sums + b1, hidden), fill_zero(sums + b2, n), fill_zero(sums + norm, 2 * k);
    for (Index r = first * step; r < std::min(rows, last * step); r += step, beta = 1.f) {
      const Index m = std::min(step, rows - r);
      const float *in = p.norm.w ? normed : x + r * k, *go = g + r * n;
      float* din = p.norm.w ? dnormed : d.x ? d.x + r * k : nullptr;
      if (p.norm.w) p.norm.again(x + r * k, m, k, normed, stats + 2 * r);
      if (p.keep) {
        copy(go, m * n, kept);
        p.scale(r, m, n, kept);
        go = kept;
      }
      gemm('N', 'T', m, hidden, n, 1.f, go, n, p.w2, n, 0.f, slope, hidden);
      gelu_grad_row(pre + r * hidden, slope, m * hidden, p.tanh_form, slope, activation);
      gemm('T', 'N', hidden, n, m, 1.f, activation, hidden, go, n, beta, sums + w2, n);
      add_column_sums(go, n, m, n, part, sums + b2);
      gemm('T', 'N', k, hidden, m, 1.f, in, k, slope, hidden, beta, sums, hidden);
      add_column_sums(slope, hidden, m, hidden, part, sums + b1);
      if (din) gemm('N', 'T', m, k, hidden, 1.f, slope, hidden, p.w1, hidden, 0.f, din, k);
      if (p.norm.w)
        p.norm.grad(x + r * k, stats + 2 * r, dnormed, m, k, g + r * k, d.x ? d.x + r * k : nullptr, part, sums + norm);
    }
  });
  reduce(partial, threads, stride, k * hidden, d.w1);
  reduce(partial + b1, threads, stride, hidden, d.b1);
  reduce(partial + w2, threads, stride, hidden * n, d.w2);
  reduce(partial + b2, threads, stride, n, d.b2);
  reduce(partial + norm, threads, stride, k, d.norm_w);
  reduce(partial + norm + k, threads, stride, k, d.norm_b);
}

}  // namespace ppattn

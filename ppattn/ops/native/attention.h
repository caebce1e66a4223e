// InLine and softmax attention on packed projections, one head of one image at a time, read where it lies.
#pragma once

#include "convolution.h"
#include "elementwise.h"
#include "matrix.h"

namespace ppattn {

struct Packed {  // qkv [B, N, 3, h, d]
  Index B, N, heads, d;
  Index width() const { return heads * d; }
  Index row() const { return 3 * heads * d; }
  Index at(Index item) const { return item / heads * N * row() + item % heads * d; }     // q of a head; k, v follow
  Index out(Index item) const { return item / heads * N * width() + item % heads * d; }  // its part of [B, N, h, d]
};

inline void set_rows(const float* row, Index rows, Index n, float* x, Index ld) {
  for (Index r = 0; r < rows; ++r) copy(row, n, x + r * ld);
}

// centred[rows, n] = x minus its column mean, which goes to `mean`; `part` is scratch of n floats.
inline void centre(const float* x, Index ld, Index rows, Index n, float* part, float* mean, float* centred) {
  column_mean(x, ld, rows, n, part, mean);
  for (Index r = 0; r < rows; ++r)
    for (Index i = 0; i < n; ++i) centred[r * n + i] = x[r * ld + i] - mean[i];
}

// InLine: out = q (scale Cov(k, v)) + mean(v) + correlation of the grid tokens of v with taps [B, C, 9] (may be null).
// The scaled covariances [B, h, d, d] are kept for the gradient. The first N - H * W tokens are not on the grid.
inline void inline_attention(const float* qkv, const float* taps, Packed p, Index H, Index W, float scale, float* state,
                             float* out) {
  const Index N = p.N, d = p.d, C = p.width(), ld = p.row(), prefix = N - H * W;
  const float share = scale / static_cast<float>(N);
  parallel(p.B * p.heads, [&](Index first, Index last) {
    Buffer centred(N * d), mean(d), part(d);
    for (Index item = first; item < last; ++item) {
      const float *q = qkv + p.at(item), *k = q + C, *v = k + C;
      float *cov = state + item * d * d, *y = out + p.out(item);
      centre(v, ld, N, d, part, mean, centred);
      set_rows(mean, N, d, y, C);
      gemm('T', 'N', d, d, N, share, k, ld, centred, d, 0.f, cov, d);
      gemm('N', 'N', N, d, d, 1.f, q, ld, cov, d, 1.f, y, C);
      if (!taps) continue;
      channel_blocks<3>(H, W, d, [&](auto conv, Index c) {
        conv.apply(v + prefix * ld + c, ld, taps + (item * d + c) * 9, false, y + prefix * C + c, C);
      });
    }
  });
}

inline void inline_attention_grad(const float* qkv, const float* taps, const float* state, const float* g, Packed p,
                                  Index H, Index W, float scale, float* dqkv, float* dtaps) {
  const Index N = p.N, d = p.d, C = p.width(), ld = p.row(), prefix = N - H * W;
  const float share = scale / static_cast<float>(N);
  parallel(p.B * p.heads, [&](Index first, Index last) {
    Buffer centred(N * d), mean(d), part(d), dcov(d * d);
    for (Index item = first; item < last; ++item) {
      const float *q = qkv + p.at(item), *k = q + C, *v = k + C, *cov = state + item * d * d, *go = g + p.out(item);
      float *dq = dqkv + p.at(item), *dk = dq + C, *dv = dk + C;
      gemm('N', 'T', N, d, d, 1.f, go, C, cov, d, 0.f, dq, ld);
      gemm('T', 'N', d, d, N, share, q, ld, go, C, 0.f, dcov, d);
      centre(v, ld, N, d, part, mean, centred);
      gemm('N', 'T', N, d, d, 1.f, centred, d, dcov, d, 0.f, dk, ld);
      // dv = (k - mean(k)) dcov + mean(g)
      centre(k, ld, N, d, part, mean, centred);
      column_mean(go, C, N, d, part, mean);
      set_rows(mean, N, d, dv, ld);
      gemm('N', 'N', N, d, d, 1.f, centred, d, dcov, d, 1.f, dv, ld);
      if (!taps) continue;
      fill_zero(dtaps + item * d * 9, d * 9);
      channel_blocks<3>(H, W, d, [&](auto conv, Index c) {
        const Index grid = prefix * ld + c, w = (item * d + c) * 9;
        conv.apply(go + prefix * C + c, C, taps + w, true, dv + grid, ld);
        conv.taps_grad(v + grid, ld, go + prefix * C + c, C, dtaps + w);
      });
    }
  });
}

inline float largest(const float* x, Index n) {  // sixteen running maxima, because a single one does not vectorise
  float top[16];
  for (int l = 0; l < 16; ++l) top[l] = x[0];
  Index i = 0;
  for (; i + 16 <= n; i += 16)
    for (int l = 0; l < 16; ++l) top[l] = x[i + l] > top[l] ? x[i + l] : top[l];
  for (; i < n; ++i) top[0] = x[i] > top[0] ? x[i] : top[0];
  for (int l = 1; l < 16; ++l) top[0] = top[l] > top[0] ? top[l] : top[0];
  return top[0];
}

// Attention of q [B, N, h, d], rows `ldq` floats apart, to k and v [B, M, h, d], rows `ldk` apart. Its weights are the
// softmax of scale q k^T plus optional logits: bias [h, N, M], and mask [G, N, M] for the G windows of an image (B
// counts windows); or, where `gaussian`, exp(-scale |q - k|^2 / 2), which is the exponential of scale q k^T less an
// offset for every query and one for every key.
struct Softmax {
  Index B, N, M, heads, d, ldq, ldk, G;
  float scale;
  bool gaussian;
  const float *bias, *mask;

  Index items() const { return B * heads; }
  Index q(Index item) const { return item / heads * N * ldq + item % heads * d; }
  Index k(Index item) const { return item / heads * M * ldk + item % heads * d; }
  Index out(Index item) const { return (item / heads * N * heads + item % heads) * d; }
  Index step() const { return std::min(N, std::max<Index>(16, 65536 / M)); }  // rows of scores at a time

  // Scores of m queries from number r on; those of a Gaussian kernel are complete but for the exponential.
  void logits(Index item, Index r, Index m, const float* query, const float* key, const float* half,
              float* scores) const {
    gemm('N', 'T', m, M, d, scale, query, ldq, key, ldk, 0.f, scores, M);
    if (bias) add(bias + (item % heads * N + r) * M, m * M, scores);
    if (mask) add(mask + (item / heads % G * N + r) * M, m * M, scores);
    for (Index i = 0; gaussian && i < m; ++i) {
      const float offset = half_square(query + i * ldq);
      for (Index j = 0; j < M; ++j) {
        const float score = scores[i * M + j] - offset - half[j];
        scores[i * M + j] = score > 0.f ? 0.f : score;
      }
    }
  }

  float half_square(const float* x) const {
    float sum = 0.f;
    for (Index i = 0; i < d; ++i) sum += x[i] * x[i];
    return 0.5f * scale * sum;
  }

  void half_squares(const float* key, float* half) const {
    for (Index j = 0; gaussian && j < M; ++j) half[j] = half_square(key + j * ldk);
  }
};

// `norm` [B, h, N] gets log sum exp of every row for the gradient, zero for a Gaussian kernel.
inline void softmax_attention(const float* q, const float* k, const float* v, Softmax a, float* norm, float* out) {
  const Index M = a.M, C = a.heads * a.d, step = a.step();
  parallel(a.items(), [&](Index first, Index last) {
    Buffer scores(step * M), half(M);
    for (Index item = first; item < last; ++item) {
      a.half_squares(k + a.k(item), half);
      for (Index r = 0; r < a.N; r += step) {
        const Index m = std::min(step, a.N - r);
        a.logits(item, r, m, q + a.q(item) + r * a.ldq, k + a.k(item), half, scores);
        for (Index i = 0; i < m; ++i) {
          float *row = scores + i * M, sum = 0.f;
          const float top = a.gaussian ? 0.f : largest(row, M);
          for (Index j = 0; j < M; ++j) {
            row[j] = exp_approx(row[j] - top);
            sum += row[j];
          }
          const float share = 1.f / sum;
          for (Index j = 0; !a.gaussian && j < M; ++j) row[j] *= share;
          norm[item * a.N + r + i] = a.gaussian ? 0.f : top + std::log(sum);
        }
        gemm('N', 'N', m, a.d, M, 1.f, scores, M, v + a.k(item), a.ldk, 0.f, out + a.out(item) + r * C, C);
      }
    }
  });
}

// Gradients in the layouts of q, k, v; dbias may be null.
inline void softmax_attention_grad(const float* q, const float* k, const float* v, const float* norm, const float* g,
                                   Softmax a, float* dq, float* dk, float* dv, float* dbias) {
  const Index M = a.M, d = a.d, C = a.heads * d, step = a.step(), part = dbias ? a.heads * a.N * M : 1;
  const int threads = threads_for(a.items(), part);
  Buffer partial(threads * part, true);
  parallel(a.items(), threads, [&](Index first, Index last, int thread) {
    Buffer scores(step * M), slopes(step * M), half(M), totals(M);
    for (Index item = first; item < last; ++item) {
      const Index kv = a.k(item);
      a.half_squares(k + kv, half);
      fill_zero(totals, M);
      for (Index r = 0; r < a.N; r += step) {
        const Index m = std::min(step, a.N - r), at = a.q(item) + r * a.ldq;
        const float again = r ? 1.f : 0.f, *go = g + a.out(item) + r * C;
        a.logits(item, r, m, q + at, k + kv, half, scores);
        gemm('N', 'T', m, M, d, 1.f, go, C, v + kv, a.ldk, 0.f, slopes, M);
        for (Index i = 0; i < m; ++i) {
          float *row = scores + i * M, *slope = slopes + i * M, along = 0.f;
          const float offset = norm[item * a.N + r + i];
          for (Index j = 0; j < M; ++j) {
            row[j] = exp_approx(row[j] - offset);
            along += row[j] * slope[j];
          }
          const float centre = a.gaussian ? 0.f : along;
          for (Index j = 0; j < M; ++j) slope[j] = row[j] * (slope[j] - centre);
          for (Index c = 0; c < d; ++c) dq[at + i * a.ldq + c] = a.gaussian ? -along * q[at + i * a.ldq + c] : 0.f;
          if (a.gaussian) add(slope, M, totals);
        }
        if (dbias) add(slopes, m * M, partial + thread * part + (item % a.heads * a.N + r) * M);
        gemm('T', 'N', M, d, m, 1.f, scores, M, go, C, again, dv + kv, a.ldk);
        gemm('N', 'N', m, d, M, a.scale, slopes, M, k + kv, a.ldk, a.scale, dq + at, a.ldq);
        gemm('T', 'N', M, d, m, a.scale, slopes, M, q + at, a.ldq, again, dk + kv, a.ldk);
      }
      for (Index j = 0; a.gaussian && j < M; ++j)
        for (Index c = 0; c < d; ++c) dk[kv + j * a.ldk + c] -= a.scale * totals[j] * k[kv + j * a.ldk + c];
    }
  });
  reduce(partial, threads, part, part, dbias);
}

}  // namespace ppattn

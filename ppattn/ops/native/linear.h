// Linear layers and LayerNorm on rows.
#pragma once

#include <cmath>

#include "matrix.h"

namespace ppattn {

// y[rows, n] = x[rows, k] w[k, n] + b.
inline void linear(const float* x, const float* w, const float* b, Index rows, Index k, Index n, float* y) {
  const Index step = chunk_rows(k + n);
  parallel(chunks_of(rows, step), [&](Index first, Index last) {
    for (Index r = first * step; r < std::min(rows, last * step); r += step) {
      const Index m = std::min(step, rows - r);
      gemm('N', 'N', m, n, k, 1.f, x + r * k, k, w, n, 0.f, y + r * n, n);
      if (b) add_to_rows(b, m, n, y + r * n);
    }
  });
}

// Gradients of x, w and b; each may be null.
inline void linear_grad(const float* x, const float* w, const float* g, Index rows, Index k, Index n, float* dx,
                        float* dw, float* db) {
  const Index step = chunk_rows(k + n, k * n), chunks = chunks_of(rows, step), part = k * n + 2 * n;
  const int threads = threads_for(chunks, part);
  Buffer partial(threads * part);
  parallel(chunks, threads, [&](Index first, Index last, int thread) {
    float *pw = partial + thread * part, *pb = pw + k * n, *scratch = pb + n;
    fill_zero(pb, n);
    for (Index r = first * step; r < std::min(rows, last * step); r += step) {
      const Index m = std::min(step, rows - r);
      const float beta = r > first * step ? 1.f : 0.f;
      if (dw) gemm('T', 'N', k, n, m, 1.f, x + r * k, k, g + r * n, n, beta, pw, n);
      if (db) add_column_sums(g + r * n, n, m, n, scratch, pb);
      if (dx) gemm('N', 'T', m, k, n, 1.f, g + r * n, n, w, n, 0.f, dx + r * k, k);
    }
  });
  reduce(partial, threads, part, k * n, dw);
  reduce(partial + k * n, threads, part, n, db);
}

struct Norm {  // (x - mean) / sqrt(variance + epsilon) * w + b over rows of n; stats of a row: mean, 1 / deviation
  const float *w, *b;
  float epsilon;

  void apply(const float* x, Index rows, Index n, float* y, float* stats) const {
    for (Index r = 0; r < rows; ++r, x += n) {
      float sum = 0.f, squares = 0.f;
      for (Index i = 0; i < n; ++i) sum += x[i];
      const float mean = sum / static_cast<float>(n);
      for (Index i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
      stats[2 * r] = mean, stats[2 * r + 1] = 1.f / std::sqrt(squares / static_cast<float>(n) + epsilon);
      again(x, 1, n, y + r * n, stats + 2 * r);
    }
  }

  void again(const float* x, Index rows, Index n, float* y, const float* stats) const {
    for (Index r = 0; r < rows; ++r)
      for (Index i = 0; i < n; ++i) y[r * n + i] = (x[r * n + i] - stats[2 * r]) * stats[2 * r + 1] * w[i] + b[i];
  }

  // dx = gradient (+ skip, unless null); sums[2 n] += gradients of w and b; `part` is scratch of 2 n floats. dx and g
  // may be the same.
  void grad(const float* x, const float* stats, const float* g, Index rows, Index n, const float* skip, float* dx,
            float* part, float* sums) const {
    for (Index first = 0; first < rows; first += 32) {
      fill_zero(part, 2 * n);
      for (Index r = first; r < std::min(rows, first + 32); ++r) {
        const float *in = x + r * n, *go = g + r * n, mean = stats[2 * r], inverse = stats[2 * r + 1];
        float along = 0.f, total = 0.f;
        for (Index i = 0; i < n; ++i) {
          const float normed = (in[i] - mean) * inverse, scaled = go[i] * w[i];
          along += scaled * normed;
          total += scaled;
          part[i] += go[i] * normed;
          part[n + i] += go[i];
        }
        if (!dx) continue;
        const float slope = along / static_cast<float>(n) * inverse, offset = total / static_cast<float>(n);
        float* out = dx + r * n;
#pragma omp simd
        for (Index i = 0; i < n; ++i) out[i] = inverse * (go[i] * w[i] - offset - (in[i] - mean) * slope);
        if (skip) add(skip + r * n, n, out);
      }
      add(part, 2 * n, sums);
    }
  }
};

inline void layer_norm(const float* x, Norm norm, Index rows, Index n, float* y, float* stats) {
  parallel(rows, threads_for((rows + 15) / 16), [&](Index first, Index last, int) {
    norm.apply(x + first * n, last - first, n, y + first * n, stats + 2 * first);
  });
}

// Gradients of x, w and b; each may be null.
inline void layer_norm_grad(const float* x, Norm norm, const float* stats, const float* g, Index rows, Index n,
                            float* dx, float* dw, float* db) {
  const int threads = threads_for((rows + 63) / 64);
  Buffer partial(threads * 4 * n, true);
  parallel(rows, threads, [&](Index first, Index last, int thread) {
    float *sums = partial + thread * 4 * n, *part = sums + 2 * n;
    norm.grad(x + first * n, stats + 2 * first, g + first * n, last - first, n, nullptr, dx ? dx + first * n : nullptr,
              part, sums);
  });
  reduce(partial, threads, 4 * n, n, dw);
  reduce(partial + n, threads, 4 * n, n, db);
}

}  // namespace ppattn

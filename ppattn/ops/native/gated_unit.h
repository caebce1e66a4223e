// A gated linear unit that takes one gradient step on keys and values before the queries see it (ViT^3).
#pragma once

#include "elementwise.h"
#include "matrix.h"

namespace ppattn {

struct Silu {
  float value, slope, bend;  // z sigmoid(z), its first and second derivative
};

inline Silu silu_at(float z) {
  const float s = 1.f / (1.f + exp_approx(-z)), t = s * (1.f - s);
  return {z * s, s + z * t, t * (2.f + z * (1.f - 2.f * s))};
}

// q, k, v [B, N, h, d] and weights [h, d, 2 d] = [W1, W2]; `rate` is s / N. With [a, z] = k W and e = -rate v, the step
// is G = k^T [e silu(z), e a silu'(z)], and the result a silu(z) of [a, z] = q (W - G / (|G| + 1)), norms of columns.
struct GatedUnit {
  Index B, N, heads, d;
  float rate, tiny;

  Index at(Index item) const { return (item / heads * N * heads + item % heads) * d; }

  // E [N, 2 d] from [a, z] [N, 2 d].
  void errors(const float* az, const float* v, Index ld, float* E) const {
    for (Index n = 0; n < N; ++n) {
      const float *row = az + n * 2 * d, *value = v + n * ld;
      float* out = E + n * 2 * d;
#pragma omp simd
      for (Index j = 0; j < d; ++j) {
        const Silu at = silu_at(row[d + j]);
        const float e = -rate * value[j];
        out[j] = e * at.value;
        out[d + j] = e * row[j] * at.slope;
      }
    }
  }

  void norms(const float* G, float* norm) const {
    for (Index c = 0; c < 2 * d; ++c) norm[c] = tiny * tiny;
    for (Index i = 0; i < d; ++i)
      for (Index c = 0; c < 2 * d; ++c) norm[c] += G[i * 2 * d + c] * G[i * 2 * d + c];
    for (Index c = 0; c < 2 * d; ++c) norm[c] = std::sqrt(norm[c]);
  }
};

// The step G [B, h, d, 2 d] is kept for the gradient.
inline void gated_unit(const float* q, const float* k, const float* v, const float* weights, const GatedUnit& u,
                       float* steps, float* y) {
  const Index N = u.N, d = u.d, ld = u.heads * d, size = 2 * d * d;
  parallel(u.B * u.heads, [&](Index first, Index last) {
    Buffer az(N * 2 * d), E(N * 2 * d), moved(size), norm(2 * d);
    for (Index item = first; item < last; ++item) {
      const Index at = u.at(item);
      const float* W = weights + item % u.heads * size;
      float* G = steps + item * size;
      gemm('N', 'N', N, 2 * d, d, 1.f, k + at, ld, W, 2 * d, 0.f, az, 2 * d);
      u.errors(az, v + at, ld, E);
      gemm('T', 'N', d, 2 * d, N, 1.f, k + at, ld, E, 2 * d, 0.f, G, 2 * d);
      u.norms(G, norm);
      for (Index i = 0; i < size; ++i) moved[i] = W[i] - G[i] / (norm[i % (2 * d)] + 1.f);
      gemm('N', 'N', N, 2 * d, d, 1.f, q + at, ld, moved, 2 * d, 0.f, az, 2 * d);
      for (Index n = 0; n < N; ++n)
#pragma omp simd
        for (Index j = 0; j < d; ++j) y[at + n * ld + j] = az[n * 2 * d + j] * silu_at(az[n * 2 * d + d + j]).value;
    }
  });
}

inline void gated_unit_grad(const float* q, const float* k, const float* v, const float* weights, const float* steps,
                            const float* g, const GatedUnit& u, float* dq, float* dk, float* dv, float* dweights) {
  const Index N = u.N, d = u.d, ld = u.heads * d, width = 2 * d, size = width * d;
  const int threads = threads_for(u.B * u.heads, u.heads * size);
  Buffer partial(threads * u.heads * size, true);
  parallel(u.B * u.heads, threads, [&](Index first, Index last, int thread) {
    Buffer az(N * width), E(N * width), dE(N * width), moved(size), dmoved(size), norm(width), along(width);
    for (Index item = first; item < last; ++item) {
      const Index at = u.at(item), head = item % u.heads;
      const float *W = weights + head * size, *G = steps + item * size;
      float* dW = partial + (thread * u.heads + head) * size;
      u.norms(G, norm);
      for (Index i = 0; i < size; ++i) moved[i] = W[i] - G[i] / (norm[i % width] + 1.f);
      gemm('N', 'N', N, width, d, 1.f, q + at, ld, moved, width, 0.f, az, width);
      for (Index n = 0; n < N; ++n) {  // gradients of [a, z] of the queries
        float* row = az + n * width;
        const float* up = g + at + n * ld;
#pragma omp simd
        for (Index j = 0; j < d; ++j) {
          const Silu s = silu_at(row[d + j]);
          row[d + j] = up[j] * row[j] * s.slope;
          row[j] = up[j] * s.value;
        }
      }
      gemm('N', 'T', N, d, width, 1.f, az, width, moved, width, 0.f, dq + at, ld);
      gemm('T', 'N', d, width, N, 1.f, q + at, ld, az, width, 0.f, dmoved, width);
      add(dmoved, size, dW);
      fill_zero(along, width);  // of the norms; the gradient of G is that of -G / (|G| + 1)
      for (Index i = 0; i < size; ++i) along[i % width] -= dmoved[i] * G[i];
      for (Index c = 0; c < width; ++c) along[c] /= norm[c] * (norm[c] + 1.f) * (norm[c] + 1.f);
      for (Index i = 0; i < size; ++i)
        dmoved[i] = -dmoved[i] / (norm[i % width] + 1.f) - G[i] * along[i % width];
      gemm('N', 'N', N, width, d, 1.f, k + at, ld, W, width, 0.f, az, width);
      u.errors(az, v + at, ld, E);
      gemm('N', 'N', N, width, d, 1.f, k + at, ld, dmoved, width, 0.f, dE, width);
      gemm('N', 'T', N, d, width, 1.f, E, width, dmoved, width, 0.f, dk + at, ld);
      for (Index n = 0; n < N; ++n) {  // `dE` becomes the gradient of [a, z] of the keys
        float *row = dE + n * width, *dvalue = dv + at + n * ld;
        const float *a = az + n * width, *value = v + at + n * ld;
#pragma omp simd
        for (Index j = 0; j < d; ++j) {
          const Silu s = silu_at(a[d + j]);
          const float first_slope = row[j], second_slope = row[d + j], e = -u.rate * value[j];
          dvalue[j] = -u.rate * (first_slope * s.value + second_slope * a[j] * s.slope);
          row[j] = second_slope * e * s.slope;
          row[d + j] = e * (first_slope * s.slope + second_slope * a[j] * s.bend);
        }
      }
      gemm('N', 'T', N, d, width, 1.f, dE, width, W, width, 1.f, dk + at, ld);
      gemm('T', 'N', d, width, N, 1.f, k + at, ld, dE, width, 1.f, dW, width);
    }
  });
  reduce(partial, threads, u.heads * size, u.heads * size, dweights);
}

}  // namespace ppattn

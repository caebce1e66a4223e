// Linear attention whose queries and keys are turned by their position, and whose normaliser is not.
#pragma once

#include "matrix.h"

namespace ppattn {

// q, k [B, N, h, r] and v [B, N, h, d]; cos and sin [N, T] (null: nothing is turned) are those of T neighbouring
// channels, where r divides T or T divides r. The result is q~ state / (den + epsilon) with state = k~^T v / N and
// den = q . mean(k); with a magnitude s and z = s den it is s (1 + 1 / (z + epsilon)) q~ state - z mean(v).
struct RotaryAttention {
  Index B, N, heads, r, d, T;
  const float *cos, *sin;
  float epsilon, magnitude;

  Index at(Index item, Index size) const { return (item / heads * N * heads + item % heads) * size; }

  // y [N, r] = x, whose rows are `ld` apart, turned by the angles of this head; `sign` -1 turns back.
  void turn(const float* x, Index ld, Index head, float sign, float* y, Index ldy) const {
    const Index length = std::min(r, T);
    for (Index n = 0; n < N; ++n)
      for (Index from = 0; from < r; from += length) {
        const Index angle = n * T + (head * r + from) % T;
        const float *in = x + n * ld + from, *c = cos + angle, *s = sin + angle;
        float* out = y + n * ldy + from;
        for (Index i = 0; i < length; i += 2) {
          const float first = in[i], second = in[i + 1];
          out[i] = first * c[i] + sign * second * s[i];
          out[i + 1] = second * c[i + 1] + sign * first * s[i + 1];
        }
      }
  }

  struct Rows {
    const float* data;
    Index ld;
  };

  // The features of an item as the products take them, turned into `scratch` [N, r] where there are angles.
  Rows turned(const float* x, Index item, float* scratch) const {
    if (!cos) return {x + at(item, r), heads * r};
    turn(x + at(item, r), heads * r, item % heads, 1.f, scratch, r);
    return {scratch, r};
  }
};

// States [B, h, r, d], means of k [B, h, r] and den [B, h, N] are kept for the gradient.
inline void rotary_attention(const float* q, const float* k, const float* v, const RotaryAttention& a, float* states,
                             float* means, float* dens, float* y) {
  const Index N = a.N, r = a.r, d = a.d, ldq = a.heads * r, ldv = a.heads * d;
  const float s = a.magnitude;
  parallel(a.B * a.heads, [&](Index first, Index last) {
    Buffer scratch(a.cos ? N * r : 1), part(std::max(r, d)), mean_v(d);
    for (Index item = first; item < last; ++item) {
      float *state = states + item * r * d, *mean = means + item * r, *den = dens + item * N, *out = y + a.at(item, d);
      const float *here = q + a.at(item, r), *values = v + a.at(item, d);
      column_mean(k + a.at(item, r), ldq, N, r, part, mean);
      const auto keys = a.turned(k, item, scratch);
      gemm('T', 'N', r, d, N, 1.f / static_cast<float>(N), keys.data, keys.ld, values, ldv, 0.f, state, d);
      const auto queries = a.turned(q, item, scratch);
      gemm('N', 'N', N, d, r, 1.f, queries.data, queries.ld, state, d, 0.f, out, ldv);
      if (s > 0.f) column_mean(values, ldv, N, d, part, mean_v);
      for (Index n = 0; n < N; ++n) {
        float below = 0.f, *row = out + n * ldv;
        for (Index i = 0; i < r; ++i) below += here[n * ldq + i] * mean[i];
        den[n] = below;
        if (s > 0.f) {
          const float z = s * below, beta = s + s / (z + a.epsilon);
          for (Index j = 0; j < d; ++j) row[j] = beta * row[j] - z * mean_v[j];
        } else {
          const float inverse = 1.f / (below + a.epsilon);
          for (Index j = 0; j < d; ++j) row[j] *= inverse;
        }
      }
    }
  });
}

inline void rotary_attention_grad(const float* q, const float* k, const float* v, const float* states,
                                  const float* means, const float* dens, const float* g, const RotaryAttention& a,
                                  float* dq, float* dk, float* dv) {
  const Index N = a.N, r = a.r, d = a.d, ldq = a.heads * r, ldv = a.heads * d;
  const float s = a.magnitude, share = 1.f / static_cast<float>(N);
  parallel(a.B * a.heads, [&](Index first, Index last) {
    Buffer scratch(a.cos ? N * r : 1), slope(a.cos ? N * r : 1), product(N * d), dden(N), dstate(r * d), dmean(r),
        mean_v(d), dmean_v(d), part(d);
    for (Index item = first; item < last; ++item) {
      const Index at_q = a.at(item, r), at_v = a.at(item, d), head = item % a.heads;
      const float *state = states + item * r * d, *mean = means + item * r, *den = dens + item * N;
      const float *here = q + at_q, *values = v + at_v;
      const auto queries = a.turned(q, item, scratch);
      gemm('N', 'N', N, d, r, 1.f, queries.data, queries.ld, state, d, 0.f, product, d);
      if (s > 0.f) column_mean(values, ldv, N, d, part, mean_v);
      fill_zero(dmean_v, d);
      fill_zero(dmean, r);
      for (Index n = 0; n < N; ++n) {  // `product` becomes its own gradient
        float *row = product + n * d, along = 0.f;
        const float* up = g + at_v + n * ldv;
        for (Index j = 0; j < d; ++j) along += up[j] * row[j];
        if (s > 0.f) {
          const float z = s * den[n], inverse = 1.f / (z + a.epsilon);
          float dz = -along * s * inverse * inverse;
          for (Index j = 0; j < d; ++j) dz -= up[j] * mean_v[j];
          for (Index j = 0; j < d; ++j) dmean_v[j] -= z * up[j];
          for (Index j = 0; j < d; ++j) row[j] = (s + s * inverse) * up[j];
          dden[n] = s * dz;
        } else {
          const float inverse = 1.f / (den[n] + a.epsilon);
          for (Index j = 0; j < d; ++j) row[j] = inverse * up[j];
          dden[n] = -along * inverse * inverse;
        }
        for (Index i = 0; i < r; ++i) dmean[i] += dden[n] * here[n * ldq + i];
      }
      gemm('T', 'N', r, d, N, share, queries.data, queries.ld, product, d, 0.f, dstate, d);
      gemm('N', 'T', N, r, d, 1.f, product, d, state, d, 0.f, a.cos ? slope : dq + at_q, a.cos ? r : ldq);
      if (a.cos) a.turn(slope, r, head, -1.f, dq + at_q, ldq);
      for (Index n = 0; n < N; ++n)
        for (Index i = 0; i < r; ++i) dq[at_q + n * ldq + i] += dden[n] * mean[i];
      const auto keys = a.turned(k, item, scratch);
      gemm('N', 'N', N, d, r, 1.f, keys.data, keys.ld, dstate, d, 0.f, dv + at_v, ldv);
      gemm('N', 'T', N, r, d, 1.f, values, ldv, dstate, d, 0.f, a.cos ? slope : dk + at_q, a.cos ? r : ldq);
      if (a.cos) a.turn(slope, r, head, -1.f, dk + at_q, ldq);
      for (Index n = 0; n < N; ++n)
        for (Index i = 0; i < r; ++i) dk[at_q + n * ldq + i] += share * dmean[i];
      for (Index n = 0; s > 0.f && n < N; ++n)
        for (Index j = 0; j < d; ++j) dv[at_v + n * ldv + j] += share * dmean_v[j];
    }
  });
}

}  // namespace ppattn

// Linear attention with a state per head, and the features of queries and keys that the mechanisms use with it.
#pragma once

#include <cmath>

#include "elementwise.h"
#include "matrix.h"

namespace ppattn {

// q, k [B, N, h, r] and v [B, N, h, d]; two streams where `polar`: the second half of v is weighted by q with its
// halves [q+, q-] exchanged.
struct LinearAttention {
  Index B, N, heads, r, d;
  bool polar;
  float epsilon;

  Index streams() const { return polar ? 2 : 1; }
  Index columns() const { return d + streams(); }  // of a state: its values, then the normaliser of every stream
  Index width() const { return d / streams(); }    // of a stream
  Index at(Index item, Index size) const { return (item / heads * N * heads + item % heads) * size; }
  // The row of k's sums that is row i of q's state in this stream.
  Index row(Index i, Index stream) const { return stream ? (i + r / 2) % r : i; }
};

// y = q (k^T v / N) / (q . mean(k) + epsilon) by head and stream. The states [B, h, r, columns] and the normalisers
// [B, h, N, streams] are kept for the gradient.
inline void linear_attention(const float* q, const float* k, const float* v, LinearAttention a, float* states,
                             float* normalisers, float* y) {
  const Index N = a.N, r = a.r, d = a.d, columns = a.columns(), ldq = a.heads * r, ldv = a.heads * d;
  parallel(a.B * a.heads, [&](Index first, Index last) {
    Buffer sums(r * d), mean(r), part(r), values(N * columns);
    for (Index item = first; item < last; ++item) {
      float *state = states + item * r * columns, *out = y + a.at(item, d), *den = normalisers + item * N * a.streams();
      gemm('T', 'N', r, d, N, 1.f / static_cast<float>(N), k + a.at(item, r), ldq, v + a.at(item, d), ldv, 0.f, sums,
           d);
      column_mean(k + a.at(item, r), ldq, N, r, part, mean);
      for (Index i = 0; i < r; ++i)
        for (Index s = 0; s < a.streams(); ++s) {
          const Index from = a.row(i, s), first_column = s * a.width();
          copy(sums + from * d + first_column, a.width(), state + i * columns + first_column);
          state[i * columns + d + s] = mean[from];
        }
      gemm('N', 'N', N, columns, r, 1.f, q + a.at(item, r), ldq, state, columns, 0.f, values, columns);
      for (Index n = 0; n < N; ++n)
        for (Index s = 0; s < a.streams(); ++s) {
          const float below = den[n * a.streams() + s] = values[n * columns + d + s] + a.epsilon;
          for (Index j = s * a.width(); j < (s + 1) * a.width(); ++j)
            out[n * ldv + j] = values[n * columns + j] / below;
        }
    }
  });
}

inline void linear_attention_grad(const float* q, const float* k, const float* v, const float* states,
                                  const float* normalisers, const float* y, const float* g, LinearAttention a,
                                  float* dq, float* dk, float* dv) {
  const Index N = a.N, r = a.r, d = a.d, columns = a.columns(), ldq = a.heads * r, ldv = a.heads * d;
  const float share = 1.f / static_cast<float>(N);
  parallel(a.B * a.heads, [&](Index first, Index last) {
    Buffer dvalues(N * columns), dstate(r * columns), dsums(r * d), dmean(r);
    for (Index item = first; item < last; ++item) {
      const Index at_q = a.at(item, r), at_v = a.at(item, d);
      const float *state = states + item * r * columns, *den = normalisers + item * N * a.streams();
      for (Index n = 0; n < N; ++n)
        for (Index s = 0; s < a.streams(); ++s) {
          const float inverse = 1.f / den[n * a.streams() + s];
          float along = 0.f;
          for (Index j = s * a.width(); j < (s + 1) * a.width(); ++j) {
            dvalues[n * columns + j] = g[at_v + n * ldv + j] * inverse;
            along += dvalues[n * columns + j] * y[at_v + n * ldv + j];
          }
          dvalues[n * columns + d + s] = -along;
        }
      gemm('N', 'T', N, r, columns, 1.f, dvalues, columns, state, columns, 0.f, dq + at_q, ldq);
      gemm('T', 'N', r, columns, N, share, q + at_q, ldq, dvalues, columns, 0.f, dstate, columns);
      fill_zero(dmean, r);
      for (Index i = 0; i < r; ++i)
        for (Index s = 0; s < a.streams(); ++s) {
          const Index to = a.row(i, s), first_column = s * a.width();
          copy(dstate + i * columns + first_column, a.width(), dsums + to * d + first_column);
          dmean[to] += dstate[i * columns + d + s];
        }
      for (Index n = 0; n < N; ++n) copy(dmean, r, dk + at_q + n * ldq);
      gemm('N', 'T', N, r, d, 1.f, v + at_v, ldv, dsums, d, 1.f, dk + at_q, ldq);
      gemm('N', 'N', N, d, r, 1.f, k + at_q, ldq, dsums, d, 0.f, dv + at_v, ldv);
    }
  });
}

inline float log_approx(float x) {  // of a positive normal number; relative error 1e-7
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  const int32_t above = bits - 0x3f3504f3;  // mantissa in [sqrt(1/2), sqrt(2))
  const float n = static_cast<float>(above >> 23);
  bits = (above & 0x007fffff) + 0x3f3504f3;
  float m;
  std::memcpy(&m, &bits, 4);
  const float t = m - 1.f, z = t * t;
  float p = 7.0376836292e-2f;
  p = p * t - 1.1514610310e-1f;
  p = p * t + 1.1676998740e-1f;
  p = p * t - 1.2420140846e-1f;
  p = p * t + 1.4249322787e-1f;
  p = p * t - 1.6668057665e-1f;
  p = p * t + 2.0000714765e-1f;
  p = p * t - 2.4999993993e-1f;
  p = p * t + 3.3333331174e-1f;
  p = p * t * z + n * -2.12194440e-4f - 0.5f * z;
  return t + p + n * 0.693359375f;
}

// What the features of queries and keys begin with: x [rows, C] plus shift [N, C] (null: none; row r has shift r % N),
// then a factor [C].
struct Shifted {
  Index rows, N, C;
  const float *x, *shift, *scale;

  const float* row(Index r, float* sum) const {
    if (!shift) return x + r * C;
    for (Index c = 0; c < C; ++c) sum[c] = x[r * C + c] + shift[r % N * C + c];
    return sum;
  }

  // Gradients of x, shift, and of up to two parameters [C] from body(r, x + shift of row r, dx of row r, sums [2 C]).
  template <class Body>
  void grads(float* dx, float* dshift, float* dscale, float* dpower, Body body) const {
    const int threads = threads_for(N);  // a thread takes the same tokens of all images
    Buffer partial(threads * 4 * C, true);
    if (dshift) fill_zero(dshift, N * C);
    parallel(N, threads, [&](Index first, Index last, int thread) {
      Buffer sum(C);
      float *sums = partial + thread * 4 * C, *part = sums + 2 * C;
      for (Index image = 0; image < rows; image += N) {
        fill_zero(part, 2 * C);
        for (Index n = first; n < last; ++n) {
          float* out = dx + (image + n) * C;
          body(image + n, row(image + n, sum), out, part);
          if (dshift) add(out, C, dshift + n * C);
        }
        add(part, 2 * C, sums);
      }
    });
    reduce(partial, threads, 4 * C, C, dscale);
    reduce(partial + C, threads, 4 * C, C, dpower);
  }
};

// With z = (x + shift) scale, for every head of d channels y [rows, h, 2, d] = relu(z)^power and relu(-z)^power,
// power [C], |z| at least `tiny`.
struct SignedPower {
  Shifted in;
  const float* power;
  Index d;
  float tiny;

  template <class Body>  // body(channel, its place in a row of y)
  void each(Body body) const {
    for (Index head = 0; head < in.C; head += d)
#pragma omp simd
      for (Index c = head; c < head + d; ++c) body(c, head + c);
  }

  void apply(float* y) const {
    parallel(in.rows, threads_for(in.rows / 16), [&](Index first, Index last, int) {
      Buffer sum(in.C);
      for (Index r = first; r < last; ++r) {
        const float* x = in.row(r, sum);
        float* out = y + r * 2 * in.C;
        each([&](Index c, Index at) {
          const float z = x[c] * in.scale[c], size = std::fabs(z);
          const float value = exp_approx(power[c] * log_approx(size > tiny ? size : tiny));
          out[at] = z > 0.f ? value : 0.f;
          out[at + d] = z > 0.f ? 0.f : z == z ? value : z;  // NaN stays NaN
        });
      }
    });
  }

  void grad(const float* y, const float* g, float* dx, float* dshift, float* dscale, float* dpower) const {
    in.grads(dx, dshift, dscale, dpower, [&](Index r, const float* x, float* out, float* sums) {
      const float *value = y + r * 2 * in.C, *slope = g + r * 2 * in.C;
      each([&](Index c, Index at) {
        const float z = x[c] * in.scale[c], size = std::fabs(z),
                    along = slope[at] * value[at] + slope[at + d] * value[at + d];
        const float dz = size > tiny ? along * power[c] / z : 0.f;
        out[c] = dz * in.scale[c];
        sums[c] += dz * x[c];
        sums[in.C + c] += along * log_approx(size > tiny ? size : tiny);
      });
    });
  }
};

// For every head of d channels with norm n: y [rows, h, 2, d] = (relu(x) / n)^p and (relu(-x) / n)^p, p = 3 (1/2 +
// tanh n); |x| / n and n count as at least `tiny`.
struct DirectionPower {
  Index rows, d;  // a row is one head of one token
  float tiny;

  void head(const float* x, float& norm, float& tanh) const {
    float squares = tiny * tiny;
#pragma omp simd reduction(+ : squares)
    for (Index c = 0; c < d; ++c) squares += x[c] * x[c];
    norm = std::sqrt(squares);
    tanh = std::tanh(norm);
  }

  void apply(const float* x, float* y) const {
    parallel(rows, threads_for(rows / 16), [&](Index first, Index last, int) {
      for (Index r = first; r < last; ++r) {
        const float* in = x + r * d;
        float *out = y + r * 2 * d, norm, tanh;
        head(in, norm, tanh);
        const float power = 3.f * (0.5f + tanh), inverse = 1.f / norm;
#pragma omp simd
        for (Index c = 0; c < d; ++c) {
          const float size = std::fabs(in[c]) * inverse;
          const float value = exp_approx(power * log_approx(size > tiny ? size : tiny));
          out[c] = in[c] > 0.f ? value : in[c] == in[c] ? 0.f : in[c];  // NaN stays NaN
          out[d + c] = in[c] < 0.f ? value : 0.f;
        }
      }
    });
  }

  void grad(const float* x, const float* y, const float* g, float* dx) const {
    parallel(rows, threads_for(rows / 16), [&](Index first, Index last, int) {
      for (Index r = first; r < last; ++r) {
        const float *in = x + r * d, *value = y + r * 2 * d, *slope = g + r * 2 * d;
        float *out = dx + r * d, norm, tanh, of_power = 0.f, of_norm = 0.f;
        head(in, norm, tanh);
        const float power = 3.f * (0.5f + tanh), inverse = 1.f / norm;
#pragma omp simd reduction(+ : of_power, of_norm)
        for (Index c = 0; c < d; ++c) {
          const float size = std::fabs(in[c]) * inverse, along = slope[c] * value[c] + slope[d + c] * value[d + c];
          const bool counts = size > tiny;
          of_power += along * log_approx(counts ? size : tiny);
          of_norm -= counts ? along : 0.f;
          out[c] = counts ? along * power / in[c] : 0.f;
        }
        const float factor = (3.f * (1.f - tanh * tanh) * of_power + power * inverse * of_norm) * inverse;
        for (Index c = 0; c < d; ++c) out[c] += factor * in[c];
      }
    });
  }
};

// With z = (relu(x + shift) + epsilon) scale: y [rows, C] = z^power with the norm of the row z.
struct FocusedPower {
  Shifted in;
  float power, epsilon;

  float raw(const float* x, Index c) const { return ((x[c] > 0.f ? x[c] : 0.f) + epsilon) * in.scale[c]; }

  // For z divided by its largest number (y is proportional to z, and powers of it would leave float32): z^power, and
  // sums of the squares of z and of z^power. Returns the largest number.
  float powers(const float* x, float* values, float& squares, float& high) const {
    float z2 = 0.f, w2 = 0.f, largest = 0.f;
#pragma omp simd reduction(max : largest)
    for (Index c = 0; c < in.C; ++c) largest = std::max(largest, raw(x, c));
#pragma omp simd reduction(+ : z2, w2)
    for (Index c = 0; c < in.C; ++c) {
      const float z = raw(x, c) / largest;
      const float w = power == 3.f ? z * z * z : exp_approx(power * log_approx(z));
      values[c] = w, z2 += z * z, w2 += w * w;
    }
    squares = z2, high = w2;
    return largest;
  }

  void apply(float* y) const {
    parallel(in.rows, threads_for(in.rows / 16), [&](Index first, Index last, int) {
      Buffer sum(in.C);
      for (Index r = first; r < last; ++r) {
        float *out = y + r * in.C, squares, high;
        const float largest = powers(in.row(r, sum), out, squares, high);
        const float factor = largest * std::sqrt(squares / high);
        for (Index c = 0; c < in.C; ++c) out[c] *= factor;
      }
    });
  }

  void grad(const float* g, float* dx, float* dshift, float* dscale) const {
    in.grads(dx, dshift, dscale, nullptr, [&](Index r, const float* x, float* out, float* sums) {
      float squares, high, along = 0.f;
      const float largest = powers(x, out, squares, high);
      const float *slope = g + r * in.C, factor = std::sqrt(squares / high);
      for (Index c = 0; c < in.C; ++c) along += slope[c] * out[c];
#pragma omp simd
      for (Index c = 0; c < in.C; ++c) {
        const float above = (x[c] > 0.f ? x[c] : 0.f) + epsilon, z = above * in.scale[c] / largest, w = out[c];
        const float dz = factor * ((slope[c] - w * along / high) * power * w / z + along / squares * z);
        out[c] = x[c] > 0.f ? dz * in.scale[c] : 0.f;
        sums[c] += dz * above;
      }
    });
  }
};

}  // namespace ppattn

// CPU kernels for float32 training: the operators that Paddle runs on one core or in many passes over memory.
//
// They are registered as Paddle operators with gradients at the end of the file. Matrix products go to the MKL that Paddle
// itself has loaded, and threads to its OpenMP runtime, so that no second thread pool competes for the cores. Work is
// cut by the number of threads only and partial sums are added in thread order: a fixed number of threads gives
// bit-identical results. Rows go through in chunks that stay in the L2 cache from one step to the next.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "paddle/phi/api/ext/op_meta_info.h"
#include "paddle/phi/api/ext/tensor_compat.h"

extern "C" {
int mkl_get_max_threads();
void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda,
                 const float* b, int ldb, float beta, float* c, int ldc);
}

namespace {

using Index = int64_t;

// c[m, n] = alpha * op(a) op(b) + beta * c, row-major; operands marked 'T' are stored transposed.
void gemm(char ta, char tb, Index m, Index n, Index k, float alpha, const float* a, Index lda, const float* b,
          Index ldb, float beta, float* c, Index ldc) {
  cblas_sgemm(101, ta == 'T' ? 112 : 111, tb == 'T' ? 112 : 111, (int)m, (int)n, (int)k, alpha, a, (int)lda, b,
              (int)ldb, beta, c, (int)ldc);
}

int threads_for(Index items) { return (int)std::max<Index>(1, std::min<Index>(items, mkl_get_max_threads())); }

// body(first, last, share) on `threads` contiguous shares of `items`, also where fewer threads are granted.
template <class Body>
void parallel(Index items, int threads, Body body) {
#pragma omp parallel num_threads(threads)
  {
    for (int t = omp_get_thread_num(); t < threads; t += omp_get_num_threads())
      body(items * t / threads, items * (t + 1) / threads, t);
  }
}

struct Buffer {  // scratch memory, uninitialised unless asked for, aligned to cache lines
  explicit Buffer(Index floats, bool zero = false)
      : data((float*)std::aligned_alloc(64, ((size_t)floats * 4 / 64 + 1) * 64), std::free) {
    if (zero) std::memset(data.get(), 0, (size_t)floats * 4);
  }
  operator float*() const { return data.get(); }
  std::unique_ptr<float, void (*)(void*)> data;
};

// Sum over threads, in thread order, of partial sums that lie `stride` floats apart.
void reduce(const float* partial, int threads, Index stride, Index n, float* out) {
  parallel(n, threads_for(n / 8192), [&](Index first, Index last, int) {
    std::memcpy(out + first, partial + first, (size_t)(last - first) * 4);
    for (int t = 1; t < threads; ++t)
      for (Index i = first; i < last; ++i) out[i] += partial[t * stride + i];
  });
}

// Threads for work with partial sums of `floats` per thread, which may take 256 MB in all.
int threads_for(Index items, Index floats) {
  return (int)std::min<Index>(threads_for(items), std::max<Index>(1, (64 << 20) / floats));
}

void add_row(float* x, const float* row, Index rows, Index n) {
  for (Index r = 0; r < rows; ++r)
    for (Index i = 0; i < n; ++i) x[r * n + i] += row[i];
}

// sum[n] += column sums of x, whose rows are `ld` floats apart; `part` is scratch of n floats: summing in two levels
// keeps the rounding error small.
void add_column_sums(const float* x, Index ld, Index rows, Index n, float* part, float* sum) {
  for (Index first = 0; first < rows; first += 32) {
    std::memset(part, 0, (size_t)n * 4);
    for (Index r = first; r < std::min(rows, first + 32); ++r)
      for (Index i = 0; i < n; ++i) part[i] += x[r * ld + i];
    for (Index i = 0; i < n; ++i) sum[i] += part[i];
  }
}

inline float exp_approx(float x) {  // relative error 1e-7; zero below -87, clamped above 88; NaN stays NaN
  const bool vanishes = x < -87.f;
  x = vanishes ? -87.f : x;
  x = x > 88.f ? 88.f : x;
  const float n = __builtin_rintf(x * 1.44269504f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.f;
  const int32_t bits = ((int32_t)n + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return vanishes ? 0.f : p * power;
}

struct Normal {
  float bell;   // exp(-x^2 / 2)
  float below;  // probability of a standard normal variable below x
};

// One exponential for both. erfc(z) exp(z^2) is taken as a polynomial in 1 / (1 + 0.42 z), whose relative error is 4e-8.
inline Normal normal(float x) {
  const float a = std::fabs(x);
  const float t = 1.f / (1.f + 0.296984848f * a);
  const float bell = exp_approx(-0.5f * a * a);
  float p = 0.0378925478545f;
  p = p * t - 0.1720508636135f;
  p = p * t + 0.2416199726095f;
  p = p * t - 0.0856913844710f;
  p = p * t + 0.1457297307315f;
  p = p * t + 0.0937122742785f;
  p = p * t + 0.1204199620060f;
  p = p * t + 0.1183677598555f;
  const float tail = bell * (p * t);
  return {bell, x > 0.f ? 1.f - tail : tail};
}

constexpr float kTanh0 = 0.7978845608f, kTanh1 = 0.044715f;

// exp(-2 u), where gelu(x) = x / (1 + exp(-2 u)); bounded, so that its products do not overflow in any order.
inline float tanh_exponential(float x) {
  const float twice = -2.f * kTanh0 * x * (1.f + kTanh1 * x * x);
  return exp_approx(twice > 60.f ? 60.f : twice);
}

inline float gelu_value(float x, bool tanh_form) {
  return tanh_form ? x / (1.f + tanh_exponential(x)) : x * normal(x).below;
}

struct Gelu {
  float value, slope;
};

inline Gelu gelu_both(float x, bool tanh_form) {
  if (!tanh_form) {
    const Normal n = normal(x);
    return {x * n.below, n.below + x * n.bell * 0.3989422804f};
  }
  const float e = tanh_exponential(x), s = 1.f / (1.f + e);
  return {x * s, s + x * (e * s) * s * (2.f * kTanh0) * (1.f + 3.f * kTanh1 * x * x)};
}

void gelu_row(const float* x, Index n, bool tanh_form, float* y) {
  if (tanh_form)
    for (Index i = 0; i < n; ++i) y[i] = gelu_value(x[i], true);
  else
    for (Index i = 0; i < n; ++i) y[i] = gelu_value(x[i], false);
}

// dx = g * slope; the value of the function goes to y unless null. g and dx may be the same.
void gelu_grad_row(const float* x, const float* g, Index n, bool tanh_form, float* dx, float* y) {
  const auto run = [&](auto tanh, auto keep) {
#pragma omp simd
    for (Index i = 0; i < n; ++i) {
      const Gelu at = gelu_both(x[i], tanh);
      dx[i] = g[i] * at.slope;
      if (keep) y[i] = at.value;
    }
  };
  if (tanh_form)
    y ? run(std::true_type(), std::true_type()) : run(std::true_type(), std::false_type());
  else
    y ? run(std::false_type(), std::true_type()) : run(std::false_type(), std::false_type());
}

// Depthwise 3x3 on one sample, `L` neighbouring channels at a time. Token (i, j) of the H x W grid starts at
// x + (i * W + j) * ld; taps are [L][9] with stride 9. Every sum runs over the taps that hit the grid.
template <int L>
struct Conv {
  Index H, W;

  template <class Visit>  // visit(i, j, tap, offset of the neighbour in tokens)
  void neighbours(Index i, Index j, Visit visit) const {
    for (int di = -1; di <= 1; ++di) {
      if (i + di < 0 || i + di >= H) continue;
      for (int dj = -1; dj <= 1; ++dj)
        if (j + dj >= 0 && j + dj < W) visit((di + 1) * 3 + dj + 1, (i + di) * W + j + dj);
    }
  }

  void load(const float* taps, float (&w)[9][L], bool flip) const {
    for (int t = 0; t < 9; ++t)
      for (int l = 0; l < L; ++l) w[t][l] = taps[l * 9 + (flip ? 8 - t : t)];
  }

  // y += correlation of x with the taps (with flipped taps: the gradient of x).
  void apply(const float* x, Index ldx, const float* taps, bool flip, float* y, Index ldy) const {
    float w[9][L];
    load(taps, w, flip);
    for (Index i = 0; i < H; ++i)
      for (Index j = 0; j < W; ++j) {
        float sum[L];
        float* out = y + (i * W + j) * ldy;
        for (int l = 0; l < L; ++l) sum[l] = out[l];
        neighbours(i, j, [&](int t, Index at) {
          for (int l = 0; l < L; ++l) sum[l] += w[t][l] * x[at * ldx + l];
        });
        for (int l = 0; l < L; ++l) out[l] = sum[l];
      }
  }

  // dtaps[L][9] = sum over the grid of g times the neighbours of x.
  void taps_grad(const float* x, Index ldx, const float* g, Index ldg, float* dtaps) const {
    float w[9][L] = {};
    for (Index i = 0; i < H; ++i)
      for (Index j = 0; j < W; ++j) {
        const float* here = g + (i * W + j) * ldg;
        neighbours(i, j, [&](int t, Index at) {
          for (int l = 0; l < L; ++l) w[t][l] += here[l] * x[at * ldx + l];
        });
      }
    for (int t = 0; t < 9; ++t)
      for (int l = 0; l < L; ++l) dtaps[l * 9 + t] = w[t][l];
  }
};

template <class Body>  // body(convolution over L channels, first channel)
void channel_blocks(Index H, Index W, Index channels, Body body) {
  Index c = 0;
  for (; c + 16 <= channels; c += 16) body(Conv<16>{H, W}, c);
  for (; c < channels; ++c) body(Conv<1>{H, W}, c);
}

// Rows per chunk: about half a megabyte of `width` floats per row; whole images of `tokens` rows where that is not 0.
Index chunk_rows(Index width, Index tokens = 0) {
  const Index rows = std::min<Index>(512, std::max<Index>(64, 131072 / width / 32 * 32));
  return tokens ? std::max<Index>(1, rows / tokens) * tokens : rows;
}

// out[n] = mean over `rows` rows that are `ld` floats apart; `part` is scratch of n floats.
void column_mean(const float* x, Index ld, Index rows, Index n, float* part, float* mean) {
  std::memset(mean, 0, (size_t)n * 4);
  add_column_sums(x, ld, rows, n, part, mean);
  for (Index i = 0; i < n; ++i) mean[i] /= rows;
}

// y[rows, n] = x[rows, k] w[k, n] + b; with `mean`, also the mean of x over every image of `tokens` rows.
void linear(const float* x, const float* w, const float* b, Index rows, Index k, Index n, Index tokens, float* y,
            float* mean) {
  const Index step = chunk_rows(k + n, tokens), chunks = (rows + step - 1) / step;
  parallel(chunks, threads_for(chunks), [&](Index first, Index last, int) {
    Buffer part(k);
    for (Index c = first; c < last; ++c) {
      const Index r = c * step, m = std::min(step, rows - r);
      gemm('N', 'N', m, n, k, 1.f, x + r * k, k, w, n, 0.f, y + r * n, n);
      if (b) add_row(y + r * n, b, m, n);
      for (Index t = r; mean && t < r + m; t += tokens) column_mean(x + t * k, k, tokens, k, part, mean + t / tokens * k);
    }
  });
}

// Gradients of x, w and b; each may be null. `gmean` is the gradient of the mean, or null.
void linear_grad(const float* x, const float* w, const float* g, const float* gmean, Index rows, Index k, Index n,
                 Index tokens, float* dx, float* dw, float* db) {
  const Index step = chunk_rows(k + n), chunks = (rows + step - 1) / step;
  const Index part = k * n + 2 * n;
  const int threads = threads_for(chunks, part);
  Buffer partial(threads * part);
  parallel(chunks, threads, [&](Index first, Index last, int thread) {
    float *pw = partial + thread * part, *pb = pw + k * n, *scratch = pb + n;
    std::memset(pb, 0, (size_t)n * 4);
    for (Index c = first; c < last; ++c) {
      const Index r = c * step, m = std::min(step, rows - r);
      if (dw) gemm('T', 'N', k, n, m, 1.f, x + r * k, k, g + r * n, n, c > first, pw, n);
      if (db) add_column_sums(g + r * n, n, m, n, scratch, pb);
      if (!dx) continue;
      gemm('N', 'T', m, k, n, 1.f, g + r * n, n, w, n, 0.f, dx + r * k, k);
      for (Index t = r; gmean && t < r + m; ++t)
        for (Index i = 0; i < k; ++i) dx[t * k + i] += gmean[t / tokens * k + i] / tokens;
    }
  });
  if (dw) reduce(partial, threads, part, k * n, dw);
  if (db) reduce(partial + k * n, threads, part, n, db);
}

struct Norm {  // (x - mean) / sqrt(variance + epsilon) * w + b over rows of n; stats of a row: mean, 1 / deviation
  const float *w, *b;
  float epsilon;

  void apply(const float* x, Index rows, Index n, float* y, float* stats) const {
    for (Index r = 0; r < rows; ++r, x += n) {
      float sum = 0.f, squares = 0.f;
      for (Index i = 0; i < n; ++i) sum += x[i];
      const float mean = sum / n;
      for (Index i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
      stats[2 * r] = mean, stats[2 * r + 1] = 1.f / std::sqrt(squares / n + epsilon);
      again(x, 1, n, y + r * n, stats + 2 * r);
    }
  }

  void again(const float* x, Index rows, Index n, float* y, const float* stats) const {
    for (Index r = 0; r < rows; ++r)
      for (Index i = 0; i < n; ++i) y[r * n + i] = (x[r * n + i] - stats[2 * r]) * stats[2 * r + 1] * w[i] + b[i];
  }

  // dx = gradient (+ skip, unless null); sums[2 n] += gradients of w and b. dx and g may be the same.
  void grad(const float* x, const float* stats, const float* g, Index rows, Index n, const float* skip, float* dx,
            float* part, float* sums) const {
    for (Index first = 0; first < rows; first += 32) {
      std::memset(part, 0, (size_t)2 * n * 4);
      for (Index r = first; r < std::min(rows, first + 32); ++r) {
        const float *in = x + r * n, *go = g + r * n;
        const float mean = stats[2 * r], inverse = stats[2 * r + 1];
        float along = 0.f, total = 0.f;
        for (Index i = 0; i < n; ++i) {
          const float normed = (in[i] - mean) * inverse, scaled = go[i] * w[i];
          along += scaled * normed;
          total += scaled;
          part[i] += go[i] * normed;
          part[n + i] += go[i];
        }
        if (!dx) continue;
        const float slope = along / n * inverse, offset = total / n;
        float* out = dx + r * n;
        if (skip) {
#pragma omp simd
          for (Index i = 0; i < n; ++i)
            out[i] = inverse * (go[i] * w[i] - offset - (in[i] - mean) * slope) + skip[r * n + i];
        } else {
#pragma omp simd
          for (Index i = 0; i < n; ++i) out[i] = inverse * (go[i] * w[i] - offset - (in[i] - mean) * slope);
        }
      }
      for (Index i = 0; i < 2 * n; ++i) sums[i] += part[i];
    }
  }
};

void layer_norm(const float* x, Norm norm, Index rows, Index n, float* y, float* stats) {
  parallel(rows, threads_for((rows + 15) / 16), [&](Index first, Index last, int) {
    norm.apply(x + first * n, last - first, n, y + first * n, stats + 2 * first);
  });
}

// Gradients of x, w and b; each may be null.
void layer_norm_grad(const float* x, Norm norm, const float* stats, const float* g, Index rows, Index n, float* dx,
                     float* dw, float* db) {
  const int threads = threads_for((rows + 63) / 64);
  Buffer partial(threads * 4 * n, true);
  parallel(rows, threads, [&](Index first, Index last, int thread) {
    float *sums = partial + thread * 4 * n, *part = sums + 2 * n;
    norm.grad(x + first * n, stats + 2 * first, g + first * n, last - first, n, nullptr, dx ? dx + first * n : nullptr,
              part, sums);
  });
  if (dw) reduce(partial, threads, 4 * n, n, dw);
  if (db) reduce(partial + n, threads, 4 * n, n, db);
}

void gelu(const float* x, Index n, int tanh_form, float* y) {
  parallel(n, threads_for(n / 4096), [&](Index first, Index last, int) {
    gelu_row(x + first, last - first, tanh_form, y + first);
  });
}

void gelu_grad(const float* x, const float* g, Index n, int tanh_form, float* dx) {
  parallel(n, threads_for(n / 4096), [&](Index first, Index last, int) {
    gelu_grad_row(x + first, g + first, last - first, tanh_form, dx + first, nullptr);
  });
}

// Per-sample, per-channel 3x3 correlation with zero padding: v, y [B, N, C], taps [B, C, 9]; the first N - H * W tokens
// are not on the grid and give zero.
void dynamic_conv(const float* v, const float* taps, Index B, Index N, Index H, Index W, Index C, float* y) {
  const Index parts = (C + 15) / 16, prefix = (N - H * W) * C;
  parallel(B * parts, threads_for(B * parts), [&](Index first, Index last, int) {
    for (Index item = first; item < last; ++item) {
      const Index b = item / parts, c0 = item % parts * 16, at = b * N * C + c0, n = std::min<Index>(16, C - c0);
      for (Index t = 0; t < N; ++t) std::memset(y + at + t * C, 0, (size_t)n * 4);
      channel_blocks(H, W, n, [&](auto conv, Index c) {
        conv.apply(v + at + prefix + c, C, taps + (b * C + c0 + c) * 9, false, y + at + prefix + c, C);
      });
    }
  });
}

// Gradients of v and taps; each may be null.
void dynamic_conv_grad(const float* v, const float* taps, const float* g, Index B, Index N, Index H, Index W, Index C,
                       float* dv, float* dtaps) {
  const Index parts = (C + 15) / 16, prefix = (N - H * W) * C;
  parallel(B * parts, threads_for(B * parts), [&](Index first, Index last, int) {
    for (Index item = first; item < last; ++item) {
      const Index b = item / parts, c0 = item % parts * 16, at = b * N * C + c0, n = std::min<Index>(16, C - c0);
      for (Index t = 0; dv && t < N; ++t) std::memset(dv + at + t * C, 0, (size_t)n * 4);
      channel_blocks(H, W, n, [&](auto conv, Index c) {
        const Index w = (b * C + c0 + c) * 9, grid = at + prefix + c;
        if (dv) conv.apply(g + grid, C, taps + w, true, dv + grid, C);
        if (dtaps) conv.taps_grad(v + grid, C, g + grid, C, dtaps + w);
      });
    }
  });
}

// y = gelu(x w1 + b1) w2 + b2, x [rows, k], w1 [k, hidden], w2 [hidden, n]; x w1 + b1 is kept in `pre` unless null.
struct Mlp {
  const float *w1, *b1, *w2, *b2;
  Index k, hidden, n;
  bool tanh_form;

  Index step() const { return chunk_rows(k + n + 2 * hidden); }

  // On one chunk; y is added to what is there if `beta` is 1.
  void apply(const float* x, Index m, float* pre, float* activation, float beta, float* y) const {
    gemm('N', 'N', m, hidden, k, 1.f, x, k, w1, hidden, 0.f, pre, hidden);
    add_row(pre, b1, m, hidden);
    gelu_row(pre, m * hidden, tanh_form, activation);
    gemm('N', 'N', m, n, hidden, 1.f, activation, hidden, w2, n, beta, y, n);
    add_row(y, b2, m, n);
  }

  // Partial sums of the gradients of w1, b1, w2, b2, in this order, and scratch of max(hidden, n) floats.
  Index at_b1() const { return k * hidden; }
  Index at_w2() const { return at_b1() + hidden; }
  Index at_b2() const { return at_w2() + hidden * n; }
  Index scratch() const { return at_b2() + n; }
  Index sums_size() const { return scratch() + std::max(hidden, n); }

  // On one chunk: dx unless null, and the sums, which `start` begins anew; `activation` and `slope` are scratch of
  // m * hidden.
  void grad(const float* x, const float* pre, const float* g, Index m, float* activation, float* slope, float* dx,
            float* sums, bool start) const {
    if (start) {
      std::memset(sums + at_b1(), 0, (size_t)hidden * 4);
      std::memset(sums + at_b2(), 0, (size_t)n * 4);
    }
    const float beta = start ? 0.f : 1.f;
    gemm('N', 'T', m, hidden, n, 1.f, g, n, w2, n, 0.f, slope, hidden);
    gelu_grad_row(pre, slope, m * hidden, tanh_form, slope, activation);
    gemm('T', 'N', hidden, n, m, 1.f, activation, hidden, g, n, beta, sums + at_w2(), n);
    add_column_sums(g, n, m, n, sums + scratch(), sums + at_b2());
    gemm('T', 'N', k, hidden, m, 1.f, x, k, slope, hidden, beta, sums, hidden);
    add_column_sums(slope, hidden, m, hidden, sums + scratch(), sums + at_b1());
    if (dx) gemm('N', 'T', m, k, hidden, 1.f, slope, hidden, w1, hidden, 0.f, dx, k);
  }

  void finish(const float* partial, int threads, Index stride, float* dw1, float* db1, float* dw2, float* db2) const {
    if (dw1) reduce(partial, threads, stride, k * hidden, dw1);
    if (db1) reduce(partial + at_b1(), threads, stride, hidden, db1);
    if (dw2) reduce(partial + at_w2(), threads, stride, hidden * n, dw2);
    if (db2) reduce(partial + at_b2(), threads, stride, n, db2);
  }
};

void mlp(const float* x, Mlp layer, Index rows, float* pre, float* y) {
  const Index step = layer.step(), chunks = (rows + step - 1) / step;
  parallel(chunks, threads_for(chunks), [&](Index first, Index last, int) {
    Buffer activation(step * layer.hidden);
    for (Index r = first * step; r < std::min(rows, last * step); r += step)
      layer.apply(x + r * layer.k, std::min(step, rows - r), pre ? pre + r * layer.hidden : activation, activation, 0.f,
                  y + r * layer.n);
  });
}

// Gradients of x, w1, b1, w2, b2; each may be null.
void mlp_grad(const float* x, Mlp layer, const float* pre, const float* g, Index rows, float* dx, float* dw1, float* db1,
              float* dw2, float* db2) {
  const Index step = layer.step(), chunks = (rows + step - 1) / step, stride = layer.sums_size();
  const int threads = threads_for(chunks, stride);
  Buffer partial(threads * stride);
  parallel(chunks, threads, [&](Index first, Index last, int thread) {
    Buffer activation(step * layer.hidden), slope(step * layer.hidden);
    for (Index r = first * step; r < std::min(rows, last * step); r += step)
      layer.grad(x + r * layer.k, pre + r * layer.hidden, g + r * layer.n, std::min(step, rows - r), activation, slope,
                 dx ? dx + r * layer.k : nullptr, partial + thread * stride, r == first * step);
  });
  layer.finish(partial, threads, stride, dw1, db1, dw2, db2);
}

// The second half of a transformer block: y = x + mlp(norm(x)); k = n is the width.
void mlp_block(const float* x, Norm norm, Mlp layer, Index rows, float* stats, float* pre, float* y) {
  const Index step = layer.step(), chunks = (rows + step - 1) / step, k = layer.k;
  parallel(chunks, threads_for(chunks), [&](Index first, Index last, int) {
    Buffer activation(step * layer.hidden), normed(step * k);
    for (Index r = first * step; r < std::min(rows, last * step); r += step) {
      const Index m = std::min(step, rows - r);
      std::memcpy(y + r * k, x + r * k, (size_t)(m * k) * 4);
      norm.apply(x + r * k, m, k, normed, stats + 2 * r);
      layer.apply(normed, m, pre ? pre + r * layer.hidden : activation, activation, 1.f, y + r * k);
    }
  });
}

// Gradients, any of which may be null.
void mlp_block_grad(const float* x, Norm norm, Mlp layer, const float* stats, const float* pre, const float* g,
                    Index rows, float* dx, float* dnorm_w, float* dnorm_b, float* dw1, float* db1, float* dw2,
                    float* db2) {
  const Index step = layer.step(), chunks = (rows + step - 1) / step, k = layer.k;
  const Index at_norm = layer.sums_size(), stride = at_norm + 4 * k;
  const int threads = threads_for(chunks, stride);
  Buffer partial(threads * stride);
  parallel(chunks, threads, [&](Index first, Index last, int thread) {
    Buffer activation(step * layer.hidden), slope(step * layer.hidden), normed(step * k), dnormed(step * k);
    float* sums = partial + thread * stride;
    std::memset(sums + at_norm, 0, (size_t)2 * k * 4);
    for (Index r = first * step; r < std::min(rows, last * step); r += step) {
      const Index m = std::min(step, rows - r);
      norm.again(x + r * k, m, k, normed, stats + 2 * r);
      layer.grad(normed, pre + r * layer.hidden, g + r * k, m, activation, slope, dnormed, sums, r == first * step);
      norm.grad(x + r * k, stats + 2 * r, dnormed, m, k, g + r * k, dx ? dx + r * k : dnormed,
                sums + at_norm + 2 * k, sums + at_norm);
    }
  });
  layer.finish(partial, threads, stride, dw1, db1, dw2, db2);
  if (dnorm_w) reduce(partial + at_norm, threads, stride, k, dnorm_w);
  if (dnorm_b) reduce(partial + at_norm + k, threads, stride, k, dnorm_b);
}

// Attention on packed projections: qkv [B, N, 3, h, d], one head of one image at a time, read where it lies.
struct Packed {
  Index B, N, heads, d;
  Index width() const { return heads * d; }
  Index row() const { return 3 * heads * d; }
  Index at(Index item) const { return item / heads * N * row() + item % heads * d; }       // q of a head; k, v follow
  Index out(Index item) const { return item / heads * N * width() + item % heads * d; }    // its part of [B, N, h, d]
};

// InLine: out = q (scale Cov(k, v)) + mean(v) + correlation of the grid tokens of v with taps [B, C, 9] (may be null).
// The scaled covariances [B, h, d, d] are kept for the gradient. The first N - H * W tokens are not on the grid.
void inline_attention(const float* qkv, const float* taps, Packed p, Index H, Index W, float scale, float* state,
                      float* out) {
  const Index N = p.N, d = p.d, C = p.width(), ld = p.row(), prefix = N - H * W, items = p.B * p.heads;
  parallel(items, threads_for(items), [&](Index first, Index last, int) {
    Buffer centred(N * d), mean(d), part(d);
    for (Index item = first; item < last; ++item) {
      const float *q = qkv + p.at(item), *k = q + C, *v = k + C;
      float *cov = state + item * d * d, *y = out + p.out(item);
      column_mean(v, ld, N, d, part, mean);
      for (Index n = 0; n < N; ++n)
        for (Index i = 0; i < d; ++i) centred[n * d + i] = v[n * ld + i] - mean[i], y[n * C + i] = mean[i];
      gemm('T', 'N', d, d, N, scale / N, k, ld, centred, d, 0.f, cov, d);
      gemm('N', 'N', N, d, d, 1.f, q, ld, cov, d, 1.f, y, C);
      if (taps)
        channel_blocks(H, W, d, [&](auto conv, Index c) {
          conv.apply(v + prefix * ld + c, ld, taps + (item * d + c) * 9, false, y + prefix * C + c, C);
        });
    }
  });
}

void inline_attention_grad(const float* qkv, const float* taps, const float* state, const float* g, Packed p, Index H,
                           Index W, float scale, float* dqkv, float* dtaps) {
  const Index N = p.N, d = p.d, C = p.width(), ld = p.row(), prefix = N - H * W, items = p.B * p.heads;
  parallel(items, threads_for(items), [&](Index first, Index last, int) {
    Buffer centred(N * d), mean(d), part(d), dcov(d * d);
    for (Index item = first; item < last; ++item) {
      const float *q = qkv + p.at(item), *k = q + C, *v = k + C, *cov = state + item * d * d, *go = g + p.out(item);
      float *dq = dqkv + p.at(item), *dk = dq + C, *dv = dk + C;
      gemm('N', 'T', N, d, d, 1.f, go, C, cov, d, 0.f, dq, ld);
      gemm('T', 'N', d, d, N, scale / N, q, ld, go, C, 0.f, dcov, d);
      column_mean(v, ld, N, d, part, mean);
      for (Index n = 0; n < N; ++n)
        for (Index i = 0; i < d; ++i) centred[n * d + i] = v[n * ld + i] - mean[i];
      gemm('N', 'T', N, d, d, 1.f, centred, d, dcov, d, 0.f, dk, ld);
      // dv = k dcov - (mean of its rows) + mean(g)
      column_mean(k, ld, N, d, part, mean);
      for (Index n = 0; n < N; ++n)
        for (Index i = 0; i < d; ++i) centred[n * d + i] = k[n * ld + i] - mean[i];
      column_mean(go, C, N, d, part, mean);
      for (Index n = 0; n < N; ++n)
        for (Index i = 0; i < d; ++i) dv[n * ld + i] = mean[i];
      gemm('N', 'N', N, d, d, 1.f, centred, d, dcov, d, 1.f, dv, ld);
      if (taps)
        channel_blocks(H, W, d, [&](auto conv, Index c) {
          const Index grid = prefix * ld + c, w = (item * d + c) * 9;
          conv.apply(go + prefix * C + c, C, taps + w, true, dv + grid, ld);
          conv.taps_grad(v + grid, ld, go + prefix * C + c, C, dtaps + w);
        });
    }
  });
}

float largest(const float* x, Index n) {  // sixteen running maxima, because a single one does not vectorise
  float top[16];
  for (int l = 0; l < 16; ++l) top[l] = x[0];
  Index i = 0;
  for (; i + 16 <= n; i += 16)
    for (int l = 0; l < 16; ++l) top[l] = x[i + l] > top[l] ? x[i + l] : top[l];
  for (; i < n; ++i) top[0] = x[i] > top[0] ? x[i] : top[0];
  for (int l = 1; l < 16; ++l) top[0] = top[l] > top[0] ? top[l] : top[0];
  return top[0];
}

// Softmax attention of q [B, N, h, d], rows `ldq` floats apart, with k and v [B, M, h, d], rows `ldk` apart, plus optional
// logits: bias [h, N, M], and mask [G, N, M] for the G windows of an image (B counts windows).
struct Softmax {
  Index B, N, M, heads, d, ldq, ldk, G;
  float scale;
  const float *bias, *mask;

  Index items() const { return B * heads; }
  Index q(Index item) const { return item / heads * N * ldq + item % heads * d; }
  Index k(Index item) const { return item / heads * M * ldk + item % heads * d; }
  Index out(Index item) const { return (item / heads * N * heads + item % heads) * d; }
  Index step() const { return std::min(N, std::max<Index>(16, 65536 / M)); }  // rows of scores at a time

  void logits(Index item, Index r, Index m, const float* query, const float* key, float* scores) const {
    gemm('N', 'T', m, M, d, scale, query, ldq, key, ldk, 0.f, scores, M);
    const Index at = r * M, n = m * M;
    if (bias)
      for (Index i = 0; i < n; ++i) scores[i] += bias[item % heads * N * M + at + i];
    if (mask)
      for (Index i = 0; i < n; ++i) scores[i] += mask[item / heads % G * N * M + at + i];
  }
};

// `norm` [B, h, N] gets log sum exp of every row for the gradient.
void softmax_attention(const float* q, const float* k, const float* v, Softmax a, float* norm, float* out) {
  const Index M = a.M, C = a.heads * a.d, step = a.step();
  parallel(a.items(), threads_for(a.items()), [&](Index first, Index last, int) {
    Buffer scores(step * M);
    for (Index item = first; item < last; ++item)
      for (Index r = 0; r < a.N; r += step) {
        const Index m = std::min(step, a.N - r);
        a.logits(item, r, m, q + a.q(item) + r * a.ldq, k + a.k(item), scores);
        for (Index i = 0; i < m; ++i) {
          float *row = scores + i * M, sum = 0.f;
          const float top = largest(row, M);
          for (Index j = 0; j < M; ++j) {
            row[j] = exp_approx(row[j] - top);
            sum += row[j];
          }
          const float share = 1.f / sum;
          for (Index j = 0; j < M; ++j) row[j] *= share;
          norm[item * a.N + r + i] = top + std::log(sum);
        }
        gemm('N', 'N', m, a.d, M, 1.f, scores, M, v + a.k(item), a.ldk, 0.f, out + a.out(item) + r * C, C);
      }
  });
}

// Gradients in the layouts of q, k, v; dbias may be null.
void softmax_attention_grad(const float* q, const float* k, const float* v, const float* norm, const float* g, Softmax a,
                            float* dq, float* dk, float* dv, float* dbias) {
  const Index M = a.M, C = a.heads * a.d, step = a.step(), part = dbias ? a.heads * a.N * M : 1;
  const int threads = threads_for(a.items(), part);
  Buffer partial(threads * part, true);
  parallel(a.items(), threads, [&](Index first, Index last, int thread) {
    Buffer scores(step * M), slopes(step * M);
    for (Index item = first; item < last; ++item)
      for (Index r = 0; r < a.N; r += step) {
        const Index m = std::min(step, a.N - r), at = a.q(item) + r * a.ldq, kv = a.k(item);
        const float again = r ? 1.f : 0.f, *go = g + a.out(item) + r * C;
        a.logits(item, r, m, q + at, k + kv, scores);
        gemm('N', 'T', m, M, a.d, 1.f, go, C, v + kv, a.ldk, 0.f, slopes, M);
        for (Index i = 0; i < m; ++i) {
          float *row = scores + i * M, *slope = slopes + i * M, along = 0.f;
          const float offset = norm[item * a.N + r + i];
          for (Index j = 0; j < M; ++j) {
            row[j] = exp_approx(row[j] - offset);
            along += row[j] * slope[j];
          }
          for (Index j = 0; j < M; ++j) slope[j] = row[j] * (slope[j] - along);
        }
        if (dbias) {
          float* sum = partial + thread * part + (item % a.heads * a.N + r) * M;
          for (Index i = 0; i < m * M; ++i) sum[i] += slopes[i];
        }
        gemm('T', 'N', M, a.d, m, 1.f, scores, M, go, C, again, dv + kv, a.ldk);
        gemm('N', 'N', m, a.d, M, a.scale, slopes, M, k + kv, a.ldk, 0.f, dq + at, a.ldq);
        gemm('T', 'N', M, a.d, m, a.scale, slopes, M, q + at, a.ldq, again, dk + kv, a.ldk);
      }
  });
  if (dbias) reduce(partial, threads, part, part, dbias);
}

using paddle::Tensor;
using Tensors = std::vector<Tensor>;
using MaybeTensor = paddle::optional<Tensor>;

const float* in(const Tensor& t) { return t.data<float>(); }
const float* in(const MaybeTensor& t) { return t ? t->data<float>() : nullptr; }
float* out(Tensor& t) { return t.data<float>(); }
Tensor make(const std::vector<Index>& shape, const Tensor& like) { return paddle::empty(shape, like.dtype(), like.place()); }

struct Gradient {  // of one input; where it is not wanted, a placeholder that Paddle ignores and no memory to write to
  Gradient(const Tensor& of, int64_t wanted, int input)
      : tensor(wanted >> input & 1 ? make(of.shape(), of) : make({1}, of)),
        data(wanted >> input & 1 ? out(tensor) : nullptr) {}
  Tensor tensor;
  float* data;
};

std::vector<Index> with_width(const Tensor& x, Index n) {
  std::vector<Index> shape = x.shape();
  shape.back() = n;
  return shape;
}

Tensors linear_op(const Tensor& x, const Tensor& w, const MaybeTensor& b, int64_t) {
  const Index k = w.shape()[0], n = w.shape()[1];
  Tensor y = make(with_width(x, n), x);
  linear(in(x), in(w), in(b), x.numel() / k, k, n, 0, out(y), nullptr);
  return {y};
}

Tensors linear_grad_op(const Tensor& x, const Tensor& w, const MaybeTensor& b, const Tensor& g, int64_t wanted) {
  const Index k = w.shape()[0], n = w.shape()[1];
  Gradient dx(x, wanted, 0), dw(w, wanted, 1), db(b ? *b : x, wanted, 2);
  linear_grad(in(x), in(w), in(g), nullptr, x.numel() / k, k, n, 1, dx.data, dw.data, db.data);
  return {dx.tensor, dw.tensor, db.tensor};
}

Tensors linear_mean_op(const Tensor& x, const Tensor& w, const MaybeTensor& b, int64_t) {
  const Index k = w.shape()[0], n = w.shape()[1], tokens = x.shape()[1];
  Tensor y = make(with_width(x, n), x), mean = make({x.shape()[0], k}, x);
  linear(in(x), in(w), in(b), x.numel() / k, k, n, tokens, out(y), out(mean));
  return {y, mean};
}

Tensors linear_mean_grad_op(const Tensor& x, const Tensor& w, const MaybeTensor& b, const Tensor& g, const Tensor& gmean,
                            int64_t wanted) {
  const Index k = w.shape()[0], n = w.shape()[1];
  Gradient dx(x, wanted, 0), dw(w, wanted, 1), db(b ? *b : x, wanted, 2);
  const Tensor gy = g.initialized() ? g : paddle::full(with_width(x, n), 0, x.dtype(), x.place());  // y was not used
  linear_grad(in(x), in(w), in(gy), gmean.initialized() ? in(gmean) : nullptr, x.numel() / k, k, n, x.shape()[1],
              dx.data, dw.data, db.data);
  return {dx.tensor, dw.tensor, db.tensor};
}

Tensors layer_norm_op(const Tensor& x, const Tensor& w, const Tensor& b, float epsilon, int64_t) {
  const Index n = w.numel(), rows = x.numel() / n;
  Tensor y = make(x.shape(), x), stats = make({rows, 2}, x);
  layer_norm(in(x), {in(w), in(b), epsilon}, rows, n, out(y), out(stats));
  return {y, stats};
}

Tensors layer_norm_grad_op(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& stats, const Tensor& g,
                           float epsilon, int64_t wanted) {
  const Index n = w.numel();
  Gradient dx(x, wanted, 0), dw(w, wanted, 1), db(b, wanted, 2);
  layer_norm_grad(in(x), {in(w), in(b), epsilon}, in(stats), in(g), x.numel() / n, n, dx.data, dw.data, db.data);
  return {dx.tensor, dw.tensor, db.tensor};
}

Tensors gelu_op(const Tensor& x, bool tanh_form) {
  Tensor y = make(x.shape(), x);
  gelu(in(x), x.numel(), tanh_form, out(y));
  return {y};
}

Tensors gelu_grad_op(const Tensor& x, const Tensor& g, bool tanh_form) {
  Tensor dx = make(x.shape(), x);
  gelu_grad(in(x), in(g), x.numel(), tanh_form, out(dx));
  return {dx};
}

Tensors dynamic_conv_op(const Tensor& v, const Tensor& taps, int64_t height, int64_t width, int64_t) {
  Tensor y = make(v.shape(), v);
  dynamic_conv(in(v), in(taps), v.shape()[0], v.shape()[1], height, width, v.shape()[2], out(y));
  return {y};
}

Tensors dynamic_conv_grad_op(const Tensor& v, const Tensor& taps, const Tensor& g, int64_t height, int64_t width,
                             int64_t wanted) {
  Gradient dv(v, wanted, 0), dtaps(taps, wanted, 1);
  dynamic_conv_grad(in(v), in(taps), in(g), v.shape()[0], v.shape()[1], height, width, v.shape()[2], dv.data, dtaps.data);
  return {dv.tensor, dtaps.tensor};
}

Packed packed(const Tensor& qkv, int64_t heads) {
  return {qkv.shape()[0], qkv.shape()[1], heads, qkv.shape()[2] / 3 / heads};
}

Tensors inline_attention_op(const Tensor& qkv, const MaybeTensor& taps, int64_t heads, int64_t height, int64_t width,
                            float scale) {
  const Packed p = packed(qkv, heads);
  Tensor state = make({p.B, heads, p.d, p.d}, qkv), y = make({p.B, p.N, p.width()}, qkv);
  inline_attention(in(qkv), in(taps), p, height, width, scale, out(state), out(y));
  return {y, state};
}

Tensors inline_attention_grad_op(const Tensor& qkv, const MaybeTensor& taps, const Tensor& state, const Tensor& g,
                                 int64_t heads, int64_t height, int64_t width, float scale) {
  Tensor dqkv = make(qkv.shape(), qkv), dtaps = taps ? make(taps->shape(), qkv) : make({1}, qkv);
  inline_attention_grad(in(qkv), in(taps), in(state), in(g), packed(qkv, heads), height, width, scale, out(dqkv),
                        out(dtaps));
  return {dqkv, dtaps};
}

// `q` holds q, k and v where there is no `kv`.
Softmax softmax_layer(const Tensor& q, const MaybeTensor& kv, const MaybeTensor& bias, const MaybeTensor& mask,
                      int64_t heads, float scale) {
  const Index ldq = q.shape()[2], C = kv ? ldq : ldq / 3, M = kv ? kv->shape()[1] : q.shape()[1];
  return {q.shape()[0], q.shape()[1],  M,     heads,    C / heads, ldq, kv ? 2 * C : ldq, mask ? mask->shape()[0] : 1,
          scale,        in(bias), in(mask)};
}

Tensors softmax_attention_op(const Tensor& q, const MaybeTensor& kv, const MaybeTensor& bias, const MaybeTensor& mask,
                             int64_t heads, float scale, int64_t) {
  const Softmax a = softmax_layer(q, kv, bias, mask, heads, scale);
  const Index C = heads * a.d;
  Tensor norm = make({a.B, heads, a.N}, q), y = make({a.B, a.N, C}, q);
  const float* k = kv ? in(kv) : in(q) + C;
  softmax_attention(in(q), k, k + C, a, out(norm), out(y));
  return {y, norm};
}

Tensors softmax_attention_grad_op(const Tensor& q, const MaybeTensor& kv, const MaybeTensor& bias,
                                  const MaybeTensor& mask, const Tensor& norm, const Tensor& g, int64_t heads,
                                  float scale, int64_t wanted) {
  const Softmax a = softmax_layer(q, kv, bias, mask, heads, scale);
  const Index C = heads * a.d;
  Tensor dq = make(q.shape(), q), dkv = kv ? make(kv->shape(), q) : make({1}, q);
  Gradient dbias(bias ? *bias : q, bias ? wanted : 0, 2);
  const float* k = kv ? in(kv) : in(q) + C;
  float* dk = kv ? out(dkv) : out(dq) + C;
  softmax_attention_grad(in(q), k, k + C, in(norm), in(g), a, out(dq), dk, dk + C, dbias.data);
  return {dq, dkv, dbias.tensor, make({1}, q)};
}

Mlp mlp_layer(const Tensor& w1, const Tensor& b1, const Tensor& w2, const Tensor& b2, bool tanh_form) {
  return {in(w1), in(b1), in(w2), in(b2), w1.shape()[0], w1.shape()[1], w2.shape()[1], tanh_form};
}

Tensors mlp_op(const Tensor& x, const Tensor& w1, const Tensor& b1, const Tensor& w2, const Tensor& b2, bool tanh_form,
               int64_t wanted) {
  const Mlp layer = mlp_layer(w1, b1, w2, b2, tanh_form);
  const Index rows = x.numel() / layer.k;
  Tensor y = make(with_width(x, layer.n), x), pre = make({wanted ? rows : 0, layer.hidden}, x);
  mlp(in(x), layer, rows, wanted ? out(pre) : nullptr, out(y));
  return {y, pre};
}

Tensors mlp_grad_op(const Tensor& x, const Tensor& w1, const Tensor& b1, const Tensor& w2, const Tensor& b2,
                    const Tensor& pre, const Tensor& g, bool tanh_form, int64_t wanted) {
  const Mlp layer = mlp_layer(w1, b1, w2, b2, tanh_form);
  Gradient dx(x, wanted, 0), dw1(w1, wanted, 1), db1(b1, wanted, 2), dw2(w2, wanted, 3), db2(b2, wanted, 4);
  mlp_grad(in(x), layer, in(pre), in(g), x.numel() / layer.k, dx.data, dw1.data, db1.data, dw2.data, db2.data);
  return {dx.tensor, dw1.tensor, db1.tensor, dw2.tensor, db2.tensor};
}

Tensors mlp_block_op(const Tensor& x, const Tensor& norm_w, const Tensor& norm_b, const Tensor& w1, const Tensor& b1,
                     const Tensor& w2, const Tensor& b2, float epsilon, bool tanh_form, int64_t wanted) {
  const Mlp layer = mlp_layer(w1, b1, w2, b2, tanh_form);
  const Index rows = x.numel() / layer.k;
  Tensor y = make(x.shape(), x), stats = make({rows, 2}, x), pre = make({wanted ? rows : 0, layer.hidden}, x);
  mlp_block(in(x), {in(norm_w), in(norm_b), epsilon}, layer, rows, out(stats), wanted ? out(pre) : nullptr, out(y));
  return {y, stats, pre};
}

Tensors mlp_block_grad_op(const Tensor& x, const Tensor& norm_w, const Tensor& norm_b, const Tensor& w1,
                          const Tensor& b1, const Tensor& w2, const Tensor& b2, const Tensor& stats, const Tensor& pre,
                          const Tensor& g, float epsilon, bool tanh_form, int64_t wanted) {
  const Mlp layer = mlp_layer(w1, b1, w2, b2, tanh_form);
  Gradient dx(x, wanted, 0), dnorm_w(norm_w, wanted, 1), dnorm_b(norm_b, wanted, 2);
  Gradient dw1(w1, wanted, 3), db1(b1, wanted, 4), dw2(w2, wanted, 5), db2(b2, wanted, 6);
  mlp_block_grad(in(x), {in(norm_w), in(norm_b), epsilon}, layer, in(stats), in(pre), in(g), x.numel() / layer.k,
                 dx.data, dnorm_w.data, dnorm_b.data, dw1.data, db1.data, dw2.data, db2.data);
  return {dx.tensor, dnorm_w.tensor, dnorm_b.tensor, dw1.tensor, db1.tensor, dw2.tensor, db2.tensor};
}

template <class... Ignored>
Tensors no_second_derivative(const Tensor&, Ignored...) {
  PD_THROW("The compiled CPU kernels have no second derivatives: call ppattn.ops.enable(False) first.");
  return {};
}

}  // namespace

using paddle::Grad;
using paddle::Optional;

PD_BUILD_OP(ppattn_linear)
    .Inputs({"X", "W", Optional("B")})
    .Outputs({"Y"})
    .Attrs({"wanted: int64_t"})
    .SetKernelFn(PD_KERNEL(linear_op));
PD_BUILD_GRAD_OP(ppattn_linear)
    .Inputs({"X", "W", Optional("B"), Grad("Y")})
    .Outputs({Grad("X"), Grad("W"), Grad(Optional("B"))})
    .Attrs({"wanted: int64_t"})
    .SetKernelFn(PD_KERNEL(linear_grad_op));
PD_BUILD_DOUBLE_GRAD_OP(ppattn_linear)
    .Inputs({Grad(Grad("X"))})
    .Outputs({Grad(Grad("Y"))})
    .Attrs({"wanted: int64_t"})
    .SetKernelFn(PD_KERNEL(no_second_derivative<int64_t>));

PD_BUILD_OP(ppattn_linear_mean)
    .Inputs({"X", "W", Optional("B")})
    .Outputs({"Y", "Mean"})
    .Attrs({"wanted: int64_t"})
    .SetKernelFn(PD_KERNEL(linear_mean_op));
PD_BUILD_GRAD_OP(ppattn_linear_mean)
    .Inputs({"X", "W", Optional("B"), Grad("Y"), Grad("Mean")})
    .Outputs({Grad("X"), Grad("W"), Grad(Optional("B"))})
    .Attrs({"wanted: int64_t"})
    .SetKernelFn(PD_KERNEL(linear_mean_grad_op));
PD_BUILD_DOUBLE_GRAD_OP(ppattn_linear_mean)
    .Inputs({Grad(Grad("X"))})
    .Outputs({Grad(Grad("Y"))})
    .Attrs({"wanted: int64_t"})
    .SetKernelFn(PD_KERNEL(no_second_derivative<int64_t>));

PD_BUILD_OP(ppattn_layer_norm)
    .Inputs({"X", "W", "B"})
    .Outputs({"Y", "Stats"})
    .Attrs({"epsilon: float", "wanted: int64_t"})
    .SetKernelFn(PD_KERNEL(layer_norm_op));
PD_BUILD_GRAD_OP(ppattn_layer_norm)
    .Inputs({"X", "W", "B", "Stats", Grad("Y")})
    .Outputs({Grad("X"), Grad("W"), Grad("B")})
    .Attrs({"epsilon: float", "wanted: int64_t"})
    .SetKernelFn(PD_KERNEL(layer_norm_grad_op));
PD_BUILD_DOUBLE_GRAD_OP(ppattn_layer_norm)
    .Inputs({Grad(Grad("X"))})
    .Outputs({Grad(Grad("Y"))})
    .Attrs({"epsilon: float", "wanted: int64_t"})
    .SetKernelFn(PD_KERNEL(no_second_derivative<float, int64_t>));

PD_BUILD_OP(ppattn_gelu)
    .Inputs({"X"})
    .Outputs({"Y"})
    .Attrs({"tanh_form: bool"})
    .SetKernelFn(PD_KERNEL(gelu_op));
PD_BUILD_GRAD_OP(ppattn_gelu)
    .Inputs({"X", Grad("Y")})
    .Outputs({Grad("X")})
    .Attrs({"tanh_form: bool"})
    .SetKernelFn(PD_KERNEL(gelu_grad_op));
PD_BUILD_DOUBLE_GRAD_OP(ppattn_gelu)
    .Inputs({Grad(Grad("X"))})
    .Outputs({Grad(Grad("Y"))})
    .Attrs({"tanh_form: bool"})
    .SetKernelFn(PD_KERNEL(no_second_derivative<bool>));

PD_BUILD_OP(ppattn_mlp)
    .Inputs({"X", "W1", "B1", "W2", "B2"})
    .Outputs({"Y", "Pre"})
    .Attrs({"tanh_form: bool", "wanted: int64_t"})
    .SetKernelFn(PD_KERNEL(mlp_op));
PD_BUILD_GRAD_OP(ppattn_mlp)
    .Inputs({"X", "W1", "B1", "W2", "B2", "Pre", Grad("Y")})
    .Outputs({Grad("X"), Grad("W1"), Grad("B1"), Grad("W2"), Grad("B2")})
    .Attrs({"tanh_form: bool", "wanted: int64_t"})
    .SetKernelFn(PD_KERNEL(mlp_grad_op));
PD_BUILD_DOUBLE_GRAD_OP(ppattn_mlp)
    .Inputs({Grad(Grad("X"))})
    .Outputs({Grad(Grad("Y"))})
    .Attrs({"tanh_form: bool", "wanted: int64_t"})
    .SetKernelFn(PD_KERNEL(no_second_derivative<bool, int64_t>));

PD_BUILD_OP(ppattn_mlp_block)
    .Inputs({"X", "NormW", "NormB", "W1", "B1", "W2", "B2"})
    .Outputs({"Y", "Stats", "Pre"})
    .Attrs({"epsilon: float", "tanh_form: bool", "wanted: int64_t"})
    .SetKernelFn(PD_KERNEL(mlp_block_op));
PD_BUILD_GRAD_OP(ppattn_mlp_block)
    .Inputs({"X", "NormW", "NormB", "W1", "B1", "W2", "B2", "Stats", "Pre", Grad("Y")})
    .Outputs({Grad("X"), Grad("NormW"), Grad("NormB"), Grad("W1"), Grad("B1"), Grad("W2"), Grad("B2")})
    .Attrs({"epsilon: float", "tanh_form: bool", "wanted: int64_t"})
    .SetKernelFn(PD_KERNEL(mlp_block_grad_op));
PD_BUILD_DOUBLE_GRAD_OP(ppattn_mlp_block)
    .Inputs({Grad(Grad("X"))})
    .Outputs({Grad(Grad("Y"))})
    .Attrs({"epsilon: float", "tanh_form: bool", "wanted: int64_t"})
    .SetKernelFn(PD_KERNEL(no_second_derivative<float, bool, int64_t>));

PD_BUILD_OP(ppattn_dynamic_conv)
    .Inputs({"V", "Taps"})
    .Outputs({"Y"})
    .Attrs({"height: int64_t", "width: int64_t", "wanted: int64_t"})
    .SetKernelFn(PD_KERNEL(dynamic_conv_op));
PD_BUILD_GRAD_OP(ppattn_dynamic_conv)
    .Inputs({"V", "Taps", Grad("Y")})
    .Outputs({Grad("V"), Grad("Taps")})
    .Attrs({"height: int64_t", "width: int64_t", "wanted: int64_t"})
    .SetKernelFn(PD_KERNEL(dynamic_conv_grad_op));
PD_BUILD_DOUBLE_GRAD_OP(ppattn_dynamic_conv)
    .Inputs({Grad(Grad("V"))})
    .Outputs({Grad(Grad("Y"))})
    .Attrs({"height: int64_t", "width: int64_t", "wanted: int64_t"})
    .SetKernelFn(PD_KERNEL(no_second_derivative<int64_t, int64_t, int64_t>));

PD_BUILD_OP(ppattn_inline_attention)
    .Inputs({"QKV", Optional("Taps")})
    .Outputs({"Y", "State"})
    .Attrs({"heads: int64_t", "height: int64_t", "width: int64_t", "scale: float"})
    .SetKernelFn(PD_KERNEL(inline_attention_op));
PD_BUILD_GRAD_OP(ppattn_inline_attention)
    .Inputs({"QKV", Optional("Taps"), "State", Grad("Y")})
    .Outputs({Grad("QKV"), Grad(Optional("Taps"))})
    .Attrs({"heads: int64_t", "height: int64_t", "width: int64_t", "scale: float"})
    .SetKernelFn(PD_KERNEL(inline_attention_grad_op));
PD_BUILD_DOUBLE_GRAD_OP(ppattn_inline_attention)
    .Inputs({Grad(Grad("QKV"))})
    .Outputs({Grad(Grad("Y"))})
    .Attrs({"heads: int64_t", "height: int64_t", "width: int64_t", "scale: float"})
    .SetKernelFn(PD_KERNEL(no_second_derivative<int64_t, int64_t, int64_t, float>));

PD_BUILD_OP(ppattn_softmax_attention)
    .Inputs({"Q", Optional("KV"), Optional("Bias"), Optional("Mask")})
    .Outputs({"Y", "Norm"})
    .Attrs({"heads: int64_t", "scale: float", "wanted: int64_t"})
    .SetKernelFn(PD_KERNEL(softmax_attention_op));
PD_BUILD_GRAD_OP(ppattn_softmax_attention)
    .Inputs({"Q", Optional("KV"), Optional("Bias"), Optional("Mask"), "Norm", Grad("Y")})
    .Outputs({Grad("Q"), Grad(Optional("KV")), Grad(Optional("Bias")), Grad(Optional("Mask"))})
    .Attrs({"heads: int64_t", "scale: float", "wanted: int64_t"})
    .SetKernelFn(PD_KERNEL(softmax_attention_grad_op));
PD_BUILD_DOUBLE_GRAD_OP(ppattn_softmax_attention)
    .Inputs({Grad(Grad("Q"))})
    .Outputs({Grad(Grad("Y"))})
    .Attrs({"heads: int64_t", "scale: float", "wanted: int64_t"})
    .SetKernelFn(PD_KERNEL(no_second_derivative<int64_t, float, int64_t>));

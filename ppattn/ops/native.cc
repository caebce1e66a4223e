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

// body(first, last, thread) on contiguous shares of `items`.
template <class Body>
void parallel(Index items, int threads, Body body) {
#pragma omp parallel num_threads(threads)
  {
    const Index t = omp_get_thread_num(), n = omp_get_num_threads();
    body(items * t / n, items * (t + 1) / n, (int)t);
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
  std::memcpy(out, partial, (size_t)n * 4);
  for (int t = 1; t < threads; ++t)
    for (Index i = 0; i < n; ++i) out[i] += partial[t * stride + i];
}

// Rows per chunk such that a chunk of `width` floats per row takes about half a megabyte.
Index chunk_rows(Index width) { return std::min<Index>(512, std::max<Index>(64, 131072 / width / 32 * 32)); }

void add_row(float* x, const float* row, Index rows, Index n) {
  for (Index r = 0; r < rows; ++r)
    for (Index i = 0; i < n; ++i) x[r * n + i] += row[i];
}

// sum[n] += column sums of x; `part` is scratch of n floats: summing in two levels keeps the rounding error small.
void add_column_sums(const float* x, Index rows, Index n, float* part, float* sum) {
  for (Index first = 0; first < rows; first += 32) {
    std::memset(part, 0, (size_t)n * 4);
    for (Index r = first; r < std::min(rows, first + 32); ++r)
      for (Index i = 0; i < n; ++i) part[i] += x[r * n + i];
    for (Index i = 0; i < n; ++i) sum[i] += part[i];
  }
}

inline float exp_approx(float x) {  // relative error 1e-7 on [-87, 88], clamped outside; NaN stays NaN
  x = x < -87.f ? -87.f : x;
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
  return p * power;
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

inline float gelu_value(float x, bool tanh_form) {
  if (!tanh_form) return x * normal(x).below;
  return x / (1.f + exp_approx(-2.f * kTanh0 * x * (1.f + kTanh1 * x * x)));
}

inline float gelu_slope(float x, bool tanh_form) {
  if (!tanh_form) {
    const Normal n = normal(x);
    return n.below + x * n.bell * 0.3989422804f;
  }
  const float e = exp_approx(-2.f * kTanh0 * x * (1.f + kTanh1 * x * x)), s = 1.f / (1.f + e);
  return s + x * (e * s) * s * (2.f * kTanh0) * (1.f + 3.f * kTanh1 * x * x);
}

void gelu_row(const float* x, Index n, bool tanh_form, float* y) {
  if (tanh_form)
    for (Index i = 0; i < n; ++i) y[i] = gelu_value(x[i], true);
  else
    for (Index i = 0; i < n; ++i) y[i] = gelu_value(x[i], false);
}

void gelu_grad_row(const float* x, const float* g, Index n, bool tanh_form, float* dx) {
  if (tanh_form)
    for (Index i = 0; i < n; ++i) dx[i] = g[i] * gelu_slope(x[i], true);
  else
    for (Index i = 0; i < n; ++i) dx[i] = g[i] * gelu_slope(x[i], false);
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

// y[rows, n] = x[rows, k] w[k, n] + b
void linear(const float* x, const float* w, const float* b, Index rows, Index k, Index n, float* y) {
  const Index step = chunk_rows(k + n), chunks = (rows + step - 1) / step;
  parallel(chunks, threads_for(chunks), [&](Index first, Index last, int) {
    for (Index c = first; c < last; ++c) {
      const Index r = c * step, m = std::min(step, rows - r);
      gemm('N', 'N', m, n, k, 1.f, x + r * k, k, w, n, 0.f, y + r * n, n);
      if (b) add_row(y + r * n, b, m, n);
    }
  });
}

// Gradients of x, w and b; each may be null.
void linear_grad(const float* x, const float* w, const float* g, Index rows, Index k, Index n, float* dx,
                        float* dw, float* db) {
  const Index step = chunk_rows(k + n), chunks = (rows + step - 1) / step;
  const int threads = threads_for(chunks);
  const Index part = k * n + 2 * n;
  Buffer partial(threads * part, true);
  parallel(chunks, threads, [&](Index first, Index last, int thread) {
    float *pw = partial + thread * part, *pb = pw + k * n, *scratch = pb + n;
    for (Index c = first; c < last; ++c) {
      const Index r = c * step, m = std::min(step, rows - r);
      if (dw) gemm('T', 'N', k, n, m, 1.f, x + r * k, k, g + r * n, n, c > first, pw, n);
      if (db) add_column_sums(g + r * n, m, n, scratch, pb);
      if (dx) gemm('N', 'T', m, k, n, 1.f, g + r * n, n, w, n, 0.f, dx + r * k, k);
    }
  });
  if (dw) reduce(partial, threads, part, k * n, dw);
  if (db) reduce(partial + k * n, threads, part, n, db);
}

// y = (x - mean) / sqrt(variance + epsilon) * w + b for every row; stats[rows, 2] gets mean and 1 / deviation.
void layer_norm(const float* x, const float* w, const float* b, Index rows, Index n, float epsilon, float* y,
                       float* stats) {
  parallel(rows, threads_for((rows + 15) / 16), [&](Index first, Index last, int) {
    for (Index r = first; r < last; ++r) {
      const float* in = x + r * n;
      float* out = y + r * n;
      float sum = 0.f, squares = 0.f;
      for (Index i = 0; i < n; ++i) sum += in[i];
      const float mean = sum / n;
      for (Index i = 0; i < n; ++i) squares += (in[i] - mean) * (in[i] - mean);
      const float inverse = 1.f / std::sqrt(squares / n + epsilon);
      for (Index i = 0; i < n; ++i) out[i] = (in[i] - mean) * inverse * w[i] + b[i];
      stats[2 * r] = mean, stats[2 * r + 1] = inverse;
    }
  });
}

// Gradients of x, w and b; each may be null.
void layer_norm_grad(const float* x, const float* w, const float* stats, const float* g, Index rows, Index n,
                            float* dx, float* dw, float* db) {
  const Index step = 64, chunks = (rows + step - 1) / step;
  const int threads = threads_for(chunks);
  Buffer partial(threads * 4 * n, true);
  parallel(chunks, threads, [&](Index first, Index last, int thread) {
    float *sum_w = partial + thread * 4 * n, *sum_b = sum_w + n, *pw = sum_b + n, *pb = pw + n;
    for (Index c = first; c < last; ++c) {
      std::memset(pw, 0, (size_t)2 * n * 4);
      for (Index r = c * step; r < std::min(rows, (c + 1) * step); ++r) {
        const float *in = x + r * n, *go = g + r * n;
        float* out = dx + r * n;
        const float mean = stats[2 * r], inverse = stats[2 * r + 1];
        float along = 0.f, total = 0.f;
        for (Index i = 0; i < n; ++i) {
          const float normed = (in[i] - mean) * inverse, scaled = go[i] * w[i];
          along += scaled * normed;
          total += scaled;
          pw[i] += go[i] * normed;
          pb[i] += go[i];
        }
        const float slope = along / n * inverse, offset = total / n;
        if (!dx) continue;
        for (Index i = 0; i < n; ++i) out[i] = inverse * (go[i] * w[i] - offset - (in[i] - mean) * slope);
      }
      for (Index i = 0; i < 2 * n; ++i) sum_w[i] += pw[i];
    }
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
    gelu_grad_row(x + first, g + first, last - first, tanh_form, dx + first);
  });
}

// Per-sample, per-channel 3x3 correlation with zero padding: v, y [B, H * W, C], taps [B, C, 9].
void dynamic_conv(const float* v, const float* taps, Index B, Index H, Index W, Index C, float* y) {
  const Index parts = (C + 15) / 16, N = H * W;
  parallel(B * parts, threads_for(B * parts), [&](Index first, Index last, int) {
    for (Index item = first; item < last; ++item) {
      const Index b = item / parts, c0 = item % parts * 16, at = b * N * C + c0, n = std::min<Index>(16, C - c0);
      for (Index t = 0; t < N; ++t) std::memset(y + at + t * C, 0, (size_t)n * 4);
      channel_blocks(H, W, n, [&](auto conv, Index c) {
        conv.apply(v + at + c, C, taps + (b * C + c0 + c) * 9, false, y + at + c, C);
      });
    }
  });
}

// Gradients of v and taps; each may be null.
void dynamic_conv_grad(const float* v, const float* taps, const float* g, Index B, Index H, Index W, Index C,
                              float* dv, float* dtaps) {
  const Index parts = (C + 15) / 16, N = H * W;
  parallel(B * parts, threads_for(B * parts), [&](Index first, Index last, int) {
    for (Index item = first; item < last; ++item) {
      const Index b = item / parts, c0 = item % parts * 16, at = b * N * C + c0, n = std::min<Index>(16, C - c0);
      for (Index t = 0; dv && t < N; ++t) std::memset(dv + at + t * C, 0, (size_t)n * 4);
      channel_blocks(H, W, n, [&](auto conv, Index c) {
        const Index w = (b * C + c0 + c) * 9;
        if (dv) conv.apply(g + at + c, C, taps + w, true, dv + at + c, C);
        if (dtaps) conv.taps_grad(v + at + c, C, g + at + c, C, dtaps + w);
      });
    }
  });
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

Tensors linear_op(const Tensor& x, const Tensor& w, const MaybeTensor& b, int64_t) {
  std::vector<Index> shape = x.shape();
  const Index k = w.shape()[0], n = w.shape()[1];
  shape.back() = n;
  Tensor y = make(shape, x);
  linear(in(x), in(w), in(b), x.numel() / k, k, n, out(y));
  return {y};
}

Tensors linear_grad_op(const Tensor& x, const Tensor& w, const MaybeTensor& b, const Tensor& g, int64_t wanted) {
  const Index k = w.shape()[0], n = w.shape()[1];
  Gradient dx(x, wanted, 0), dw(w, wanted, 1), db(b ? *b : x, wanted, 2);
  linear_grad(in(x), in(w), in(g), x.numel() / k, k, n, dx.data, dw.data, db.data);
  return {dx.tensor, dw.tensor, db.tensor};
}

Tensors layer_norm_op(const Tensor& x, const Tensor& w, const Tensor& b, float epsilon, int64_t) {
  const Index n = w.numel(), rows = x.numel() / n;
  Tensor y = make(x.shape(), x), stats = make({rows, 2}, x);
  layer_norm(in(x), in(w), in(b), rows, n, epsilon, out(y), out(stats));
  return {y, stats};
}

Tensors layer_norm_grad_op(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& stats, const Tensor& g,
                           float, int64_t wanted) {
  const Index n = w.numel();
  Gradient dx(x, wanted, 0), dw(w, wanted, 1), db(b, wanted, 2);
  layer_norm_grad(in(x), in(w), in(stats), in(g), x.numel() / n, n, dx.data, dw.data, db.data);
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
  dynamic_conv(in(v), in(taps), v.shape()[0], height, width, v.shape()[2], out(y));
  return {y};
}

Tensors dynamic_conv_grad_op(const Tensor& v, const Tensor& taps, const Tensor& g, int64_t height, int64_t width,
                             int64_t wanted) {
  Gradient dv(v, wanted, 0), dtaps(taps, wanted, 1);
  dynamic_conv_grad(in(v), in(taps), in(g), v.shape()[0], height, width, v.shape()[2], dv.data, dtaps.data);
  return {dv.tensor, dtaps.tensor};
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

PD_BUILD_OP(ppattn_gelu).Inputs({"X"}).Outputs({"Y"}).Attrs({"tanh_form: bool"}).SetKernelFn(PD_KERNEL(gelu_op));
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

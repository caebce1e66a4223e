// Convolution of maps [B, C, H, W] as matrix products of the weight with unfolded patches.
#pragma once

#include "matrix.h"

namespace ppattn {

struct Conv2d {  // square kernels, the same stride and zero padding along both axes
  Index B, channels, H, W, filters, kernel, stride, padding;

  Index height() const { return (H + 2 * padding - kernel) / stride + 1; }
  Index width() const { return (W + 2 * padding - kernel) / stride + 1; }
  Index places() const { return height() * width(); }
  Index patch() const { return channels * kernel * kernel; }
  Index image() const { return channels * H * W; }

  // Rows of the result whose patches take about a quarter of a megabyte.
  Index strip() const { return std::clamp<Index>(65536 / (patch() * width()), 1, height()); }

  // body(x offset, y column, patch offset, columns) for every run of one channel and tap: neighbouring columns of the
  // result in row `row` that see the map; everything else of the patches is zero.
  template <class Body>
  void runs(Index row, Body body) const {
    for (Index c = 0; c < channels; ++c)
      for (Index u = 0; u < kernel; ++u) {
        const Index i = row * stride + u - padding;
        if (i < 0 || i >= H) continue;
        for (Index t = 0; t < kernel; ++t) {
          const Index first = std::max<Index>(0, (padding - t + stride - 1) / stride);
          const Index last = std::min(width(), (W + padding - t + stride - 1) / stride);
          if (first < last)
            body((c * H + i) * W + first * stride + t - padding, first, (c * kernel + u) * kernel + t, last - first);
        }
      }
  }

  // patches[patch, rows * width] of `rows` rows of the result from `top` on.
  void unfold(const float* x, Index top, Index rows, float* patches) const {
    const Index columns = rows * width();
    fill_zero(patches, patch() * columns);
    for (Index row = 0; row < rows; ++row)
      runs(top + row, [&](Index from, Index column, Index tap, Index count) {
        float* to = patches + tap * columns + row * width() + column;
        if (stride == 1) return copy(x + from, count, to);
        for (Index i = 0; i < count; ++i) to[i] = x[from + i * stride];
      });
  }

  // x += the patches at their places: the transpose of `unfold`.
  void fold(const float* patches, Index top, Index rows, float* x) const {
    const Index columns = rows * width();
    for (Index row = 0; row < rows; ++row)
      runs(top + row, [&](Index to, Index column, Index tap, Index count) {
        const float* from = patches + tap * columns + row * width() + column;
        for (Index i = 0; i < count; ++i) x[to + i * stride] += from[i];
      });
  }
};

// y[B, filters, height, width] = w[filters, patch] patches + b.
inline void conv2d(const float* x, const float* w, const float* b, const Conv2d& a, float* y) {
  const Index strip = a.strip(), strips = chunks_of(a.height(), strip), places = a.places();
  parallel(a.B * strips, [&](Index first, Index last) {
    Buffer patches(a.patch() * strip * a.width());
    for (Index item = first; item < last; ++item) {
      const Index image = item / strips, top = item % strips * strip, rows = std::min(strip, a.height() - top);
      const Index columns = rows * a.width();
      float* out = y + image * a.filters * places + top * a.width();
      a.unfold(x + image * a.image(), top, rows, patches);
      for (Index f = 0; f < a.filters; ++f) std::fill_n(out + f * places, columns, b ? b[f] : 0.f);
      gemm('N', 'N', a.filters, columns, a.patch(), 1.f, w, a.patch(), patches, columns, 1.f, out, places);
    }
  });
}

// Gradients of x, w and b; each may be null.
inline void conv2d_grad(const float* x, const float* w, const float* g, const Conv2d& a, float* dx, float* dw,
                        float* db) {
  const Index strip = a.strip(), places = a.places(), size = a.filters * a.patch(), part = size + a.filters;
  const int threads = threads_for(a.B, part);
  Buffer partial(threads * part, true);
  parallel(a.B, threads, [&](Index first, Index last, int thread) {
    float *pw = partial + thread * part, *pb = pw + size;
    Buffer patches(a.patch() * strip * a.width());
    for (Index image = first; image < last; ++image) {
      if (dx) fill_zero(dx + image * a.image(), a.image());
      for (Index top = 0; top < a.height(); top += strip) {
        const Index rows = std::min(strip, a.height() - top), columns = rows * a.width();
        const float* slope = g + image * a.filters * places + top * a.width();
        for (Index f = 0; db && f < a.filters; ++f) {
          float sum = 0.f;
#pragma omp simd reduction(+ : sum)
          for (Index i = 0; i < columns; ++i) sum += slope[f * places + i];
          pb[f] += sum;
        }
        if (dw) {
          a.unfold(x + image * a.image(), top, rows, patches);
          gemm('N', 'T', a.filters, a.patch(), columns, 1.f, slope, places, patches, columns, 1.f, pw, a.patch());
        }
        if (!dx) continue;
        gemm('T', 'N', a.patch(), columns, a.filters, 1.f, w, a.patch(), slope, places, 0.f, patches, columns);
        a.fold(patches, top, rows, dx + image * a.image());
      }
    }
  });
  reduce(partial, threads, part, size, dw);
  reduce(partial + size, threads, part, a.filters, db);
}

}  // namespace ppattn

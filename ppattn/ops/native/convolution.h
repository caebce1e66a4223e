// Depth-wise convolution of channels-last maps, sixteen neighbouring channels at a time.
#pragma once

#include <type_traits>

#include "parallel.h"

namespace ppattn {

// K x K on one image, zero padding, L neighbouring channels. Token (i, j) of the H x W grid starts at
// x + (i * W + j) * ld; taps are [L, K * K]. Every sum runs over the taps that hit the grid.
template <int L, int K>
struct Conv {
  Index H, W;

  // y += correlation of x with the taps (with flipped taps: the gradient of x).
  void apply(const float* x, Index ldx, const float* taps, bool flip, float* y, Index ldy) const {
    float w[K * K][L];
    for (int t = 0; t < K * K; ++t)
      for (int l = 0; l < L; ++l) w[t][l] = taps[l * K * K + (flip ? K * K - 1 - t : t)];
    for (Index i = 0; i < H; ++i)
      for (Index j = 0; j < W; ++j) {
        float sum[L], *out = y + (i * W + j) * ldy;
        for (int l = 0; l < L; ++l) sum[l] = out[l];
        const auto add_taps = [&](Index top, Index bottom, Index left, Index right) {
          for (Index u = top; u < bottom; ++u)
            for (Index t = left; t < right; ++t) {
              const float* in = x + ((i + u - K / 2) * W + j + t - K / 2) * ldx;
              for (int l = 0; l < L; ++l) sum[l] += w[u * K + t][l] * in[l];
            }
        };
        if (inside(i, H) && inside(j, W))
          add_taps(0, K, 0, K);  // constants: the loops are unrolled
        else
          add_taps(first(i), last(i, H), first(j), last(j, W));
        for (int l = 0; l < L; ++l) out[l] = sum[l];
      }
  }

  // dtaps[L, K * K] += sum over the grid of g times the neighbours of x, one row of taps at a time.
  void taps_grad(const float* x, Index ldx, const float* g, Index ldg, float* dtaps) const {
    for (Index u = 0; u < K; ++u) {
      float w[K][L] = {};
      for (Index i = std::max<Index>(0, K / 2 - u); i < std::min(H, H + K / 2 - u); ++i)
        for (Index j = 0; j < W; ++j) {
          const float *here = g + (i * W + j) * ldg, *row = x + ((i + u - K / 2) * W + j - K / 2) * ldx;
          const auto add_taps = [&](Index left, Index right) {
            for (Index t = left; t < right; ++t)
              for (int l = 0; l < L; ++l) w[t][l] += here[l] * row[t * ldx + l];
          };
          inside(j, W) ? add_taps(0, K) : add_taps(first(j), last(j, W));
        }
      for (int t = 0; t < K; ++t)
        for (int l = 0; l < L; ++l) dtaps[(l * K + u) * K + t] += w[t][l];
    }
  }

 private:
  static bool inside(Index i, Index size) { return i >= K / 2 && i < size - K / 2; }
  static Index first(Index i) { return std::max<Index>(0, K / 2 - i); }
  static Index last(Index i, Index size) { return std::min<Index>(K, size + K / 2 - i); }
};

template <int K, class Body>  // body(convolution over L channels, first channel)
void channel_blocks(Index H, Index W, Index channels, Body body) {
  Index c = 0;
  for (; c + 16 <= channels; c += 16) body(Conv<16, K>{H, W}, c);
  for (; c < channels; ++c) body(Conv<1, K>{H, W}, c);
}

// v [B, N, C], whose first N - H * W tokens are not on the grid, and R kernels for each of `images` images, B or 1 for
// all: channel c has kernel c / repeat % R.
struct ConvShape {
  Index B, N, H, W, C, images, R, repeat;

  Index items() const { return B * ((C + 15) / 16); }

  template <class Body>  // body(offset of the first channel in v, offset of its grid, channels, kernel(channel))
  void each(Index first, Index last, Body body) const {
    for (Index item = first; item < last; ++item) {
      const Index b = item / ((C + 15) / 16), c0 = item % ((C + 15) / 16) * 16, at = b * N * C + c0;
      body(at, at + (N - H * W) * C, std::min<Index>(16, C - c0),
           [&](Index c) { return (images > 1 ? b * R : 0) + (c0 + c) / repeat % R; });
    }
  }
};

// y [B, N, C]: every channel under its own kernel, taps [images, R, K, K] and bias [images, R] (may be null); zero for
// tokens that are not on the grid.
template <int K>
void depthwise_conv(const float* v, const float* taps, const float* bias, ConvShape s, float* y) {
  parallel(s.items(), [&](Index first, Index last) {
    s.each(first, last, [&](Index at, Index grid, Index n, auto kernel) {
      float w[16 * K * K], start[16] = {};
      for (Index l = 0; l < n; ++l) {
        copy(taps + kernel(l) * K * K, K * K, w + l * K * K);
        if (bias) start[l] = bias[kernel(l)];
      }
      for (Index t = at; t < grid; t += s.C) fill_zero(y + t, n);
      for (Index t = 0; t < s.H * s.W; ++t) copy(start, n, y + grid + t * s.C);
      channel_blocks<K>(s.H, s.W, n, [&](auto conv, Index c) {
        conv.apply(v + grid + c, s.C, w + c * K * K, false, y + grid + c, s.C);
      });
    });
  });
}

// Gradients; each may be null, and taps where dv is. Without common kernels, every channel needs its own.
template <int K>
void depthwise_conv_grad(const float* v, const float* taps, const float* g, ConvShape s, float* dv, float* dtaps,
                         float* dbias) {
  const bool common = s.images == 1;
  const Index size = s.images * s.R * K * K, stride = size + s.images * s.R;
  const int threads = common ? threads_for(s.items(), stride) : threads_for(s.items());
  Buffer partial(common ? threads * stride : stride, true);
  parallel(s.items(), threads, [&](Index first, Index last, int thread) {
    float* sums = partial + (common ? thread * stride : 0);
    s.each(first, last, [&](Index at, Index grid, Index n, auto kernel) {
      float w[16 * K * K], dw[16 * K * K] = {}, total[16] = {};
      for (Index l = 0; dv && l < n; ++l) copy(taps + kernel(l) * K * K, K * K, w + l * K * K);
      for (Index t = 0; dv && t < s.N; ++t) fill_zero(dv + at + t * s.C, n);
      for (Index t = 0; dbias && t < s.H * s.W; ++t) add(g + grid + t * s.C, n, total);
      channel_blocks<K>(s.H, s.W, n, [&](auto conv, Index c) {
        if (dv) conv.apply(g + grid + c, s.C, w + c * K * K, true, dv + grid + c, s.C);
        if (dtaps) conv.taps_grad(v + grid + c, s.C, g + grid + c, s.C, dw + c * K * K);
      });
      for (Index l = 0; l < n; ++l) {
        add(dw + l * K * K, K * K, sums + kernel(l) * K * K);
        sums[size + kernel(l)] += total[l];
      }
    });
  });
  reduce(partial, common ? threads : 1, stride, size, dtaps);
  reduce(partial + size, common ? threads : 1, stride, s.images * s.R, dbias);
}

template <class Body>  // body(std::integral_constant<int, K>()) for the compiled sizes of kernels
void with_kernel_size(Index K, Body body) {
  if (K == 3) return body(std::integral_constant<int, 3>());
  if (K == 5) return body(std::integral_constant<int, 5>());
  if (K == 7) return body(std::integral_constant<int, 7>());
  if (K == 9) return body(std::integral_constant<int, 9>());
  PADDLE_THROW(common::errors::InvalidArgument("A kernel of %d x %d is not compiled.", K, K));
}

}  // namespace ppattn

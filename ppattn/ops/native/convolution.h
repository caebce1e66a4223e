// Depth-wise convolution of channels-last maps, sixteen neighbouring channels at a time.
#pragma once

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

// Per-sample, per-channel 3x3 correlation with zero padding: v, y [B, N, C], taps [B, C, 9]; the first N - H * W tokens
// are not on the grid and give zero.
inline void dynamic_conv(const float* v, const float* taps, Index B, Index N, Index H, Index W, Index C, float* y) {
  const Index parts = (C + 15) / 16, prefix = (N - H * W) * C;
  parallel(B * parts, [&](Index first, Index last) {
    for (Index item = first; item < last; ++item) {
      const Index b = item / parts, c0 = item % parts * 16, at = b * N * C + c0, n = std::min<Index>(16, C - c0);
      for (Index t = 0; t < N; ++t) fill_zero(y + at + t * C, n);
      channel_blocks<3>(H, W, n, [&](auto conv, Index c) {
        conv.apply(v + at + prefix + c, C, taps + (b * C + c0 + c) * 9, false, y + at + prefix + c, C);
      });
    }
  });
}

// Gradients of v and taps; each may be null.
inline void dynamic_conv_grad(const float* v, const float* taps, const float* g, Index B, Index N, Index H, Index W,
                              Index C, float* dv, float* dtaps) {
  const Index parts = (C + 15) / 16, prefix = (N - H * W) * C;
  parallel(B * parts, [&](Index first, Index last) {
    for (Index item = first; item < last; ++item) {
      const Index b = item / parts, c0 = item % parts * 16, at = b * N * C + c0, n = std::min<Index>(16, C - c0);
      for (Index t = 0; dv && t < N; ++t) fill_zero(dv + at + t * C, n);
      if (dtaps) fill_zero(dtaps + (b * C + c0) * 9, n * 9);
      channel_blocks<3>(H, W, n, [&](auto conv, Index c) {
        const Index w = (b * C + c0 + c) * 9, grid = at + prefix + c;
        if (dv) conv.apply(g + grid, C, taps + w, true, dv + grid, C);
        if (dtaps) conv.taps_grad(v + grid, C, g + grid, C, dtaps + w);
      });
    }
  });
}

}  // namespace ppattn

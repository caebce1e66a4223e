// Exponential and GELU in forms that vectorise, and copies of columns.
#pragma once

#include <cmath>
#include <type_traits>

#include "parallel.h"

namespace ppattn {

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
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return vanishes ? 0.f : p * power;
}

struct Normal {
  float bell;   // exp(-x^2 / 2)
  float below;  // probability of a standard normal variable below x
};

// One exponential for both. erfc(z) exp(z^2) is taken as a polynomial in 1 / (1 + 0.42 z), whose relative error is
// 4e-8.
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

struct Gelu {
  float value, slope;
};

inline Gelu gelu_at(float x, bool tanh_form) {
  if (!tanh_form) {
    const Normal n = normal(x);
    return {x * n.below, n.below + x * n.bell * 0.3989422804f};
  }
  // x / (1 + exp(-2 u)); the exponential is bounded, so that its products do not overflow in any order.
  constexpr float k0 = 0.7978845608f, k1 = 0.044715f;
  const float twice = -2.f * k0 * x * (1.f + k1 * x * x);
  const float e = exp_approx(twice > 60.f ? 60.f : twice), s = 1.f / (1.f + e);
  return {x * s, s + x * (e * s) * s * (2.f * k0) * (1.f + 3.f * k1 * x * x)};
}

template <class Body>  // body(std::true_type or std::false_type): loops over constants vectorise
void with_constant(bool flag, Body body) {
  flag ? body(std::true_type()) : body(std::false_type());
}

inline void gelu_row(const float* x, Index n, bool tanh_form, float* y) {
  with_constant(tanh_form, [&](auto tanh) {
    for (Index i = 0; i < n; ++i) y[i] = gelu_at(x[i], tanh).value;
  });
}

// dx = g * slope; the value of the function goes to y unless null. g and dx may be the same.
inline void gelu_grad_row(const float* x, const float* g, Index n, bool tanh_form, float* dx, float* y) {
  with_constant(tanh_form, [&](auto tanh) {
    with_constant(y, [&](auto keep) {
#pragma omp simd
      for (Index i = 0; i < n; ++i) {
        const Gelu at = gelu_at(x[i], tanh);
        dx[i] = g[i] * at.slope;
        if (keep) y[i] = at.value;
      }
    });
  });
}

inline void gelu(const float* x, Index n, bool tanh_form, float* y) {
  parallel(n, threads_for(n / 4096),
           [&](Index first, Index last, int) { gelu_row(x + first, last - first, tanh_form, y + first); });
}

inline void gelu_grad(const float* x, const float* g, Index n, bool tanh_form, float* dx) {
  parallel(n, threads_for(n / 4096), [&](Index first, Index last, int) {
    gelu_grad_row(x + first, g + first, last - first, tanh_form, dx + first, nullptr);
  });
}

constexpr int most_parts = 4;

// x [rows, parts * n] to or from its `parts` blocks of columns [rows, n].
template <class Copy>  // copy_row(columns of x, part, row of the part)
void for_column_blocks(Index rows, Index n, Index parts, Copy copy_row) {
  parallel(rows, threads_for(rows * n / 4096), [&](Index first, Index last, int) {
    for (Index r = first; r < last; ++r)
      for (Index part = 0; part < parts; ++part) copy_row((r * parts + part) * n, part, r * n);
  });
}

}  // namespace ppattn

// The kernels as operators of Paddle: float32 on the CPU, with gradients.
//
// Matrix products go to the MKL that Paddle itself has loaded, and threads to its OpenMP runtime, so that no second
// thread pool competes for the cores. Work is cut by the number of threads only and partial sums are added in thread
// order: a fixed number of threads gives bit-identical results. Rows go through in chunks that stay in the L2 cache
// from one step to the next.
//
// `wanted` is a bit mask of the inputs whose gradients are asked for.

#include "attention.h"
#include "conv2d.h"
#include "convolution.h"
#include "gated_unit.h"
#include "linear.h"
#include "linear_attention.h"
#include "mlp.h"
#include "paddle/phi/api/ext/op_meta_info.h"
#include "paddle/phi/api/ext/tensor_compat.h"
#include "rotary.h"

namespace ppattn {
namespace {

using paddle::Tensor;
using Tensors = std::vector<Tensor>;
using MaybeTensor = paddle::optional<Tensor>;

const float* in(const Tensor& t) { return t.data<float>(); }
const float* in(const MaybeTensor& t) { return t ? t->data<float>() : nullptr; }
float* out(Tensor& t) { return t.data<float>(); }
Tensor make(const std::vector<Index>& shape, const Tensor& like) {
  return paddle::empty(shape, like.dtype(), like.place());
}

struct Gradient {  // of one input; where it is not wanted, a placeholder that Paddle ignores and no memory to write to
  Gradient(const MaybeTensor& of, int64_t wanted, int input)
      : tensor(of && (wanted >> input & 1) ? make(of->shape(), *of)
                                           : paddle::empty({1}, paddle::DataType::FLOAT32, paddle::CPUPlace())),
        data(of && (wanted >> input & 1) ? out(tensor) : nullptr) {}
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
  linear(in(x), in(w), in(b), x.numel() / k, k, n, out(y));
  return {y};
}

Tensors linear_grad_op(const Tensor& x, const Tensor& w, const MaybeTensor& b, const Tensor& g, int64_t wanted) {
  const Index k = w.shape()[0], n = w.shape()[1];
  Gradient dx(x, wanted, 0), dw(w, wanted, 1), db(b, wanted, 2);
  linear_grad(in(x), in(w), in(g), x.numel() / k, k, n, dx.data, dw.data, db.data);
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

// Always four outputs; those beyond `parts` are placeholders.
Tensors split_op(const Tensor& x, int64_t parts) {
  const Index n = x.shape().back() / parts;
  Tensors ys;
  float* blocks[most_parts] = {};
  for (int i = 0; i < most_parts; ++i) {
    ys.push_back(make(i < parts ? with_width(x, n) : std::vector<Index>{1}, x));
    blocks[i] = out(ys[i]);
  }
  for_column_blocks(x.numel() / (n * parts), n, parts,
                    [&](Index from, Index part, Index to) { copy(in(x) + from, n, blocks[part] + to); });
  return ys;
}

Tensors split_grad_op(const Tensor& g0, const Tensor& g1, const Tensor& g2, const Tensor& g3, int64_t parts) {
  const Tensor* gs[most_parts] = {&g0, &g1, &g2, &g3};
  const Tensor& like = **std::find_if(gs, gs + parts, [](const Tensor* g) { return g->initialized(); });
  const Index n = like.shape().back();
  Tensor dx = make(with_width(like, n * parts), like);
  float* to = out(dx);
  for_column_blocks(like.numel() / n, n, parts, [&](Index at, Index part, Index from) {
    if (gs[part]->initialized())
      copy(in(*gs[part]) + from, n, to + at);
    else  // this part was not used
      fill_zero(to + at, n);
  });
  return {dx};
}

ConvShape conv_shape(const Tensor& v, const Tensor& taps, int64_t height, int64_t width, int64_t repeat) {
  return {v.shape()[0], v.shape()[1], height, width, v.shape()[2], taps.shape()[0], taps.shape()[1], repeat};
}

Tensor with_identity(const Tensor& taps) {  // one more at the centre of every kernel: the input is added to the result
  Tensor sum = make(taps.shape(), taps);
  copy(in(taps), taps.numel(), out(sum));
  const Index size = taps.shape()[2] * taps.shape()[3];
  for (Index i = size / 2; i < taps.numel(); i += size) out(sum)[i] += 1.f;
  return sum;
}

Tensors depthwise_conv_op(const Tensor& v, const Tensor& taps, const MaybeTensor& bias, int64_t height, int64_t width,
                          int64_t repeat, bool skip, int64_t) {
  Tensor y = make(v.shape(), v);
  const Tensor used = skip ? with_identity(taps) : taps;
  with_kernel_size(taps.shape()[2], [&](auto K) {
    depthwise_conv<K>(in(v), in(used), in(bias), conv_shape(v, taps, height, width, repeat), out(y));
  });
  return {y};
}

Tensors depthwise_conv_grad_op(const Tensor& v, const Tensor& taps, const MaybeTensor& bias, const Tensor& g,
                               int64_t height, int64_t width, int64_t repeat, bool skip, int64_t wanted) {
  Gradient dv(v, wanted, 0), dtaps(taps, wanted, 1), dbias(bias, wanted, 2);
  const Tensor used = skip ? with_identity(taps) : taps;
  with_kernel_size(taps.shape()[2], [&](auto K) {
    depthwise_conv_grad<K>(in(v), in(used), in(g), conv_shape(v, taps, height, width, repeat), dv.data, dtaps.data,
                           dbias.data);
  });
  return {dv.tensor, dtaps.tensor, dbias.tensor};
}

// Taps [B, C, 3, 3]: the gradient of those of a depth-wise convolution of x, one kernel per image, at the gradient g.
Tensors correlation_op(const Tensor& x, const Tensor& g, int64_t height, int64_t width) {
  Tensor taps = make({x.shape()[0], x.shape()[2], 3, 3}, x);
  depthwise_conv_grad<3>(in(x), nullptr, in(g), conv_shape(x, taps, height, width, 1), nullptr, out(taps), nullptr);
  return {taps};
}

Tensors correlation_grad_op(const Tensor& x, const Tensor& g, const Tensor& up, int64_t height, int64_t width) {
  Tensor dx = make(x.shape(), x), dg = make(g.shape(), g);
  const ConvShape shape = conv_shape(x, up, height, width, 1);
  depthwise_conv_grad<3>(in(x), in(up), in(g), shape, out(dx), nullptr, nullptr);
  depthwise_conv<3>(in(x), in(up), nullptr, shape, out(dg));
  return {dx, dg};
}

Conv2d conv2d_of(const Tensor& x, const Tensor& w, int64_t stride, int64_t padding) {
  const std::vector<Index> map = x.shape(), weight = w.shape();
  return {map[0], map[1], map[2], map[3], weight[0], weight[2], stride, padding};
}

Tensors conv2d_op(const Tensor& x, const Tensor& w, const MaybeTensor& b, int64_t stride, int64_t padding, int64_t) {
  const Conv2d a = conv2d_of(x, w, stride, padding);
  Tensor y = make({a.B, a.filters, a.height(), a.width()}, x);
  conv2d(in(x), in(w), in(b), a, out(y));
  return {y};
}

Tensors conv2d_grad_op(const Tensor& x, const Tensor& w, const MaybeTensor& b, const Tensor& g, int64_t stride,
                       int64_t padding, int64_t wanted) {
  Gradient dx(x, wanted, 0), dw(w, wanted, 1), db(b, wanted, 2);
  conv2d_grad(in(x), in(w), in(g), conv2d_of(x, w, stride, padding), dx.data, dw.data, db.data);
  return {dx.tensor, dw.tensor, db.tensor};
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
  Gradient dqkv(qkv, 1, 0), dtaps(taps, 1, 0);
  inline_attention_grad(in(qkv), in(taps), in(state), in(g), packed(qkv, heads), height, width, scale, dqkv.data,
                        dtaps.data);
  return {dqkv.tensor, dtaps.tensor};
}

// `q` holds q, k and v where there is no `kv`, and `kv` holds both where there is no `v`.
Softmax softmax_layer(const Tensor& q, const MaybeTensor& kv, const MaybeTensor& v, const MaybeTensor& bias,
                      const MaybeTensor& mask, int64_t heads, float scale, bool gaussian) {
  const Index B = q.shape()[0], N = q.shape()[1], M = kv ? kv->shape()[1] : N, groups = mask ? mask->shape()[0] : 1;
  const Index ldq = q.shape()[2], C = kv ? ldq : ldq / 3, ldk = v ? C : kv ? 2 * C : ldq;
  return {B, N, M, heads, C / heads, ldq, ldk, groups, scale, gaussian, in(bias), in(mask)};
}

Tensors softmax_attention_op(const Tensor& q, const MaybeTensor& kv, const MaybeTensor& v, const MaybeTensor& bias,
                             const MaybeTensor& mask, int64_t heads, float scale, bool gaussian, int64_t) {
  const Softmax a = softmax_layer(q, kv, v, bias, mask, heads, scale, gaussian);
  const Index C = heads * a.d;
  Tensor norm = make({a.B, heads, a.N}, q), y = make({a.B, a.N, C}, q);
  const float* k = kv ? in(kv) : in(q) + C;
  softmax_attention(in(q), k, v ? in(v) : k + C, a, out(norm), out(y));
  return {y, norm};
}

Tensors softmax_attention_grad_op(const Tensor& q, const MaybeTensor& kv, const MaybeTensor& v, const MaybeTensor& bias,
                                  const MaybeTensor& mask, const Tensor& norm, const Tensor& g, int64_t heads,
                                  float scale, bool gaussian, int64_t wanted) {
  const Softmax a = softmax_layer(q, kv, v, bias, mask, heads, scale, gaussian);
  const Index C = heads * a.d;
  Gradient dq(q, 1, 0), dkv(kv, 1, 0), dv(v, 1, 0), dbias(bias, wanted, 3), dmask(mask, 0, 4);
  const float* k = kv ? in(kv) : in(q) + C;
  float* dk = kv ? dkv.data : dq.data + C;
  softmax_attention_grad(in(q), k, v ? in(v) : k + C, in(norm), in(g), a, dq.data, dk, v ? dv.data : dk + C,
                         dbias.data);
  return {dq.tensor, dkv.tensor, dv.tensor, dbias.tensor, dmask.tensor};
}

LinearAttention linear_attention_of(const Tensor& q, const Tensor& v, int64_t heads, bool polar, float epsilon) {
  return {q.shape()[0], q.shape()[1], heads, q.shape()[2] / heads, v.shape()[2] / heads, polar, epsilon};
}

Tensors linear_attention_op(const Tensor& q, const Tensor& k, const Tensor& v, int64_t heads, bool polar,
                            float epsilon) {
  const LinearAttention a = linear_attention_of(q, v, heads, polar, epsilon);
  Tensor y = make(v.shape(), v), states = make({a.B, heads, a.r, a.columns()}, v);
  Tensor normalisers = make({a.B, heads, a.N, a.columns() - a.d}, v);
  linear_attention(in(q), in(k), in(v), a, out(states), out(normalisers), out(y));
  return {y, states, normalisers};
}

Tensors linear_attention_grad_op(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& y,
                                 const Tensor& states, const Tensor& normalisers, const Tensor& g, int64_t heads,
                                 bool polar, float epsilon) {
  Tensor dq = make(q.shape(), q), dk = make(k.shape(), k), dv = make(v.shape(), v);
  linear_attention_grad(in(q), in(k), in(v), in(states), in(normalisers), in(y), in(g),
                        linear_attention_of(q, v, heads, polar, epsilon), out(dq), out(dk), out(dv));
  return {dq, dk, dv};
}

RotaryAttention rotary_attention_of(const Tensor& q, const Tensor& v, const MaybeTensor& cos, const MaybeTensor& sin,
                                    int64_t heads, float epsilon, float magnitude) {
  const std::vector<Index> shape = q.shape();
  const Index r = shape[2] / heads, d = v.shape()[2] / heads, T = cos ? cos->shape()[1] : r;
  return {shape[0], shape[1], heads, r, d, T, in(cos), in(sin), epsilon, magnitude};
}

Tensors rotary_attention_op(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& cos,
                            const MaybeTensor& sin, int64_t heads, float epsilon, float magnitude) {
  const RotaryAttention a = rotary_attention_of(q, v, cos, sin, heads, epsilon, magnitude);
  Tensor y = make(v.shape(), v), states = make({a.B, heads, a.r, a.d}, v), means = make({a.B, heads, a.r}, v);
  Tensor dens = make({a.B, heads, a.N}, v);
  rotary_attention(in(q), in(k), in(v), a, out(states), out(means), out(dens), out(y));
  return {y, states, means, dens};
}

Tensors rotary_attention_grad_op(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& cos,
                                 const MaybeTensor& sin, const Tensor& states, const Tensor& means, const Tensor& dens,
                                 const Tensor& g, int64_t heads, float epsilon, float magnitude) {
  Tensor dq = make(q.shape(), q), dk = make(k.shape(), k), dv = make(v.shape(), v);
  const Gradient dcos(cos, 0, 3), dsin(sin, 0, 4);
  rotary_attention_grad(in(q), in(k), in(v), in(states), in(means), in(dens), in(g),
                        rotary_attention_of(q, v, cos, sin, heads, epsilon, magnitude), out(dq), out(dk), out(dv));
  return {dq, dk, dv, dcos.tensor, dsin.tensor};
}

Shifted shifted(const Tensor& x, const MaybeTensor& shift, const Tensor& scale) {
  const Index C = x.shape()[2];
  return {x.numel() / C, x.shape()[1], C, in(x), in(shift), in(scale)};
}

Tensors signed_power_op(const Tensor& x, const MaybeTensor& shift, const Tensor& scale, const Tensor& power,
                        int64_t heads, float tiny, int64_t) {
  const Index C = x.shape()[2];
  Tensor y = make(with_width(x, 2 * C), x);
  SignedPower{shifted(x, shift, scale), in(power), C / heads, tiny}.apply(out(y));
  return {y};
}

Tensors signed_power_grad_op(const Tensor& x, const MaybeTensor& shift, const Tensor& scale, const Tensor& power,
                             const Tensor& y, const Tensor& g, int64_t heads, float tiny, int64_t wanted) {
  Tensor dx = make(x.shape(), x);
  Gradient dshift(shift, wanted, 1), dscale(scale, wanted, 2), dpower(power, wanted, 3);
  SignedPower{shifted(x, shift, scale), in(power), x.shape()[2] / heads, tiny}.grad(in(y), in(g), out(dx), dshift.data,
                                                                                    dscale.data, dpower.data);
  return {dx, dshift.tensor, dscale.tensor, dpower.tensor};
}

Tensors direction_power_op(const Tensor& x, int64_t heads, float tiny) {
  const Index d = x.shape()[2] / heads;
  Tensor y = make(with_width(x, 2 * x.shape()[2]), x);
  DirectionPower{x.numel() / d, d, tiny}.apply(in(x), out(y));
  return {y};
}

Tensors direction_power_grad_op(const Tensor& x, const Tensor& y, const Tensor& g, int64_t heads, float tiny) {
  const Index d = x.shape()[2] / heads;
  Tensor dx = make(x.shape(), x);
  DirectionPower{x.numel() / d, d, tiny}.grad(in(x), in(y), in(g), out(dx));
  return {dx};
}

GatedUnit gated_unit_of(const Tensor& q, const Tensor& weights, float rate, float tiny) {
  return {q.shape()[0], q.shape()[1], weights.shape()[0], weights.shape()[1], rate, tiny};
}

Tensors gated_unit_op(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& weights, float rate,
                      float tiny) {
  const GatedUnit u = gated_unit_of(q, weights, rate, tiny);
  Tensor y = make(q.shape(), q), steps = make({u.B, u.heads, u.d, 2 * u.d}, q);
  gated_unit(in(q), in(k), in(v), in(weights), u, out(steps), out(y));
  return {y, steps};
}

Tensors gated_unit_grad_op(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& weights,
                           const Tensor& steps, const Tensor& g, float rate, float tiny) {
  Tensor dq = make(q.shape(), q), dk = make(k.shape(), k), dv = make(v.shape(), v),
         dweights = make(weights.shape(), weights);
  gated_unit_grad(in(q), in(k), in(v), in(weights), in(steps), in(g), gated_unit_of(q, weights, rate, tiny), out(dq),
                  out(dk), out(dv), out(dweights));
  return {dq, dk, dv, dweights};
}

Tensors focused_power_op(const Tensor& x, const MaybeTensor& shift, const Tensor& scale, float power, float epsilon,
                         int64_t) {
  Tensor y = make(x.shape(), x);
  FocusedPower{shifted(x, shift, scale), power, epsilon}.apply(out(y));
  return {y};
}

Tensors focused_power_grad_op(const Tensor& x, const MaybeTensor& shift, const Tensor& scale, const Tensor& g,
                              float power, float epsilon, int64_t wanted) {
  Tensor dx = make(x.shape(), x);
  Gradient dshift(shift, wanted, 1), dscale(scale, wanted, 2);
  FocusedPower{shifted(x, shift, scale), power, epsilon}.grad(in(g), out(dx), dshift.data, dscale.data);
  return {dx, dshift.tensor, dscale.tensor};
}

// Matrices are the last two of any number of axes.
Tensors newton_op(const Tensor& matrix, const Tensor& start, int64_t steps, int64_t wanted) {
  const Index m = matrix.shape().back(), count = matrix.numel() / (m * m);
  Tensor y = make(start.shape(), start), iterates = make({wanted ? count : 0, steps, m, m}, start);
  newton(in(matrix), in(start), count, m, steps, wanted ? out(iterates) : nullptr, out(y));
  return {y, iterates};
}

Tensors newton_grad_op(const Tensor& matrix, const Tensor& start, const Tensor& iterates, const Tensor& g,
                       int64_t steps, int64_t) {
  const Index m = matrix.shape().back();
  Tensor dmatrix = make(matrix.shape(), matrix), dstart = make(start.shape(), start);
  newton_grad(in(matrix), in(iterates), in(g), matrix.numel() / (m * m), m, steps, out(dmatrix), out(dstart));
  return {dmatrix, dstart};
}

// With a norm, the operator is x + keep * mlp(norm(x)).
Mlp mlp_layer(const Tensor& x, const MaybeTensor& norm_w, const MaybeTensor& norm_b, const Tensor& w1, const Tensor& b1,
              const Tensor& w2, const Tensor& b2, const MaybeTensor& keep, float epsilon, bool tanh_form) {
  const Index k = w1.shape()[0], hidden = w1.shape()[1], n = w2.shape()[1];
  const Index tokens = keep ? x.numel() / k / keep->numel() : 1;
  const Norm norm{in(norm_w), in(norm_b), epsilon};
  return {in(w1), in(b1), in(w2), in(b2), k, hidden, n, tanh_form, norm, in(keep), tokens};
}

Tensors mlp_op(const Tensor& x, const MaybeTensor& norm_w, const MaybeTensor& norm_b, const Tensor& w1,
               const Tensor& b1, const Tensor& w2, const Tensor& b2, const MaybeTensor& keep, float epsilon,
               bool tanh_form, int64_t wanted) {
  const Mlp layer = mlp_layer(x, norm_w, norm_b, w1, b1, w2, b2, keep, epsilon, tanh_form);
  const Index rows = x.numel() / layer.k;
  Tensor y = make(with_width(x, layer.n), x), stats = make({norm_w ? rows : 0, 2}, x);
  Tensor pre = make({wanted ? rows : 0, layer.hidden}, x);
  mlp(in(x), layer, rows, out(stats), wanted ? out(pre) : nullptr, out(y));
  return {y, stats, pre};
}

Tensors mlp_grad_op(const Tensor& x, const MaybeTensor& norm_w, const MaybeTensor& norm_b, const Tensor& w1,
                    const Tensor& b1, const Tensor& w2, const Tensor& b2, const MaybeTensor& keep, const Tensor& stats,
                    const Tensor& pre, const Tensor& g, float epsilon, bool tanh_form, int64_t wanted) {
  Gradient dx(x, wanted, 0), dnorm_w(norm_w, wanted, 1), dnorm_b(norm_b, wanted, 2);
  Gradient dw1(w1, wanted, 3), db1(b1, wanted, 4), dw2(w2, wanted, 5), db2(b2, wanted, 6), dkeep({}, 0, 7);
  mlp_grad(in(x), mlp_layer(x, norm_w, norm_b, w1, b1, w2, b2, keep, epsilon, tanh_form), in(stats), in(pre), in(g),
           x.numel() / w1.shape()[0], {dx.data, dnorm_w.data, dnorm_b.data, dw1.data, db1.data, dw2.data, db2.data});
  return {dx.tensor, dnorm_w.tensor, dnorm_b.tensor, dw1.tensor, db1.tensor, dw2.tensor, db2.tensor, dkeep.tensor};
}

void no_second_derivative(paddle::CustomOpKernelContext*) {
  PD_THROW("The compiled CPU kernels have no second derivatives.");
}

using Names = std::vector<std::string>;
using paddle::Grad;
using paddle::Optional;

// Registers an operator, its gradient, and a second derivative that refuses. The gradient takes the inputs (unless it
// can do without them), the outputs from number `kept` on, and the gradients of the first `results` outputs; it gives
// the gradients of the inputs.
bool add_operator(const std::string& name, Names inputs, Names outputs, Names attributes, paddle::KernelFunc forward,
                  paddle::KernelFunc backward, size_t kept = 1, size_t results = 1, bool with_inputs = true) {
  Names saved = with_inputs ? inputs : Names(), slopes;
  saved.insert(saved.end(), outputs.begin() + kept, outputs.end());
  for (size_t i = 0; i < results; ++i) saved.push_back(Grad(outputs[i]));
  for (const std::string& input : inputs) slopes.push_back(Grad(input));
  const auto build = [&](size_t order, Names takes, Names gives, paddle::KernelFunc kernel) {
    paddle::OpMetaInfoBuilder("ppattn_" + name, order)
        .Inputs(std::move(takes))
        .Outputs(std::move(gives))
        .Attrs(Names(attributes))
        .SetKernelFn(kernel);
  };
  build(0, inputs, outputs, forward);
  build(1, saved, slopes, backward);
  build(2, {Grad(slopes[0])}, {Grad(Grad(outputs[0]))}, no_second_derivative);
  return true;
}

#define KERNELS(name) PD_KERNEL(name##_op), PD_KERNEL(name##_grad_op)

[[maybe_unused]] const bool registered[] = {
    add_operator("linear", {"X", "W", Optional("B")}, {"Y"}, {"wanted: int64_t"}, KERNELS(linear)),
    add_operator("layer_norm", {"X", "W", "B"}, {"Y", "Stats"}, {"epsilon: float", "wanted: int64_t"},
                 KERNELS(layer_norm)),
    add_operator("split", {"X"}, {"Y0", "Y1", "Y2", "Y3"}, {"parts: int64_t"}, KERNELS(split), most_parts, most_parts,
                 false),
    add_operator("gelu", {"X"}, {"Y"}, {"tanh_form: bool"}, KERNELS(gelu)),
    add_operator("mlp", {"X", Optional("NormW"), Optional("NormB"), "W1", "B1", "W2", "B2", Optional("Keep")},
                 {"Y", "Stats", "Pre"}, {"epsilon: float", "tanh_form: bool", "wanted: int64_t"}, KERNELS(mlp)),
    add_operator("depthwise_conv", {"V", "Taps", Optional("Bias")}, {"Y"},
                 {"height: int64_t", "width: int64_t", "repeat: int64_t", "skip: bool", "wanted: int64_t"},
                 KERNELS(depthwise_conv)),
    add_operator("conv2d", {"X", "W", Optional("B")}, {"Y"}, {"stride: int64_t", "padding: int64_t", "wanted: int64_t"},
                 KERNELS(conv2d)),
    add_operator("newton", {"Matrix", "Start"}, {"Y", "Iterates"}, {"steps: int64_t", "wanted: int64_t"},
                 KERNELS(newton)),
    add_operator("signed_power", {"X", Optional("Shift"), "Scale", "Power"}, {"Y"},
                 {"heads: int64_t", "tiny: float", "wanted: int64_t"}, KERNELS(signed_power), 0),
    add_operator("direction_power", {"X"}, {"Y"}, {"heads: int64_t", "tiny: float"}, KERNELS(direction_power), 0),
    add_operator("gated_unit", {"Q", "K", "V", "Weights"}, {"Y", "Steps"}, {"rate: float", "tiny: float"},
                 KERNELS(gated_unit)),
    add_operator("focused_power", {"X", Optional("Shift"), "Scale"}, {"Y"},
                 {"power: float", "epsilon: float", "wanted: int64_t"}, KERNELS(focused_power)),
    add_operator("linear_attention", {"Q", "K", "V"}, {"Y", "States", "Normalisers"},
                 {"heads: int64_t", "polar: bool", "epsilon: float"}, KERNELS(linear_attention), 0),
    add_operator("rotary_attention", {"Q", "K", "V", Optional("Cos"), Optional("Sin")}, {"Y", "States", "Means", "Dens"},
                 {"heads: int64_t", "epsilon: float", "magnitude: float"}, KERNELS(rotary_attention)),
    add_operator("correlation", {"X", "G"}, {"Taps"}, {"height: int64_t", "width: int64_t"}, KERNELS(correlation), 1),
    add_operator("inline_attention", {"QKV", Optional("Taps")}, {"Y", "State"},
                 {"heads: int64_t", "height: int64_t", "width: int64_t", "scale: float"}, KERNELS(inline_attention)),
    add_operator("softmax_attention", {"Q", Optional("KV"), Optional("V"), Optional("Bias"), Optional("Mask")},
                 {"Y", "Norm"}, {"heads: int64_t", "scale: float", "gaussian: bool", "wanted: int64_t"},
                 KERNELS(softmax_attention)),
};

}  // namespace
}  // namespace ppattn

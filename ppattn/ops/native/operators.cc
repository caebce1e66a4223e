// The kernels as operators of Paddle: float32 on the CPU, with gradients.
//
// Matrix products go to the MKL that Paddle itself has loaded, and threads to its OpenMP runtime, so that no second
// thread pool competes for the cores. Work is cut by the number of threads only and partial sums are added in thread
// order: a fixed number of threads gives bit-identical results. Rows go through in chunks that stay in the L2 cache
// from one step to the next.
//
// `wanted` is a bit mask of the inputs whose gradients are asked for.

#include "attention.h"
#include "convolution.h"
#include "linear.h"
#include "mlp.h"
#include "paddle/phi/api/ext/op_meta_info.h"
#include "paddle/phi/api/ext/tensor_compat.h"

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

Tensors linear_mean_grad_op(const Tensor& x, const Tensor& w, const MaybeTensor& b, const Tensor& g,
                            const Tensor& gmean, int64_t wanted) {
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
  dynamic_conv_grad(in(v), in(taps), in(g), v.shape()[0], v.shape()[1], height, width, v.shape()[2], dv.data,
                    dtaps.data);
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
  return {q.shape()[0], q.shape()[1], M,       heads, C / heads, ldq, kv ? 2 * C : ldq, mask ? mask->shape()[0] : 1,
          scale,        in(bias),     in(mask)};
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
  mlp(in(x), layer, rows, nullptr, wanted ? out(pre) : nullptr, out(y));
  return {y, pre};
}

Tensors mlp_grad_op(const Tensor& x, const Tensor& w1, const Tensor& b1, const Tensor& w2, const Tensor& b2,
                    const Tensor& pre, const Tensor& g, bool tanh_form, int64_t wanted) {
  const Mlp layer = mlp_layer(w1, b1, w2, b2, tanh_form);
  Gradient dx(x, wanted, 0), dw1(w1, wanted, 1), db1(b1, wanted, 2), dw2(w2, wanted, 3), db2(b2, wanted, 4);
  mlp_grad(in(x), layer, nullptr, in(pre), in(g), x.numel() / layer.k,
           {dx.data, nullptr, nullptr, dw1.data, db1.data, dw2.data, db2.data});
  return {dx.tensor, dw1.tensor, db1.tensor, dw2.tensor, db2.tensor};
}

Tensors mlp_block_op(const Tensor& x, const Tensor& norm_w, const Tensor& norm_b, const Tensor& w1, const Tensor& b1,
                     const Tensor& w2, const Tensor& b2, float epsilon, bool tanh_form, int64_t wanted) {
  Mlp layer = mlp_layer(w1, b1, w2, b2, tanh_form);
  layer.norm = {in(norm_w), in(norm_b), epsilon};
  const Index rows = x.numel() / layer.k;
  Tensor y = make(x.shape(), x), stats = make({rows, 2}, x), pre = make({wanted ? rows : 0, layer.hidden}, x);
  mlp(in(x), layer, rows, out(stats), wanted ? out(pre) : nullptr, out(y));
  return {y, stats, pre};
}

Tensors mlp_block_grad_op(const Tensor& x, const Tensor& norm_w, const Tensor& norm_b, const Tensor& w1,
                          const Tensor& b1, const Tensor& w2, const Tensor& b2, const Tensor& stats, const Tensor& pre,
                          const Tensor& g, float epsilon, bool tanh_form, int64_t wanted) {
  Mlp layer = mlp_layer(w1, b1, w2, b2, tanh_form);
  layer.norm = {in(norm_w), in(norm_b), epsilon};
  Gradient dx(x, wanted, 0), dnorm_w(norm_w, wanted, 1), dnorm_b(norm_b, wanted, 2);
  Gradient dw1(w1, wanted, 3), db1(b1, wanted, 4), dw2(w2, wanted, 5), db2(b2, wanted, 6);
  mlp_grad(in(x), layer, in(stats), in(pre), in(g), x.numel() / layer.k,
           {dx.data, dnorm_w.data, dnorm_b.data, dw1.data, db1.data, dw2.data, db2.data});
  return {dx.tensor, dnorm_w.tensor, dnorm_b.tensor, dw1.tensor, db1.tensor, dw2.tensor, db2.tensor};
}

void no_second_derivative(paddle::CustomOpKernelContext*) {
  PD_THROW("The compiled CPU kernels have no second derivatives: call ppattn.ops.enable(False) first.");
}

using Names = std::vector<std::string>;
using paddle::Grad;
using paddle::Optional;

// Registers an operator, its gradient, and a second derivative that refuses. The gradient takes the inputs, the outputs
// but for the first `results`, and the gradients of these; it gives the gradients of the inputs.
bool add_operator(const std::string& name, Names inputs, Names outputs, Names attributes, paddle::KernelFunc forward,
                  paddle::KernelFunc backward, size_t results = 1) {
  Names saved = inputs, slopes;
  saved.insert(saved.end(), outputs.begin() + results, outputs.end());
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
    add_operator("linear_mean", {"X", "W", Optional("B")}, {"Y", "Mean"}, {"wanted: int64_t"}, KERNELS(linear_mean), 2),
    add_operator("layer_norm", {"X", "W", "B"}, {"Y", "Stats"}, {"epsilon: float", "wanted: int64_t"},
                 KERNELS(layer_norm)),
    add_operator("gelu", {"X"}, {"Y"}, {"tanh_form: bool"}, KERNELS(gelu)),
    add_operator("mlp", {"X", "W1", "B1", "W2", "B2"}, {"Y", "Pre"}, {"tanh_form: bool", "wanted: int64_t"},
                 KERNELS(mlp)),
    add_operator("mlp_block", {"X", "NormW", "NormB", "W1", "B1", "W2", "B2"}, {"Y", "Stats", "Pre"},
                 {"epsilon: float", "tanh_form: bool", "wanted: int64_t"}, KERNELS(mlp_block)),
    add_operator("dynamic_conv", {"V", "Taps"}, {"Y"}, {"height: int64_t", "width: int64_t", "wanted: int64_t"},
                 KERNELS(dynamic_conv)),
    add_operator("inline_attention", {"QKV", Optional("Taps")}, {"Y", "State"},
                 {"heads: int64_t", "height: int64_t", "width: int64_t", "scale: float"}, KERNELS(inline_attention)),
    add_operator("softmax_attention", {"Q", Optional("KV"), Optional("Bias"), Optional("Mask")}, {"Y", "Norm"},
                 {"heads: int64_t", "scale: float", "wanted: int64_t"}, KERNELS(softmax_attention)),
};

}  // namespace
}  // namespace ppattn

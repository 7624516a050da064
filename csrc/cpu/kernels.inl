// The table of one instruction set: entry points that pick the compute type.

namespace attn::ATTN_ISA {

template <template <class> class Kernel, class Params, class F>
ATTN_INLINE auto with_compute_type(const Params& p, F f) {
  return p.query.dtype == DType::f64 ? f(Kernel<double>()) : f(Kernel<float>());
}

ATTN_INLINE int64_t size_of_compute(const Problem& p) { return p.query.dtype == DType::f64 ? 8 : 4; }

inline int64_t forward_workspace(const ForwardParams& p) {
  const int64_t task = with_compute_type<Forward>(
      p, [&](auto kernel) { return typename decltype(kernel)::Buffers(p, nullptr).size; });
  return larger(task, p.value_dim * size_of_compute(p));
}
inline void forward(const ForwardParams& p, int64_t task, char* workspace) {
  with_compute_type<Forward>(p, [&](auto kernel) { kernel.run(p, task, workspace); });
}
inline void forward_merge(const ForwardParams& p, int64_t first, int64_t last, char* workspace) {
  with_compute_type<Forward>(p, [&](auto kernel) { kernel.merge(p, first, last, workspace); });
}

inline int64_t backward_workspace(const BackwardParams& p) {
  const int64_t task = with_compute_type<Backward>(p, [&](auto kernel) {
    using K = decltype(kernel);
    return larger(typename K::Buffers(p, nullptr, K::tiles_per_pass(p), p.keys_per_chunk).size,
                  typename K::Buffers(p, nullptr, 1, 0).size + kKeyTile * kRowTile * size_of_compute(p));
  });
  return larger(task, (larger(2 * p.value_dim, p.head_dim) + 2 * kVectorBytes) * size_of_compute(p));
}
inline void backward(const BackwardParams& p, int64_t task, char* workspace) {
  with_compute_type<Backward>(p, [&](auto kernel) { kernel.run(p, task, workspace); });
}
inline void backward_merge(const BackwardParams& p, int64_t first, int64_t last, char* workspace) {
  with_compute_type<Backward>(p, [&](auto kernel) { kernel.merge(p, first, last, workspace); });
}
inline void backward_delta(const BackwardParams& p, int64_t first, int64_t last, char* workspace) {
  with_compute_type<Backward>(p, [&](auto kernel) { kernel.delta(p, first, last, workspace); });
}
inline void backward_mask(const BackwardParams& p, int64_t task, char* workspace) {
  with_compute_type<Backward>(p, [&](auto kernel) { kernel.mask(p, task, workspace); });
}

inline constexpr Kernels table = {forward_workspace,  forward,        forward_merge,  backward_workspace,
                                  backward,           backward_merge, backward_delta, backward_mask};

}  // namespace attn::ATTN_ISA

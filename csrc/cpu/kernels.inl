// The table of one instruction set: entry points that pick the compute type.
#pragma once

#include "cpu/backward.inl"
#include "cpu/decode.inl"
#include "cpu/forward.inl"
#include "cpu/tangent.inl"

namespace attn::ATTN_ISA {

// Calls f with a value of the compute type: float, or double for float64.
template <class F>
ATTN_INLINE auto with_compute_type(const Problem& p, F f) {
  return p.query.dtype == DType::f64 ? f(double()) : f(float());
}

ATTN_INLINE int64_t size_of_compute(const Problem& p) { return p.query.dtype == DType::f64 ? 8 : 4; }

struct ForwardEntry {
  static int64_t workspace(const ForwardParams& p) {
    const int64_t task = with_compute_type(p, [&](auto t) {
      using T = decltype(t);
      return Decode<T>::takes(p) ? typename Decode<T>::Buffers(p, nullptr).size
                                 : typename Forward<Singles<T>>::Buffers(p, nullptr).size;
    });
    return larger(task, (2 * p.value_dim + kVectorBytes) * size_of_compute(p));  // merge: two rows
  }
  static void run(const ForwardParams& p, int64_t task, char* workspace) {
    with_compute_type(p, [&](auto t) {
      using T = decltype(t);
      Decode<T>::takes(p) ? Decode<T>::run(p, task, workspace) : Forward<Singles<T>>::run(p, task, workspace);
    });
  }
  static void merge(const ForwardParams& p, int64_t first, int64_t last, char* workspace) {
    with_compute_type(p, [&](auto t) { Forward<Singles<decltype(t)>>::merge(p, first, last, workspace); });
  }
};

struct TangentEntry {
  static int64_t workspace(const TangentParams& p) {
    return with_compute_type(p, [&](auto t) { return typename Tangent<decltype(t)>::Buffers(p, nullptr).size; });
  }
  static void run(const TangentParams& p, int64_t task, char* workspace) {
    with_compute_type(p, [&](auto t) { Tangent<decltype(t)>::run(p, task, workspace); });
  }
};

// Params: BackwardParams or SecondParams
template <class Params>
struct BackwardEntry {
  static int64_t workspace(const Params& p) {
    const int64_t task =
        with_compute_type(p, [&](auto t) { return Backward<Singles<decltype(t)>, Params>::workspace(p); });
    return larger(task, p.head_dim * size_of_compute(p));  // merge: one row
  }
  static void run(const Params& p, int64_t task, char* workspace) {
    with_compute_type(p, [&](auto t) { Backward<Singles<decltype(t)>, Params>::run(p, task, workspace); });
  }
  static void merge(const Params& p, int64_t first, int64_t last, char* workspace) {
    with_compute_type(p, [&](auto t) { Backward<Singles<decltype(t)>, Params>::merge(p, first, last, workspace); });
  }
  static void mask(const Params& p, int64_t task, char* workspace) {
    with_compute_type(p, [&](auto t) { Backward<Singles<decltype(t)>, Params>::mask(p, task, workspace); });
  }
  static constexpr BackwardKernels<Params> table = {workspace, run, merge, mask};
};

inline constinit const Kernels table = {
    {ForwardEntry::workspace, ForwardEntry::run, ForwardEntry::merge},
    {TangentEntry::workspace, TangentEntry::run},
    BackwardEntry<BackwardParams>::table,
    BackwardEntry<SecondParams>::table,
};

}  // namespace attn::ATTN_ISA

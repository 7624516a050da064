// The switch that puts attn::sdpa in the place of the built-in, for every caller in the process.
//
// PyTorch has one kernel of aten::scaled_dot_product_attention for all devices: a function composed of other operators
// (CompositeImplicitAutograd). It runs above autograd, and tracers decompose the operator with it. The first use of the
// switch puts another composed function in its place, which calls attn::sdpa or the original function. The new function
// stays there, because other threads may be reading the dispatcher's tables. Switching changes only a number.
#include <ATen/ATen.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <torch/library.h>

#include <array>
#include <atomic>

#include "operators/replace.h"
#include "operators/switches.h"

namespace attn {
namespace {

using at::Tensor;
using c10::DispatchKey;

using BuiltinOp = Operator<"aten::scaled_dot_product_attention", Tensor(Builtin)>;

Switch replacing;
std::atomic<int64_t> calls = 0;      // answered by attn::sdpa
std::atomic<int64_t> passed_on = 0;  // answered by the built-in while switched on

// While the library is being loaded, it calls replace_on(), which sets these functions.
constinit std::array<bool (*)(c10::Device), c10::COMPILE_TIME_MAX_DEVICE_TYPES> runs_on_of_type{};

}  // namespace

void replace_on(c10::DeviceType type, bool (*runs_on)(c10::Device)) {
  runs_on_of_type[static_cast<size_t>(type)] = runs_on;
}

bool is_switched_on() { return replacing.is_on(); }
void count_replaced_call() { calls.fetch_add(1, std::memory_order_relaxed); }

namespace {

// Whether the switch works on a device: on the CPU, and on CUDA if the library has kernels for CUDA. Tensors without
// data name the device that they stand for.
bool has_kernels(c10::Device device) {
  static const bool with_cuda = SdpaOp::handle().hasKernelForDispatchKey(DispatchKey::CUDA);
  const auto runs_on = runs_on_of_type[static_cast<size_t>(device.type())];
  return (device.is_cpu() || (with_cuda && device.is_cuda())) && (!runs_on || runs_on(device));
}

bool is_dense(const Tensor& t) { return t.layout() == at::kStrided && !t.is_nested(); }

// Whether attn::sdpa answers the call. Only the tensors' device, layouts and dtype decide this. Among the calls that it
// answers, attn::sdpa refuses only those that the built-in refuses or should refuse.
bool serves(const Call& x) {
  const auto dtype = x.query.scalar_type();
  return has_kernels(x.query.device()) && is_dense(x.query) && is_dense(x.key) && is_dense(x.value) &&
         (!x.attn_mask || is_dense(*x.attn_mask)) &&
         (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kDouble);
}

Tensor sdpa_or_builtin(const Call& call) {
  if (is_switched_on()) {
    if (serves(call)) {
      count_replaced_call();
      return SdpaOp::call(call);
    }
    passed_on.fetch_add(1, std::memory_order_relaxed);
  }
  return std::apply(at::native::scaled_dot_product_attention, Builtin::fields(call));
}

torch::Library put_in_place(DispatchKey key) {
  torch::Library library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  library.impl("scaled_dot_product_attention", BuiltinOp::kernel<sdpa_or_builtin>);
  return library;
}

// PyTorch warns once in a process, when the first kernel replaces another. This replacement is intended, so its warning
// is silenced. Under WarnAlways, PyTorch does not count this warning as its single one, so it can still warn if another
// kernel is replaced.
std::array<torch::Library, 3> put_in_place() {
  struct Silence : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silence;
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  const c10::WarningUtils::WarnAlways always;
  // PyTorch registers the same function once more for vmap.
  return {put_in_place(DispatchKey::CompositeImplicitAutograd), put_in_place(DispatchKey::FuncTorchVmapMode),
          put_flash_attention_in_place()};
}

int64_t replace_sdpa(int64_t change) {
  static const auto for_good = put_in_place();
  return replacing.change(change);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(attn, m) {
  m.impl("_replace_sdpa", replace_sdpa);
  m.impl("_has_kernels", has_kernels);
  m.impl("_replaced_calls", [] { return std::tuple(calls.load(), passed_on.load()); });
}

}  // namespace attn

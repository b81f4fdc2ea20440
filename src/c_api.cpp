// The C interface: translates evenkeel.h's structs, and exceptions into status codes. Computes nothing.
#include "evenkeel.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "attention/attention.h"
#include "attention/attention_cuda.h"
#include "base/error.h"
#include "base/threads.h"
#include "diagnosis/conform.h"
#include "diagnosis/probes.h"
#include "numerics/cpu.h"

namespace {

using namespace evenkeel;

thread_local std::string last_error, kernel_why;

// Runs a call's body; what it throws becomes a status and the thread's last error.
template <class Body>
int32_t guarded(Body body) noexcept {
  const auto fail = [](int32_t status, const char* words) noexcept {
    try {
      last_error = words;
    } catch (...) {
      last_error.clear();  // no memory for the words
    }
    return status;
  };
  try {
    body();
    return EVENKEEL_OK;
  } catch (const std::invalid_argument& error) {
    return fail(EVENKEEL_BAD_ARGUMENT, error.what());
  } catch (const DataError& error) {
    return fail(EVENKEEL_ENVIRONMENT, error.what());
  } catch (const std::exception& error) {
    return fail(EVENKEEL_INTERNAL, error.what());
  } catch (...) {
    return fail(EVENKEEL_INTERNAL, "an unknown exception");
  }
}

evenkeel_attention defaults() {
  evenkeel_attention a;
  std::memset(&a, 0, sizeof a);
  a.struct_size = sizeof a;
  a.window_left = a.window_right = -1;
  a.tile_keys = 64;
  a.aligned = 1;
  return a;
}

// The caller's struct as this library's: fields an older caller lacks keep `known`'s values; what a newer one has
// beyond ours must be zero, for we would not do what it asks.
template <class Struct>
Struct adopt(const char* name, const Struct* given, Struct known, size_t least) {
  require(given != nullptr, "expected {}, got NULL", name);
  uint64_t size = 0;
  std::memcpy(&size, given, sizeof size);
  require(size >= least && size <= 1 << 16, "expected {}.struct_size from {} on (here it is {}), got {}",
          name, least, sizeof(Struct), size);
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (size_t n = sizeof(Struct); n < size; ++n)
    require(bytes[n] == 0,
            "{} is of a newer header (struct_size {}, here {}) and asks for what this library does not have",
            name, size, sizeof(Struct));
  std::memcpy(&known, given, std::min<size_t>(size, sizeof(Struct)));
  return known;
}

evenkeel_attention adopt(const evenkeel_attention* given) {
  const evenkeel_attention a =
      adopt("evenkeel_attention", given, defaults(), offsetof(evenkeel_attention, scale));
  require(a.device == EVENKEEL_CPU || a.device == EVENKEEL_CUDA,
          "expected device EVENKEEL_CPU (0) or EVENKEEL_CUDA (1), got {}", a.device);
  require(a.type == EVENKEEL_BF16 || a.type == EVENKEEL_FP32 || a.type == EVENKEEL_FP64,
          "expected type EVENKEEL_BF16 (0), EVENKEEL_FP32 (1) or EVENKEEL_FP64 (2), got {}", a.type);
  require(a.plan != nullptr, "expected a plan such as \"flash2\", got NULL");
  return a;
}

std::vector<PrecisionPlan> plans_of(const evenkeel_attention& a) {
  const ScopedPlan scoped = ScopedPlan::parse(a.plan);
  const auto layer = static_cast<int>(a.layer);
  if (!scoped.is_scoped()) return {scoped.at(layer, 0)};
  require(a.H >= 1 && a.H <= 1 << 20, "expected H from 1 to 2^20 with a scoped plan, got {}", a.H);
  std::vector<PrecisionPlan> plans;
  for (int head = 0; head < a.H; ++head) plans.push_back(scoped.at(layer, head));
  return plans;
}

// --- GPU

DeviceTensor device_tensor(const evenkeel_tensor& t) {
  DeviceTensor tensor{t.data, {}};
  std::copy_n(t.stride, 4, tensor.stride.begin());
  return tensor;
}

CudaAttention cuda_problem(const evenkeel_attention& a) {
  require(a.type != EVENKEEL_FP64,
          "the GPU: expected type EVENKEEL_BF16 or EVENKEEL_FP32, got EVENKEEL_FP64");
  CudaAttention p;
  p.B = a.B;
  p.H = a.H;
  p.G = a.G;
  p.T = a.T;
  p.N = a.N;
  p.D = a.D;
  p.type = a.type == EVENKEEL_BF16 ? TensorType::bf16 : TensorType::fp32;
  p.plans = plans_of(a);
  p.scale = a.scale;
  p.softcap = a.softcap;
  p.causal = a.causal != 0;
  p.window_left = a.window_left;
  p.window_right = a.window_right;
  p.query_lengths = a.query_lengths;
  p.key_lengths = a.key_lengths;
  p.query_offsets = a.query_offsets;
  p.key_offsets = a.key_offsets;
  p.query_rows = a.query_rows;
  p.key_rows = a.key_rows;
  p.visible = device_tensor(a.visible);
  p.tile_keys = a.tile_keys;
  p.step = a.step;
  p.layer = a.layer;
  p.device_step = a.device_step;
  p.aligned = a.aligned != 0;
  return p;
}

// --- CPU

bool rounds_nothing(const PrecisionPlan& plan) {
  return plan.stabiliser == Stabiliser::none && std::all_of(plan.rounding.begin(), plan.rounding.end(),
                                                            [](const Rounding& r) { return is_identity(r); });
}

// A CPU request in attention.h's words. The lengths are owned here: config.mask looks at them.
struct CpuRequest {
  explicit CpuRequest(const evenkeel_attention& a) : shape(a) {
    require(a.type != EVENKEEL_BF16,
            "the CPU: expected type EVENKEEL_FP32 or EVENKEEL_FP64, got EVENKEEL_BF16");
    require(!a.query_offsets && !a.key_offsets,
            "the CPU: expected padded sequences, got packed ones (query_offsets or key_offsets)");
    require(!a.device_step, "the CPU: expected the step in `step`, got device_step");
    const std::pair<const char*, int64_t> sizes[] = {{"B", a.B}, {"H", a.H}, {"G", a.G},
                                                     {"T", a.T}, {"N", a.N}, {"D", a.D}};
    int64_t elements = 1;
    for (const auto& [name, size] : sizes)
      require(size >= 1 && size <= INT32_MAX, "the CPU: expected {} from 1 to 2^31 - 1, got {}", name, size);
    for (int64_t size : {a.B, a.H, std::max(a.T, a.N), a.D})
      require(!__builtin_mul_overflow(elements, size, &elements) && elements < int64_t{1} << 48,
              "the CPU: expected fewer than 2^48 elements a tensor");
    config.plans = plans_of(a);
    for (const PrecisionPlan& plan : config.plans)
      require(!is_definition() || rounds_nothing(plan),
              "the CPU: expected a plan that rounds nothing with FP64 tensors, such as \"fp32\", got \"{}\"",
              to_string(plan));
    config.scale = a.scale;
    config.softcap = a.softcap;
    config.tile_keys = a.tile_keys;
    config.step = a.step;
    config.layer = a.layer;
    config.allow_nonfinite = true;  // as on the GPU, which does not look
    config.mask.causal = a.causal != 0;
    config.mask.window_left = a.window_left;
    config.mask.window_right = a.window_right;
    if (a.query_lengths) query_lengths.assign(a.query_lengths, a.query_lengths + a.B);
    if (a.key_lengths) key_lengths.assign(a.key_lengths, a.key_lengths + a.B);
    config.mask.query_lengths = query_lengths;
    config.mask.key_lengths = key_lengths;
    if (a.visible.data) config.mask.visible = view<const uint8_t>("visible", a.visible, {a.B, a.H, a.T, a.N});
  }
  CpuRequest(const CpuRequest&) = delete;
  CpuRequest& operator=(const CpuRequest&) = delete;

  template <class T>
  View<T> view(const char* name, const evenkeel_tensor& t, const std::array<int64_t, 4>& sizes) const {
    require(t.data != nullptr, "the CPU: expected a tensor {}, got NULL", name);
    View<T> result{static_cast<T*>(t.data), sizes, {}};
    std::copy_n(t.stride, 4, result.stride.begin());
    return result;
  }
  template <class T>
  View<T> query(const char* name, const evenkeel_tensor& t) const {
    return view<T>(name, t, {shape.B, shape.H, shape.T, shape.D});
  }
  template <class T>
  View<T> key(const char* name, const evenkeel_tensor& t) const {
    return view<T>(name, t, {shape.B, shape.G, shape.N, shape.D});
  }
  template <class T>
  View<T> rows(T* data) const {
    return data ? contiguous_view(data, {shape.B, shape.H, shape.T, 1}) : View<T>{};
  }
  size_t row_count() const { return static_cast<size_t>(shape.B * shape.H * shape.T); }
  bool is_definition() const { return shape.type == EVENKEEL_FP64; }
  template <class Real>
  AttentionInputsOf<Real> inputs(const evenkeel_tensor& q, const evenkeel_tensor& k,
                                 const evenkeel_tensor& v) const {
    return {query<const Real>("q", q), key<const Real>("k", k), key<const Real>("v", v)};
  }

  // `saved` is o_for_delta (B, H, T, D), row_max and row_sum (B, H, T).
  size_t saved_bytes() const {
    return is_definition() ? 0 : row_count() * static_cast<size_t>(shape.D + 2) * sizeof(float);
  }
  AttentionForward forward(const evenkeel_tensor& o, float* lse, void* saved) const {
    require(lse != nullptr, "the CPU: expected lse, got NULL");
    require(saved != nullptr, "the CPU: expected saved of {} bytes, got NULL", saved_bytes());
    require(reinterpret_cast<uintptr_t>(saved) % alignof(float) == 0, "the CPU: expected saved aligned to {}",
            alignof(float));
    auto* floats = static_cast<float*>(saved);
    const size_t features = row_count() * static_cast<size_t>(shape.D);
    AttentionForward out{};
    out.o = query<float>("o", o);
    out.lse = rows(lse);
    out.o_for_delta = contiguous_view(floats, {shape.B, shape.H, shape.T, shape.D});
    out.row_max = rows(floats + features);
    out.row_sum = rows(floats + features + row_count());
    return out;
  }

  const evenkeel_attention& shape;
  AttentionConfig config;
  std::vector<int64_t> query_lengths, key_lengths;
};

void copy(const Tensor<double>& from, View<double> to) {
  const auto [B, H, rows, D] = to.shape;
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t d = 0; d < D; ++d) *to.at(b, h, i, d) = *from.view().at(b, h, i, d);
}
void narrow(const std::vector<double>& from, float* to) {
  std::transform(from.begin(), from.end(), to, [](double x) { return static_cast<float>(x); });
}

// FP64: the definition. Nothing is saved; backward computes everything again.
void forward_definition(const CpuRequest& request, const evenkeel_forward& pass) {
  require(pass.lse != nullptr, "the CPU: expected lse, got NULL");
  require(pass.ties == nullptr, "the CPU: expected no ties with FP64 tensors");
  const View<double> o = request.query<double>("o", pass.o);
  const AttentionReference exact =
      attention_reference(request.config, request.inputs<double>(pass.q, pass.k, pass.v));
  copy(exact.o, o);
  narrow(exact.lse.values(), pass.lse);
}

void backward_definition(const CpuRequest& request, const evenkeel_backward& pass) {
  require(!pass.residual && !pass.residual_floor,
          "the CPU: expected no residual and no residual_floor with FP64 tensors");
  const View<double> dq = request.query<double>("dq", pass.dq), dk = request.key<double>("dk", pass.dk),
                     dv = request.key<double>("dv", pass.dv);
  const AttentionReference exact =
      attention_reference(request.config, request.inputs<double>(pass.q, pass.k, pass.v),
                          request.query<const double>("grad_output", pass.grad_output));
  copy(exact.dq, dq);
  copy(exact.dk, dk);
  copy(exact.dv, dv);
  if (pass.delta) narrow(exact.delta.values(), pass.delta);
}

void forward_cpu(const evenkeel_attention& a, const evenkeel_forward& pass, void* stream) {
  require(stream == nullptr, "the CPU: expected no stream, got one");
  const CpuRequest request(a);
  if (request.is_definition()) return forward_definition(request, pass);
  AttentionForward out = request.forward(pass.o, pass.lse, pass.saved);
  out.ties = request.rows(pass.ties);
  attention_forward(request.config, request.inputs<float>(pass.q, pass.k, pass.v), out);
}

void backward_cpu(const evenkeel_attention& a, const evenkeel_backward& pass, void* stream) {
  require(stream == nullptr, "the CPU: expected no stream, got one");
  require(pass.delta_error == nullptr, "the CPU: expected no delta_error, which only the GPU gives");
  const CpuRequest request(a);
  if (request.is_definition()) return backward_definition(request, pass);
  AttentionBackward out{};
  out.dq = request.query<float>("dq", pass.dq);
  out.dk = request.key<float>("dk", pass.dk);
  out.dv = request.key<float>("dv", pass.dv);
  out.delta = request.rows(pass.delta);
  // The CPU's residuals are FP64.
  std::vector<double> residual(pass.residual ? request.row_count() : 0),
      floor(pass.residual_floor ? request.row_count() : 0);
  if (pass.residual) out.residual = request.rows(residual.data());
  if (pass.residual_floor) out.residual_floor = request.rows(floor.data());
  attention_backward(request.config, request.inputs<float>(pass.q, pass.k, pass.v),
                     request.query<const float>("grad_output", pass.grad_output),
                     request.forward(pass.o, const_cast<float*>(pass.lse), const_cast<void*>(pass.saved)),
                     out);
  narrow(residual, pass.residual);
  narrow(floor, pass.residual_floor);
}

// --- Conform

const ConformCase& family_named(const char* name) {
  require(name != nullptr, "expected the name of a family such as \"ties_2_tail\", got NULL");
  for (const ConformCase& c : conform_cases())
    if (c.name == name) return c;
  throw std::invalid_argument(
      fmt::format("unknown family '{}': expected a name that evenkeel_conform_family gives", name));
}

// The caller's function as conform's kernel.
void call_kernel(evenkeel_conform_kernel kernel, void* context, const AttentionConfig& config,
                 const AttentionInputs& in, View<const float> grad_output, AttentionBuffers& out) {
  const AttentionShape shape(config, in);
  std::vector<uint8_t> visible;
  if (const View<const uint8_t>& mask = config.mask.visible; mask.present())
    for (int64_t h = 0; h < shape.H; ++h)
      for (int64_t i = 0; i < shape.T; ++i)
        for (int64_t j = 0; j < shape.N; ++j) visible.push_back(*mask.at(0, h, i, j) != 0);
  evenkeel_conform_problem p{};
  p.struct_size = sizeof p;
  p.H = shape.H, p.T = shape.T, p.N = shape.N, p.D = shape.D;
  p.causal = config.mask.causal;
  p.visible = visible.empty() ? nullptr : visible.data();
  p.q = in.q.data, p.k = in.k.data, p.v = in.v.data, p.grad_output = grad_output.data;
  p.o = out.o.values().data(), p.dq = out.dq.values().data();
  p.dk = out.dk.values().data(), p.dv = out.dv.values().data();
  const int32_t status = kernel(context, &p);
  require(status == 0, "[conform] the kernel under test returned {}, expected 0", status);
  read_off_outputs(config, in, grad_output, out);
}

}  // namespace

int32_t evenkeel_abi_version(void) { return EVENKEEL_ABI_VERSION; }
const char* evenkeel_version(void) { return EVENKEEL_VERSION; }
const char* evenkeel_last_error(void) { return last_error.c_str(); }

void evenkeel_attention_defaults(evenkeel_attention* attention, size_t size) {
  if (!attention) return;
  evenkeel_attention known = defaults();
  known.struct_size = size;
  std::memset(attention, 0, size);
  std::memcpy(attention, &known, std::min(size, sizeof known));
}

int32_t evenkeel_attention_sizes(const evenkeel_attention* attention, evenkeel_sizes* sizes) {
  return guarded([&] {
    const evenkeel_attention a = adopt(attention);
    require(sizes != nullptr, "expected sizes to write to, got NULL");
    if (a.device == EVENKEEL_CPU) {
      *sizes = {CpuRequest(a).saved_bytes(), 0};
    } else {
      const CudaSizes found = cuda_attention_sizes(cuda_problem(a), a.with_facts != 0);
      *sizes = {found.saved, found.workspace};
    }
  });
}

int32_t evenkeel_attention_kernel(const evenkeel_attention* attention, const char** kernel,
                                  const char** why) {
  return guarded([&] {
    const evenkeel_attention a = adopt(attention);
    require(kernel != nullptr && why != nullptr, "expected kernel and why to write to, got NULL");
    if (a.device == EVENKEEL_CPU) {
      kernel_why =
          fmt::format("device is the CPU: {} kernels, {} threads", name(cpu_target()), thread_count());
      *kernel = "cpu";
    } else {
      const CudaDevice device = cuda_device();
      require_data(device.present, "no GPU: {}", device.why);
      const KernelChoice choice = choose_kernel(device, cuda_problem(a), a.with_facts != 0);
      kernel_why = choice.why;
      *kernel = name(choice.kernel);
    }
    *why = kernel_why.c_str();
  });
}

int32_t evenkeel_attention_forward(const evenkeel_attention* attention, const evenkeel_forward* pass,
                                   void* stream) {
  return guarded([&] {
    const evenkeel_attention a = adopt(attention);
    const evenkeel_forward f =
        adopt("evenkeel_forward", pass, evenkeel_forward{}, offsetof(evenkeel_forward, ties));
    if (a.device == EVENKEEL_CPU) return forward_cpu(a, f, stream);
    attention_forward_cuda(cuda_problem(a), {device_tensor(f.q), device_tensor(f.k), device_tensor(f.v)},
                           {device_tensor(f.o), f.lse, f.saved, f.ties}, a.with_facts != 0, f.workspace,
                           stream);
  });
}

int32_t evenkeel_attention_backward(const evenkeel_attention* attention, const evenkeel_backward* pass,
                                    void* stream) {
  return guarded([&] {
    const evenkeel_attention a = adopt(attention);
    const evenkeel_backward b =
        adopt("evenkeel_backward", pass, evenkeel_backward{}, offsetof(evenkeel_backward, delta));
    if (a.device == EVENKEEL_CPU) return backward_cpu(a, b, stream);
    attention_backward_cuda(
        cuda_problem(a), {device_tensor(b.q), device_tensor(b.k), device_tensor(b.v)},
        device_tensor(b.grad_output),
        {device_tensor(b.o), const_cast<float*>(b.lse), const_cast<void*>(b.saved), nullptr},
        {device_tensor(b.dq), device_tensor(b.dk), device_tensor(b.dv), b.delta, b.residual, b.residual_floor,
         b.delta_error},
        a.with_facts != 0, b.workspace, stream);
  });
}

const char* evenkeel_conform_family(int32_t index, const char** description, int32_t* masked) {
  const std::vector<ConformCase>& cases = conform_cases();
  if (index < 0 || static_cast<size_t>(index) >= cases.size()) return nullptr;
  const ConformCase& c = cases[static_cast<size_t>(index)];
  if (description) *description = c.description.data();  // literals: they end with a zero
  if (masked) *masked = c.masked_rows;
  return c.name.data();
}

int32_t evenkeel_conform(const evenkeel_conform_request* request, evenkeel_conform_kernel kernel,
                         void* context, evenkeel_conform_result* result) {
  return guarded([&] {
    const evenkeel_conform_request r = adopt("evenkeel_conform_request", request, evenkeel_conform_request{},
                                             sizeof(evenkeel_conform_request));
    require(kernel != nullptr, "expected a kernel to judge, got NULL");
    require(r.plan != nullptr, "expected a plan such as \"flash2\", got NULL");
    require(r.rows >= 1 && r.rows <= 100'000'000, "expected rows from 1 to 10^8, got {}", r.rows);
    const evenkeel_conform_result to =
        adopt("evenkeel_conform_result", result, evenkeel_conform_result{}, sizeof(evenkeel_conform_result));
    std::vector<ConformPlan> plans = {{r.plan, parse_plan(r.plan), {}}};
    conform(
        plans, {family_named(r.family)}, r.rows, r.seed,
        [&](const AttentionConfig& config, const AttentionInputs& in, View<const float> grad_output,
            AttentionBuffers& out) { call_kernel(kernel, context, config, in, grad_output, out); },
        {}, /*constant_feature=*/true);
    const ConformResult& found = plans[0].results[0];
    evenkeel_conform_result told{};
    told.struct_size = to.struct_size;
    told.rows = found.rows, told.nonfinite = found.nonfinite;
    told.passes = found.passes(), told.verdict = found.verdict();
    told.residual_mean = found.residual.mean(), told.residual_z = found.residual.z();
    told.residual_rms = found.residual.rms(), told.residual_bound = found.noise_bound();
    told.o_bias = found.o.mean(), told.o_z = found.o.z();
    told.dq_bias = found.dq.mean(), told.dq_z = found.dq.z();
    told.dk_bias = found.dk.mean(), told.dk_z = found.dk.z();
    told.dv_bias = found.dv.mean(), told.dv_z = found.dv.z();
    *result = told;
  });
}

const char* evenkeel_probe_field(int32_t index) {
  if (index < 0 || static_cast<size_t>(index) >= kProbeFields.size()) return nullptr;
  return kProbeFields[static_cast<size_t>(index)].name.data();
}

int32_t evenkeel_probe(const void* capture, size_t bytes, double* values, size_t count) {
  return guarded([&] {
    require(capture != nullptr && values != nullptr, "expected a capture and values to write to, got NULL");
    const Capture c = read_capture(
        Safetensors({static_cast<const std::byte*>(capture), bytes}, "the capture"), "the capture");
    const size_t expected = c.heads.size() * kProbeFields.size();
    require(count == expected, "expected room for {} numbers ({} heads, {} probes), got {}", expected,
            c.heads.size(), kProbeFields.size(), count);
    for (const HeadProbe& head : probe(c))
      for (const ProbeField& field : kProbeFields) *values++ = head.*field.value;
  });
}

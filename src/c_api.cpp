// The C interface: translates evenkeel.h's structs, and exceptions into status codes. Computes nothing.
#include "evenkeel.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "attention/attention.h"
#include "attention/kernel_families.h"
#include "attention/round_tensor.h"
#include "base/error.h"
#include "diagnosis/conform.h"
#include "diagnosis/conform_report.h"
#include "diagnosis/drift_guard.h"
#include "diagnosis/form_struct.h"
#include "diagnosis/probes.h"
#include "diagnosis/spectrum.h"

namespace {

using namespace evenkeel;

thread_local std::string last_error, kernel_why, plan_text, conform_advice, kernel_words;

constexpr int64_t kMostRounded = int64_t{1} << 48;  // numbers of one tensor: beyond, an address overflows

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

// The caller's struct as this library's. Fields that an older caller lacks keep `known`'s values. What a newer one has
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
  require(
      a.type >= EVENKEEL_BF16 && a.type <= EVENKEEL_FP16,
      "expected type EVENKEEL_BF16 (0), EVENKEEL_FP32 (1), EVENKEEL_FP64 (2) or EVENKEEL_FP16 (3), got {}",
      a.type);
  require(a.plan != nullptr, "expected a plan such as \"flash2\", got NULL");
  return a;
}

std::vector<PrecisionPlan> plans_of(const evenkeel_attention& a) {
  const ScopedPlan scoped = ScopedPlan::parse(a.plan);
  const auto layer = static_cast<int>(a.layer);
  if (!scoped.is_scoped()) return {scoped.at(layer, 0)};
  require(a.H >= 1 && a.H <= 1 << 20, "expected H from 1 to 2^20 with a scoped plan, got {}", a.H);
  // How many layers there are the caller alone knows.
  scoped.check_scopes(/*layers=*/INT64_MAX, a.H);
  std::vector<PrecisionPlan> plans;
  for (int head = 0; head < a.H; ++head) plans.push_back(scoped.at(layer, head));
  return plans;
}

DeviceTensor tensor(const evenkeel_tensor& t) {
  DeviceTensor result{t.data, {}};
  std::copy_n(t.stride, 4, result.stride.begin());
  return result;
}

AttentionProblem problem_of(const evenkeel_attention& a) {
  const auto counted = [](const auto* numbers, int64_t count) {
    return std::span(numbers, numbers ? static_cast<size_t>(std::max<int64_t>(count, 0)) : 0);
  };
  const auto of_sequences = [&](const int32_t* numbers) { return counted(numbers, a.B); };
  AttentionProblem p;
  p.B = a.B, p.H = a.H, p.G = a.G, p.T = a.T, p.N = a.N, p.D = a.D, p.Dv = a.Dv;
  p.type = static_cast<TensorType>(a.type);
  p.plans = plans_of(a);
  p.scale = a.scale;
  p.softcap = a.softcap;
  p.slopes = counted(a.slopes, a.H);
  p.sinks = counted(a.sinks, a.H);
  p.mask.causal = a.causal != 0;
  p.mask.window_left = a.window_left;
  p.mask.window_right = a.window_right;
  p.mask.query_lengths = of_sequences(a.query_lengths);
  p.mask.key_lengths = of_sequences(a.key_lengths);
  p.mask.query_offsets = of_sequences(a.query_offsets);
  p.mask.key_offsets = of_sequences(a.key_offsets);
  p.mask.query_rows = a.query_rows;
  p.mask.key_rows = a.key_rows;
  if (a.visible.data) {
    p.mask.visible = {static_cast<const uint8_t*>(a.visible.data), {a.B, a.H, a.T, a.N}, {}};
    std::copy_n(a.visible.stride, 4, p.mask.visible.stride.begin());
  }
  p.tile_keys = a.tile_keys;
  p.step = a.step;
  p.layer = a.layer;
  p.device_step = a.device_step;
  p.with_facts = a.with_facts != 0;
  p.aligned = a.aligned != 0;
  p.allow_nonfinite = true;  // nothing is looked at beforehand, as on the GPU
  return p;
}
static_assert(static_cast<int>(TensorType::bf16) == EVENKEEL_BF16 &&
              static_cast<int>(TensorType::fp32) == EVENKEEL_FP32 &&
              static_cast<int>(TensorType::fp64) == EVENKEEL_FP64 &&
              static_cast<int>(TensorType::fp16) == EVENKEEL_FP16);

AttentionCall call_of(const evenkeel_attention& a) {
  const AttentionProblem problem = problem_of(a);
  if (a.device == EVENKEEL_CPU) return resolve(problem, Cpu{});
  if (!a.with_grad_lse) return resolve(problem, cuda_device());
  return {kernel_family(choose_kernel(problem, cuda_device(), Feature::grad_lse).kernel), problem};
}
KernelChoice choice_of(const evenkeel_attention& a) {
  const AttentionProblem problem = problem_of(a);
  if (a.device == EVENKEEL_CPU) return resolve(problem, Cpu{}).choice();
  return a.with_grad_lse ? choose_kernel(problem, cuda_device(), Feature::grad_lse)
                         : choose_kernel(problem, cuda_device());
}

// In some kernel: the Hopper family rounds the O of delta stochastically where the stabiliser keeps it wide.
bool draws_random_numbers(const PrecisionPlan& plan) {
  const StabiliserRules& rules = rules_of(plan.stabiliser);
  return rules.shift == ShiftRule::dither || rules.shift == ShiftRule::paper_capped ||
         rules.output != OutputRule::planned ||
         std::any_of(plan.rounding.begin(), plan.rounding.end(),
                     [](const Rounding& r) { return r.mode == RoundingMode::stochastic; });
}

// --- Conform

// The caller's function as conform's kernel.
void call_kernel(evenkeel_conform_kernel kernel, void* context, const AttentionProblem& problem,
                 const AttentionInputs& in, View<const float> grad_output, AttentionBuffers& out) {
  const AttentionProblem whole = problem_of(problem, in);
  std::vector<uint8_t> visible;
  if (const View<const uint8_t>& mask = problem.mask.visible; mask.present())
    for (int64_t h = 0; h < whole.H; ++h)
      for (int64_t i = 0; i < whole.T; ++i)
        for (int64_t j = 0; j < whole.N; ++j) visible.push_back(*mask.at(0, h, i, j) != 0);
  evenkeel_conform_problem p{};
  p.struct_size = sizeof p;
  p.H = whole.H, p.T = whole.T, p.N = whole.N, p.D = whole.D;
  p.causal = whole.mask.causal;
  p.visible = visible.empty() ? nullptr : visible.data();
  p.q = in.q.data, p.k = in.k.data, p.v = in.v.data, p.grad_output = grad_output.data;
  p.o = out.o.values().data(), p.dq = out.dq.values().data();
  p.dk = out.dk.values().data(), p.dv = out.dv.values().data();
  const int32_t status = kernel(context, &p);
  require(status == 0, "[conform] the kernel under test returned {}, expected 0", status);
}

struct LastJudgement {
  std::string json, text, junit, badge, plan;
  std::optional<ConformForm> smallest;
};
thread_local LastJudgement last_judgement;

FormType form_type_of(int32_t type) {
  require(type == EVENKEEL_BF16 || type == EVENKEEL_FP32 || type == EVENKEEL_FP16,
          "expected a type of EVENKEEL_BF16, EVENKEEL_FP32 or EVENKEEL_FP16, got {}", type);
  return type == EVENKEEL_BF16 ? FormType::bf16 : type == EVENKEEL_FP32 ? FormType::fp32 : FormType::fp16;
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

int32_t evenkeel_plan_draws(const char* plan, int32_t* draws) {
  return guarded([&] {
    require(plan != nullptr && draws != nullptr, "expected a plan and draws to write to, got NULL");
    const ScopedPlan scoped = ScopedPlan::parse(plan);
    // Which layers and heads there are is not known here: any of them may draw.
    *draws = scoped.is_scoped() || draws_random_numbers(scoped.at(0, 0)) ? 1 : 0;
  });
}

int32_t evenkeel_plan_of_head(const char* plan, int32_t layer, int32_t head, const char** text) {
  return guarded([&] {
    require(plan != nullptr && text != nullptr, "expected a plan and text to write to, got NULL");
    require(layer >= 0 && head >= 0, "expected a layer and a head from 0 on, got {} and {}", layer, head);
    plan_text = to_string(ScopedPlan::parse(plan).at(layer, head));
    *text = plan_text.c_str();
  });
}

int32_t evenkeel_attention_sizes(const evenkeel_attention* attention, evenkeel_sizes* sizes) {
  return guarded([&] {
    const evenkeel_attention a = adopt(attention);
    require(sizes != nullptr, "expected sizes to write to, got NULL");
    const PassSizes found = call_of(a).sizes();
    *sizes = {found.saved, found.workspace};
  });
}

int32_t evenkeel_attention_kernel(const evenkeel_attention* attention, const char** kernel,
                                  const char** why) {
  return guarded([&] {
    const evenkeel_attention a = adopt(attention);
    require(kernel != nullptr && why != nullptr, "expected kernel and why to write to, got NULL");
    const KernelChoice choice = choice_of(a);
    kernel_why = choice.why;
    *kernel = choice.kernel.data();  // a literal: it ends with a zero
    *why = kernel_why.c_str();
  });
}

int32_t evenkeel_attention_family(int32_t index, evenkeel_kernel_family* family) {
  return guarded([&] {
    const evenkeel_kernel_family given =
        adopt("evenkeel_kernel_family", family, evenkeel_kernel_family{}, sizeof(evenkeel_kernel_family));
    const auto families = kernel_families();
    require(index >= 0 && static_cast<size_t>(index) < families.size(),
            "expected the index of a family of kernels, from 0 to {}, got {}", families.size() - 1, index);
    const KernelFamily& found = families[static_cast<size_t>(index)];
    *family = {given.struct_size,
               found.name,
               found.on_gpu ? EVENKEEL_CUDA : EVENKEEL_CPU,
               found.limits.types,
               found.limits.largest_head,
               found.limits.head_step};
  });
}

int32_t evenkeel_attention_forward(const evenkeel_attention* attention, const evenkeel_forward* pass,
                                   void* stream) {
  return guarded([&] {
    const evenkeel_attention a = adopt(attention);
    const evenkeel_forward f =
        adopt("evenkeel_forward", pass, evenkeel_forward{}, offsetof(evenkeel_forward, ties));
    call_of(a).forward({tensor(f.q), tensor(f.k), tensor(f.v)}, {tensor(f.o), f.lse, f.saved, f.ties},
                       f.workspace, stream);
  });
}

int32_t evenkeel_attention_backward(const evenkeel_attention* attention, const evenkeel_backward* pass,
                                    void* stream) {
  return guarded([&] {
    const evenkeel_attention a = adopt(attention);
    const evenkeel_backward b =
        adopt("evenkeel_backward", pass, evenkeel_backward{}, offsetof(evenkeel_backward, delta));
    call_of(a).backward({tensor(b.q), tensor(b.k), tensor(b.v)}, tensor(b.grad_output),
                        {tensor(b.o), const_cast<float*>(b.lse), const_cast<void*>(b.saved), nullptr},
                        {tensor(b.dq), tensor(b.dk), tensor(b.dv), b.delta, b.residual, b.residual_floor,
                         b.delta_error, b.grad_lse, b.dsinks},
                        b.workspace, stream);
  });
}

const char* evenkeel_conform_family(int32_t index, const char** description, int32_t* masked) {
  const std::vector<ConformCase>& cases = conform_cases();
  if (index < 0 || static_cast<size_t>(index) >= cases.size()) return nullptr;
  const ConformCase& c = cases[static_cast<size_t>(index)];
  if (description) *description = c.description.data();  // literals: they end with a zero
  if (masked) *masked = c.masked();
  return c.name.data();
}

int32_t evenkeel_conform(const evenkeel_conform_request* request, evenkeel_conform_kernel kernel,
                         void* context, evenkeel_conform_result* result) {
  return guarded([&] {
    const evenkeel_conform_request r = adopt("evenkeel_conform_request", request, evenkeel_conform_request{},
                                             sizeof(evenkeel_conform_request));
    require(kernel != nullptr, "expected a kernel to judge, got NULL");
    require(r.plan != nullptr, "expected a plan such as \"flash2\", got NULL");
    require(r.family != nullptr, "expected the name of a family such as \"ties_2_tail\", got NULL");
    require(r.rows >= 1 && r.rows <= 100'000'000, "expected rows from 1 to 10^8, got {}", r.rows);
    const evenkeel_conform_result to = adopt("evenkeel_conform_result", result, evenkeel_conform_result{},
                                             offsetof(evenkeel_conform_result, unwritten));
    std::vector<ConformPlan> plans = {{r.plan, parse_plan(r.plan), {}}};
    conform(
        plans, cases_named({r.family}), r.rows, r.seed,
        [&](const AttentionProblem& problem, const AttentionInputs& in, View<const float> grad_output,
            AttentionBuffers& out) { call_kernel(kernel, context, problem, in, grad_output, out); },
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
    told.unwritten = found.unwritten, told.residual_allowed = found.bias_floor;
    told.o_over = found.over_o, told.dq_over = found.over_dq;
    told.dk_over = found.over_dk, told.dv_over = found.over_dv;
    conform_advice = found.what_to_fix();
    told.what_to_fix = conform_advice.c_str();
    std::memcpy(result, &told, std::min<size_t>(to.struct_size, sizeof told));
  });
}

void evenkeel_kernel_error(const char* words) {
  guarded([&] { kernel_words = words ? words : ""; });
}

int32_t evenkeel_judge(const evenkeel_judge_request* request, evenkeel_form_kernel kernel, void* context,
                       evenkeel_judge_result* result) {
  return guarded([&] {
    const evenkeel_judge_request r = adopt("evenkeel_judge_request", request, evenkeel_judge_request{},
                                           offsetof(evenkeel_judge_request, not_shrunk));
    const evenkeel_judge_result to =
        adopt("evenkeel_judge_result", result, evenkeel_judge_result{}, sizeof(evenkeel_judge_result));
    require(kernel != nullptr, "expected a kernel to judge, got NULL");
    require(r.rows >= 0 && r.rows <= 100'000'000, "expected rows from 0 to 10^8, got {}", r.rows);
    last_judgement = {};
    kernel_words.clear();
    LastJudgement& last = last_judgement;
    KernelRequest wanted;
    wanted.name = r.name ? r.name : "kernel";
    wanted.plan = last.plan = r.plan ? r.plan : "flash2";
    wanted.type = form_type_of(r.type);
    wanted.extent = r.quick ? FormExtent::quick : FormExtent::whole;
    wanted.rows = r.rows, wanted.seed = r.seed;
    wanted.with_families = r.rows > 0;
    wanted.deterministic = !r.not_deterministic, wanted.aligned = !r.not_aligned,
    wanted.shrink = !r.not_shrunk;
    const FormKernel form_kernel =
        kernel_by_struct(kernel, context, EVENKEEL_BF16, EVENKEEL_FP16, EVENKEEL_FP32, EVENKEEL_NOT_OFFERED,
                         [] { return std::exchange(kernel_words, ""); });
    const KernelJudgement found =
        r.form ? judge_file(form_kernel, wanted, r.form)
               : judge_kernel(form_kernel, wanted, [&](const char* what, int64_t done, int64_t of) {
                   if (r.progress) r.progress(context, what, done, of);
                 });
    if (found.forms.smallest) last.smallest = found.forms.smallest->form;
    last.json = judgement_json(found).dump(), last.text = judgement_text(found);
    last.junit = judgement_junit(found), last.badge = judgement_badge(found);
    evenkeel_judge_result told{};
    told.struct_size = to.struct_size;
    told.passes = found.passes();
    told.json = last.json.c_str(), told.text = last.text.c_str();
    told.junit = last.junit.c_str(), told.badge = last.badge.c_str();
    std::memcpy(result, &told, std::min<size_t>(to.struct_size, sizeof told));
  });
}

int32_t evenkeel_judge_write_form(const char* file) {
  return guarded([&] {
    require(file != nullptr, "expected a file to write, got NULL");
    require(last_judgement.smallest.has_value(), "no form failed in this thread's latest evenkeel_judge");
    write_failing_form(file, *last_judgement.smallest, last_judgement.plan);
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

int32_t evenkeel_round(const evenkeel_rounding* rounding, const float* x, float* y) {
  return guarded([&] {
    const evenkeel_rounding r =
        adopt("evenkeel_rounding", rounding, evenkeel_rounding{}, offsetof(evenkeel_rounding, seed));
    require(r.format != nullptr, "expected a format such as \"e4m3\" or \"int8*row\", got NULL");
    const Rounding parsed = parse_rounding(r.format);
    int64_t count = 1;
    for (const int64_t size : {r.B, r.H, r.T, r.D}) {
      require(size >= 0 && (size == 0 || count <= kMostRounded / size),
              "expected sizes B, H, T, D from 0 on and a product of at most 2^48, got {}, {}, {}, {}", r.B,
              r.H, r.T, r.D);
      count *= std::max<int64_t>(size, 1);
    }
    const bool empty = r.B == 0 || r.H == 0 || r.T == 0 || r.D == 0;
    require(empty || (x != nullptr && y != nullptr), "expected x and y, got NULL");
    round_tensor(parsed, x, y, r.B, r.H, r.T, r.D, {.seed = r.seed});
  });
}

int32_t evenkeel_spectral_norm(const float* matrix, int64_t rows, int64_t columns, double* norm) {
  return guarded([&] {
    require(matrix != nullptr && norm != nullptr, "expected a matrix and norm to write to, got NULL");
    require(rows >= 1 && columns >= 1, "expected a matrix of one row and column or more, got {} by {}", rows,
            columns);
    SpectralNorm largest;
    *norm = largest.of(Matrix{matrix, columns, 1}, rows, columns);
  });
}

// The opaque type of the header.
struct evenkeel_guard {
  DriftGuard rule;
  size_t heads;
  GuardEvent event;
};

evenkeel_guard* evenkeel_guard_new(const char* plan, int64_t layers, int64_t heads, int32_t bf16) {
  evenkeel_guard* made = nullptr;
  guarded([&] {
    require(plan != nullptr, "expected a plan such as \"flash2\", got NULL");
    require(layers >= 1 && heads >= 1 && layers <= 1 << 16 && heads <= 1 << 16,
            "expected layers and heads from 1 to 65536, got {} and {}", layers, heads);
    const ScopedPlan scoped = ScopedPlan::parse(plan);
    scoped.check_scopes(layers, heads);
    made = new evenkeel_guard{
        DriftGuard(scoped, layers, heads, bf16 != 0), static_cast<size_t>(layers * heads), {}};
  });
  return made;
}

void evenkeel_guard_free(evenkeel_guard* guard) { delete guard; }

int32_t evenkeel_guard_take(evenkeel_guard* guard, int64_t step, const double* lse, const double* leak,
                            const double* delta, const int64_t* checkpoints, size_t checkpoint_count,
                            int32_t act, evenkeel_guard_event* event) {
  return guarded([&] {
    require(guard != nullptr && lse != nullptr, "expected a guard and log-sum-exps, got NULL");
    require((leak != nullptr) == (delta != nullptr), "expected leak and delta, or neither, got one of them");
    require(checkpoints != nullptr || checkpoint_count == 0, "expected {} checkpoints, got NULL",
            checkpoint_count);
    const auto numbers = [&](const double* from) {
      return from ? std::vector<double>(from, from + guard->heads) : std::vector<double>();
    };
    guard->rule.follow(step, numbers(lse), numbers(leak), numbers(delta));
    if (!event) return;
    const evenkeel_guard_event given =
        adopt("evenkeel_guard_event", event, evenkeel_guard_event{}, sizeof(evenkeel_guard_event));
    DriftGuard::Means means;
    means.act = act != 0;
    means.checkpoint_before = [&](int64_t before) {
      int64_t newest = -1;
      for (size_t n = 0; n < checkpoint_count; ++n)
        if (checkpoints[n] <= before) newest = std::max(newest, checkpoints[n]);
      return newest;
    };
    *event = {given.struct_size, EVENKEEL_GUARD_NOTHING, -1, -1, "", ""};
    const std::optional<DriftGuard::Decision> decision = guard->rule.decide(step, means);
    if (!decision) return;
    guard->event = decision->event;
    event->kind = 1 + static_cast<int32_t>(guard->event.kind);
    event->last_good = decision->leaking ? decision->last_good : -1;
    event->to = guard->event.to;
    event->clauses = guard->event.clauses.c_str();
    event->words = guard->event.words.c_str();
  });
}
static_assert(1 + static_cast<int>(GuardEvent::Kind::warning) == EVENKEEL_GUARD_WARNING &&
              1 + static_cast<int>(GuardEvent::Kind::remedy) == EVENKEEL_GUARD_REMEDY &&
              1 + static_cast<int>(GuardEvent::Kind::roll_back) == EVENKEEL_GUARD_ROLL_BACK);

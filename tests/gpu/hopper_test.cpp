// The Hopper kernels (with EVENKEEL_KERNELS=ampere: those of the Ampere class, on any GPU that takes them) against the
// definition in FP64, through the public interface alone. Errors are at most 1.2 times
// those of FlashAttention-2's arithmetic (the CPU's plan flash2). Every layout, every length, nothing written beside
// the outputs, the same bits twice. Tests named small_* are also run under compute-sanitizer.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>

#include "attention/attention.h"
#include "attention/attention_call.h"
#include "gpu/device_memory.h"

namespace evenkeel {
namespace {

constexpr const char* kStabilisers[] = {"none",        "paper_capped", "dither",
                                        "wide_output", "consistent",   "zero_sum"};
constexpr double kErrorRatio = 1.2;

enum class Layout {
  bhtd,
  bthd,
  gapped,      // (B, H, T, D + 8): the 8 must stay as they are
  packed_qkv,  // q, k, v (and their gradients) are views of one (B, T, 3, H, D)
  sequences,   // no padding: all rows of all sequences on one axis, (rows, H, D)
};
enum class Fill {
  normal,
  equal_keys,   // all scores of a row tie
  max_zero,     // the largest score of every row is exactly 0, in two keys
  scores_100,   // scores of about +-100
  scores_1000,  // of about +-1000
};

struct Case {
  const char* name;
  int64_t B, H, G, T, N, D;
  bool causal = false;
  Layout layout = Layout::bhtd;
  Fill fill = Fill::normal;
  std::vector<int32_t> query_lengths = {}, key_lengths = {};

  friend std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }
};

uint16_t bf16_bits(float x) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16); }
float from_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
float to_bf16(double x) { return round_to(Rounding{kBf16}, static_cast<float>(x)); }

// --- The problem on the host: (B, H or G, T or N, D), bf16 numbers in FP32.
struct Host {
  explicit Host(const Case& c, uint64_t seed = 1)
      : q({c.B, c.H, c.T, c.D}), k({c.B, c.G, c.N, c.D}), v(k.shape()), d_o(q.shape()) {
    uint32_t tensor = 0;
    for (Tensor<float>* x : {&q, &k, &v, &d_o}) {
      RandomStream draw({seed, 0, tensor++});
      for (float& value : x->values()) value = to_bf16(draw.normal());
    }
    const auto key_of = [&](int64_t j, int64_t d) { return d == j % c.D ? 1.0f : 0.0f; };
    switch (c.fill) {
      case Fill::normal:
        break;
      case Fill::equal_keys:
        for (int64_t n = 0; n < k.view().count(); ++n) k.values()[at(n)] = k.values()[at(n % c.D)];
        break;
      case Fill::max_zero:  // one-hot keys; q picks the scores: 0 at two of them, below elsewhere
        for (int64_t n = 0; n < k.view().count(); ++n) k.values()[at(n)] = key_of(n / c.D % c.N, n % c.D);
        for (int64_t n = 0; n < q.view().count(); ++n) {
          const int64_t d = n % c.D, i = n / c.D;
          q.values()[at(n)] = d == i % c.D || d == 0 ? 0.0f : -std::fabs(q.values()[at(n)]) * 16;
        }
        break;
      case Fill::scores_100:
      case Fill::scores_1000: {
        const double size = c.fill == Fill::scores_100 ? 100 : 1000;
        for (float& value : q.values()) value = to_bf16(value * size);  // a q.k has variance 1 otherwise
        break;
      }
    }
  }
  static size_t at(int64_t n) { return static_cast<size_t>(n); }
  AttentionInputs inputs() const { return {q.view(), k.view(), v.view()}; }

  Tensor<float> q, k, v, d_o;
};

AttentionProblem config_of(const Case& c, const PrecisionPlan& plan) {
  AttentionProblem config;
  config.plans = {plan};
  config.mask.causal = c.causal;
  config.mask.query_lengths = c.query_lengths;
  config.mask.key_lengths = c.key_lengths;
  return config;
}

// --- One piece of device memory with guard zones, poisoned: its image on the host, and who may write where.
class Guarded {
 public:
  static constexpr size_t kGuard = 4096;
  explicit Guarded(size_t bytes, uint8_t poison = 0xff)  // every bf16 and every float of it a NaN
      : memory_(bytes + 2 * kGuard), image_(bytes + 2 * kGuard, kGuardByte) {
    std::fill(image_.begin() + kGuard, image_.end() - kGuard, poison);
    may_change_.assign(image_.size(), false);
  }
  void* data() const { return memory_.as<char>() + kGuard; }
  size_t size() const { return image_.size() - 2 * kGuard; }
  template <class T>
  void set(size_t index, T value) {
    std::memcpy(image_.data() + kGuard + index * sizeof(T), &value, sizeof(T));
  }
  template <class T>
  T get(size_t index) const {
    T value;
    std::memcpy(&value, image_.data() + kGuard + index * sizeof(T), sizeof(T));
    return value;
  }
  void allow(size_t offset, size_t bytes) {
    std::fill_n(may_change_.begin() + static_cast<int64_t>(kGuard + offset), bytes, true);
  }
  void allow_all() { allow(0, size()); }
  void upload() { memory_.upload(image_.data(), image_.size()); }
  // Brings the image up to date. What nobody may write must be as it was.
  void download(const char* name) {
    std::vector<uint8_t> before = image_;
    memory_.download(image_.data(), image_.size());
    for (size_t n = 0; n < image_.size(); ++n)
      if (image_[n] != before[n] && !may_change_[n]) {
        ADD_FAILURE() << name << ": byte " << static_cast<int64_t>(n) - static_cast<int64_t>(kGuard) << " of "
                      << size() << " was overwritten";
        return;
      }
  }

 private:
  static constexpr uint8_t kGuardByte = 0xa5;
  DeviceMemory memory_;
  std::vector<uint8_t> image_;
  std::vector<bool> may_change_;
};

// A tensor's place in a piece of memory: element (b, h, i, d) lies at first + index . stride, in elements.
struct Place {
  int64_t first = 0;
  std::array<int64_t, 4> stride{};
  size_t at(int64_t b, int64_t h, int64_t i, int64_t d) const {
    return static_cast<size_t>(first + b * stride[0] + h * stride[1] + i * stride[2] + d * stride[3]);
  }
};

// --- The problem on the device.
class Device {
 public:
  Device(const Case& c, const Host& host, const PrecisionPlan& plan)
      : c_(c), offsets_q_(offsets(c.query_lengths)), offsets_k_(offsets(c.key_lengths)) {
    problem.B = c.B;
    problem.H = c.H;
    problem.G = c.G;
    problem.T = c.T;
    problem.N = c.N;
    problem.D = c.D;
    problem.type = TensorType::bf16;
    problem.plans = {plan};
    problem.mask.causal = c.causal;
    numbers_ = DeviceMemory(4 * static_cast<size_t>(c.B) * sizeof(int32_t) + 16);
    const auto put = [&](size_t slot, const std::vector<int32_t>& values) {
      const size_t offset = slot * static_cast<size_t>(c.B) * sizeof(int32_t);
      numbers_.upload(values.data(), values.size() * sizeof(int32_t), offset);
      return std::span(reinterpret_cast<const int32_t*>(numbers_.as<char>() + offset), values.size());
    };
    if (!c.query_lengths.empty()) problem.mask.query_lengths = put(0, c.query_lengths);
    if (!c.key_lengths.empty()) problem.mask.key_lengths = put(1, c.key_lengths);
    if (c.layout == Layout::sequences) {
      problem.mask.query_offsets = put(2, offsets_q_);
      problem.mask.key_offsets = put(3, offsets_k_);
      problem.mask.query_rows = total(c.query_lengths);
      problem.mask.key_rows = total(c.key_lengths);
    }
    const PassSizes sizes = resolve(problem, cuda_device()).sizes();
    const bool one_qkv = c.layout == Layout::packed_qkv;
    place_q_ = place(c.H, c.T, 0);
    place_k_ = place(c.G, c.N, 1);
    place_v_ = place(c.G, c.N, 2);
    place_o_ = c.layout == Layout::packed_qkv ? Place{0, {c.T * c.H * c.D, c.D, c.H * c.D, 1}} : place_q_;
    const size_t queries = elements(c.H, c.T, total(c.query_lengths)),
                 keys = elements(c.G, c.N, total(c.key_lengths));
    for (int n = 0; n < kPieces; ++n) {
      const bool per_key = n == k || n == v || n == dk || n == dv;
      pieces_.emplace_back(2 * (per_key ? keys : one_qkv && (n == q || n == dq) ? 3 * queries : queries));
    }
    lse_ = std::make_unique<Guarded>(static_cast<size_t>(c.B * c.H * c.T) * sizeof(float));
    saved_ = std::make_unique<Guarded>(sizes.saved);
    workspace_ = std::make_unique<Guarded>(sizes.workspace);
    for (Guarded* g : {lse_.get(), saved_.get(), workspace_.get()}) g->allow_all();
    write(piece(q), place_q_, host.q, c_.query_lengths);
    write(piece(k), place_k_, host.k, c_.key_lengths);
    write(piece(v), place_v_, host.v, c_.key_lengths);
    write(piece(d_o), place_o_, host.d_o, c_.query_lengths);
    allow(piece(o), place_o_, c.H, c.T, c_.query_lengths);
    allow(piece(dq), place_q_, c.H, c.T, c_.query_lengths);
    allow(piece(dk), place_k_, c.G, c.N, c_.key_lengths);
    allow(piece(dv), place_v_, c.G, c.N, c_.key_lengths);
    for (Guarded& g : pieces_) g.upload();
    for (Guarded* g : {lse_.get(), saved_.get(), workspace_.get()}) g->upload();
  }

  KernelChoice launch(void* stream = nullptr) {
    const PassInputs in{tensor(q, place_q_), tensor(k, place_k_), tensor(v, place_v_)};
    const ForwardPass forward{tensor(o, place_o_), static_cast<float*>(lse_->data()), saved_->data(),
                              nullptr};
    const AttentionCall call = resolve(problem, cuda_device());
    call.forward(in, forward, workspace_->data(), stream);
    call.backward(in, tensor(d_o, place_o_), forward,
                  {tensor(dq, place_q_), tensor(dk, place_k_), tensor(dv, place_v_)}, workspace_->data(),
                  stream);
    return call.choice();
  }

  struct Outputs {
    Tensor<float> o, lse, dq, dk, dv;
  };
  Outputs collect() {
    static constexpr const char* kNames[] = {"q", "k", "v", "d_o", "o", "dq", "dk", "dv"};
    for (int n = 0; n < kPieces; ++n) pieces_[static_cast<size_t>(n)].download(kNames[n]);
    lse_->download("lse");
    saved_->download("saved");
    workspace_->download("workspace");
    Outputs out;
    out.o = read(piece(o), place_o_, c_.H, c_.T, c_.query_lengths);
    out.dq = read(piece(dq), place_q_, c_.H, c_.T, c_.query_lengths);
    out.dk = read(piece(dk), place_k_, c_.G, c_.N, c_.key_lengths);
    out.dv = read(piece(dv), place_v_, c_.G, c_.N, c_.key_lengths);
    out.lse = Tensor<float>({c_.B, c_.H, c_.T, 1});
    for (size_t n = 0; n < out.lse.values().size(); ++n) out.lse.values()[n] = lse_->get<float>(n);
    // Rows beyond a packed sequence do not exist.
    if (c_.layout == Layout::sequences)
      for (int64_t b = 0; b < c_.B; ++b)
        for (int64_t h = 0; h < c_.H; ++h)
          for (int64_t i = c_.query_lengths[static_cast<size_t>(b)]; i < c_.T; ++i)
            *out.lse.view().at(b, h, i) = -INFINITY;
    return out;
  }

  AttentionProblem problem;

 private:
  enum Piece { q, k, v, d_o, o, dq, dk, dv, kPieces };

  static int64_t total(const std::vector<int32_t>& lengths) {
    return std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  }
  static std::vector<int32_t> offsets(const std::vector<int32_t>& lengths) {
    std::vector<int32_t> first(lengths.size());
    std::exclusive_scan(lengths.begin(), lengths.end(), first.begin(), 0);
    return first;
  }
  size_t elements(int64_t heads, int64_t rows, int64_t all_rows) const {
    const int64_t width = c_.layout == Layout::gapped ? c_.D + 8 : c_.D;
    return static_cast<size_t>(c_.layout == Layout::sequences ? all_rows * heads * width
                                                              : c_.B * heads * rows * width);
  }
  // `slot`: 0, 1, 2 for q, k, v of packed_qkv.
  Place place(int64_t heads, int64_t rows, int64_t slot) const {
    const int64_t D = c_.D;
    switch (c_.layout) {
      case Layout::bhtd:
        return {0, {heads * rows * D, rows * D, D, 1}};
      case Layout::bthd:
        return {0, {rows * heads * D, D, heads * D, 1}};
      case Layout::gapped:
        return {0, {heads * rows * (D + 8), rows * (D + 8), D + 8, 1}};
      case Layout::packed_qkv:
        return {slot * heads * D, {rows * 3 * heads * D, D, 3 * heads * D, 1}};
      case Layout::sequences:
        return {0, {0, D, heads * D, 1}};
    }
    return {};
  }
  // With packed_qkv q's piece holds k and v too, and dq's dk and dv.
  Guarded& piece(Piece which) {
    if (c_.layout == Layout::packed_qkv && (which == k || which == v)) which = q;
    if (c_.layout == Layout::packed_qkv && (which == dk || which == dv)) which = dq;
    return pieces_[static_cast<size_t>(which)];
  }
  DeviceTensor tensor(Piece which, const Place& place) {
    return {static_cast<uint16_t*>(piece(which).data()) + place.first, place.stride};
  }
  template <class Visit>
  void each_row(const Place& place, int64_t heads, int64_t rows, const std::vector<int32_t>& lengths,
                Visit visit) const {
    const bool packed = c_.layout == Layout::sequences;
    for (int64_t b = 0; b < c_.B; ++b) {
      const int64_t here = packed ? lengths[static_cast<size_t>(b)] : rows;
      const int64_t first =
          !packed ? 0 : (&lengths == &c_.query_lengths ? offsets_q_ : offsets_k_)[static_cast<size_t>(b)];
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; i < here; ++i) visit(b, h, i, place.at(b, h, first + i, 0));
    }
  }
  void write(Guarded& to, const Place& place, const Tensor<float>& from,
             const std::vector<int32_t>& lengths) {
    each_row(place, from.shape()[1], from.shape()[2], lengths,
             [&](int64_t b, int64_t h, int64_t i, size_t at) {
               for (int64_t d = 0; d < c_.D; ++d)
                 to.set<uint16_t>(at + static_cast<size_t>(d), bf16_bits(*from.view().at(b, h, i, d)));
             });
  }
  void allow(Guarded& g, const Place& place, int64_t heads, int64_t rows,
             const std::vector<int32_t>& lengths) {
    each_row(place, heads, rows, lengths,
             [&](int64_t, int64_t, int64_t, size_t at) { g.allow(2 * at, 2 * static_cast<size_t>(c_.D)); });
  }
  Tensor<float> read(const Guarded& g, const Place& place, int64_t heads, int64_t rows,
                     const std::vector<int32_t>& lengths) const {
    Tensor<float> out({c_.B, heads, rows, c_.D});  // 0 where a packed tensor has no row
    each_row(place, heads, rows, lengths, [&](int64_t b, int64_t h, int64_t i, size_t at) {
      for (int64_t d = 0; d < c_.D; ++d)
        *out.view().at(b, h, i, d) = from_bf16(g.get<uint16_t>(at + static_cast<size_t>(d)));
    });
    return out;
  }

  const Case c_;
  std::vector<int32_t> offsets_q_, offsets_k_;
  Place place_q_, place_k_, place_v_, place_o_;
  DeviceMemory numbers_;
  std::vector<Guarded> pieces_;
  std::unique_ptr<Guarded> lse_, saved_, workspace_;
};

std::string_view tested_family() {
  const char* const asked = std::getenv("EVENKEEL_KERNELS");
  return asked && *asked ? asked : "hopper";
}
bool on_hopper(const AttentionProblem& problem) {
  return choose_kernel(problem, cuda_device()).kernel == tested_family();
}

// --- Errors of one tensor: root mean square, and the mean with its standard error (one sample a row).
struct Errors {
  double rms = 0, mean = 0, standard_error = 0;
  size_t count = 0;
};

Errors errors_of(const char* name, const Tensor<float>& found, const Tensor<double>& exact) {
  Errors e;
  const int64_t width = found.shape()[3];
  double sum = 0, squares = 0, row_squares = 0;
  int64_t rows = 0;
  for (size_t first = 0; first < found.values().size(); first += static_cast<size_t>(width), ++rows) {
    double row = 0;
    for (size_t n = first; n < first + static_cast<size_t>(width); ++n) {
      const double truth = exact.values()[n], value = found.values()[n];
      if (std::isinf(truth) && value == truth) continue;  // L of a row that sees no key
      if (!std::isfinite(value)) {
        ADD_FAILURE() << name << "[" << n << "] is " << value << ", exactly " << truth;
        return e;
      }
      squares += (value - truth) * (value - truth);
      row += value - truth;
    }
    sum += row / static_cast<double>(width);
    row_squares += row / static_cast<double>(width) * row / static_cast<double>(width);
  }
  e.count = found.values().size();
  e.rms = std::sqrt(squares / static_cast<double>(e.count));
  e.mean = sum / static_cast<double>(rows);
  e.standard_error = std::sqrt(std::max(0.0, row_squares / static_cast<double>(rows) - e.mean * e.mean) /
                               static_cast<double>(rows));
  return e;
}

template <class Values>
double largest_norm(const Values& t) {
  double largest = 0;
  const int64_t width = t.shape()[3];
  for (size_t first = 0; first < t.values().size(); first += static_cast<size_t>(width)) {
    double squares = 0;
    for (size_t n = first; n < first + static_cast<size_t>(width); ++n)
      squares += static_cast<double>(t.values()[n]) * t.values()[n];
    largest = std::max(largest, squares);
  }
  return std::sqrt(largest);
}

struct Truth {
  AttentionReference exact;
  AttentionBuffers measure;  // of what the errors are multiples
};

// The measure is flash2 on the CPU: FlashAttention-2's arithmetic. Where ties or huge scores make that exact by luck, it
// is the plan itself on the CPU. So it is for consistent's L, which is of the rounded probabilities by definition.
Truth truth_of(const Case& c, const Host& host, const PrecisionPlan& plan) {
  PrecisionPlan flash2 = parse_plan("flash2");
  flash2.keel = plan.keel;
  const bool random = c.fill == Fill::normal;
  AttentionProblem config = config_of(c, random ? flash2 : plan);
  Truth truth{attention_reference(config, host.inputs(), host.d_o.view()),
              AttentionBuffers(host.inputs(), false)};
  attention_forward(config, host.inputs(), truth.measure.forward());
  attention_backward(config, host.inputs(), host.d_o.view(), truth.measure.forward(),
                     truth.measure.backward());
  if (random && plan.stabiliser == Stabiliser::consistent) {
    AttentionBuffers own(host.inputs(), false);
    config.plans = {plan};
    attention_forward(config, host.inputs(), own.forward());
    truth.measure.lse = own.lse;
  }
  return truth;
}

// At most 1.2 times the measure's error. Small tensors are granted three standard errors of a root mean square. Where the
// measure happens to be exact, what FP32 arithmetic leaves is granted: a relative error of P, times what multiplies P.
void expect_accurate(const Case& c, const Host& host, const Truth& truth, const Device::Outputs& found) {
  const double a = 1 / std::sqrt(static_cast<double>(c.D));
  const double q = largest_norm(host.q), k = largest_norm(host.k), v = largest_norm(host.v),
               d_o = largest_norm(host.d_o);
  const double p = 0x1p-22 * (16 + a * q * k);  // 2^-22: tensor cores truncate, ex2 has two ulps
  const struct {
    const char* name;
    const Tensor<float>&found, &measure;
    const Tensor<double>& exact;
    double arithmetic;
  } table[] = {{"o", found.o, truth.measure.o, truth.exact.o, p * v},
               {"lse", found.lse, truth.measure.lse, truth.exact.lse, p},
               {"dq", found.dq, truth.measure.dq, truth.exact.dq, p * d_o * v * a * k},
               {"dk", found.dk, truth.measure.dk, truth.exact.dk, p * d_o * v * a * q},
               {"dv", found.dv, truth.measure.dv, truth.exact.dv, p * d_o}};
  // A row that sees no key: exactly nothing.
  for (int64_t b = 0; b < c.B; ++b)
    for (int64_t h = 0; h < c.H; ++h)
      for (int64_t i = 0; i < c.T; ++i) {
        if (std::isfinite(*truth.exact.lse.view().at(b, h, i))) continue;
        for (int64_t d = 0; d < c.D; ++d)
          EXPECT_TRUE(*found.o.view().at(b, h, i, d) == 0 && *found.dq.view().at(b, h, i, d) == 0)
              << "row " << i << " of head " << h << " sees no key";
      }
  for (const auto& row : table) {
    const Errors ours = errors_of(row.name, row.found, row.exact);
    const Errors theirs = errors_of(row.name, row.measure, row.exact);
    const double allowed =
        (kErrorRatio + 3 / std::sqrt(2.0 * static_cast<double>(ours.count))) * theirs.rms + row.arithmetic;
    EXPECT_LE(ours.rms, allowed) << row.name << ": the measure is " << theirs.rms;
    EXPECT_LE(std::fabs(ours.mean), std::fabs(theirs.mean) + 5 * ours.standard_error + row.arithmetic)
        << row.name << ": a bias";
  }
}

// Runs a case with a plan and judges it; the outputs, for more questions.
void check(const Case& c, const std::string& plan_text, uint64_t seed = 1) {
  SCOPED_TRACE(std::string(c.name) + ", " + plan_text);
  const PrecisionPlan plan = parse_plan(plan_text);
  const Host host(c, seed);
  Device device(c, host, plan);
  ASSERT_EQ(device.launch().kernel, tested_family());
  expect_accurate(c, host, truth_of(c, host, plan), device.collect());
}

class HopperTest : public testing::Test {
 protected:
  void SetUp() override {
    AttentionProblem plain;
    plain.B = plain.H = plain.G = plain.T = plain.N = 1;
    plain.D = 64;
    plain.type = TensorType::bf16;
    plain.plans = {parse_plan("flash2")};
    if (!on_hopper(plain))
      GTEST_SKIP() << "the Hopper kernels do not run here: " << choose_kernel(plain, cuda_device()).why;
  }
};
class HopperSmall : public HopperTest {};
class Hopper : public HopperTest {};

std::string plan_with(const char* stabiliser) { return std::string("flash2,stabiliser=") + stabiliser; }

// --- Small shapes: every stabiliser, both kernels' widths.
TEST_F(HopperSmall, every_stabiliser) {
  for (const char* stabiliser : kStabilisers)
    for (int64_t D : {64, 128}) {
      check({"plain", 1, 2, 2, 130, 130, D, true}, plan_with(stabiliser));
      check({"full", 1, 2, 1, 70, 200, D, false}, plan_with(stabiliser));
    }
}

TEST_F(HopperSmall, layouts) {
  for (Layout layout : {Layout::bhtd, Layout::bthd, Layout::gapped, Layout::packed_qkv})
    for (int64_t D : {64, 40}) check({"layout", 2, 2, 2, 100, 100, D, true, layout}, plan_with("consistent"));
}

TEST_F(HopperSmall, sequences_of_different_lengths) {
  const std::vector<int32_t> rows = {70, 0, 129, 1}, keys = {70, 30, 20, 200};
  for (Layout layout : {Layout::bhtd, Layout::bthd, Layout::sequences})
    for (bool causal : {false, true})
      check({"lengths", 4, 2, 1, 129, 200, 64, causal, layout, Fill::normal, rows, keys},
            plan_with("consistent"));
}

// --- All lengths around the tiles, causal and full, T and N alike and not.
TEST_F(Hopper, odd_lengths) {
  for (int64_t T : {1, 63, 65, 127, 129, 200, 1000})
    for (bool causal : {false, true}) {
      check({"odd", 1, 2, 2, T, T, 64, causal}, plan_with("consistent"));
      check({"odd 128", 1, 1, 1, T, T, 128, causal}, plan_with("none"));
    }
}

TEST_F(Hopper, rows_and_keys_of_different_number) {
  // The last row is aligned with the last key; where rows outnumber keys, the first ones see none.
  for (const auto& [T, N] :
       {std::pair<int64_t, int64_t>{100, 300}, {300, 100}, {1, 257}, {257, 1}, {129, 128}})
    for (bool causal : {false, true})
      for (const char* stabiliser : {"none", "consistent", "zero_sum"})
        check({"T and N", 1, 2, 1, T, N, 64, causal}, plan_with(stabiliser));
}

TEST_F(Hopper, grouped_queries) {
  for (int64_t G : {1, 2, 4})
    for (const char* stabiliser : kStabilisers)
      check({"grouped", 2, 4, G, 150, 190, 64, true}, plan_with(stabiliser));
}

TEST_F(Hopper, head_sizes) {
  for (int64_t D : {8, 40, 64, 72, 96, 128})
    for (const char* stabiliser : {"none", "consistent", "zero_sum"})
      check({"head size", 1, 2, 2, 257, 257, D, true, Layout::bthd}, plan_with(stabiliser));
}

TEST_F(Hopper, more_tiles_than_multiprocessors) {
  check({"many", 4, 12, 12, 700, 700, 64, true, Layout::packed_qkv}, plan_with("consistent"));
  check({"many", 4, 12, 12, 500, 500, 128, true, Layout::bthd}, plan_with("consistent"));
}

// Query tiles without a row or a key between others: nobody may wait for what nobody sends.
TEST_F(Hopper, long_sequences_among_short_ones) {
  std::vector<int32_t> lengths;
  for (int32_t n = 0; n < 300; ++n) lengths.push_back(n % 30 == 0 ? 300 : 1 + n % 20);
  for (Layout layout : {Layout::bhtd, Layout::sequences})
    check({"long among short", 300, 1, 1, 300, 300, 64, true, layout, Fill::normal, lengths, lengths},
          plan_with("wide_output"));
  check({"more rows than keys", 8, 8, 8, 1000, 40, 128, true}, plan_with("wide_output"));
}

TEST_F(Hopper, hard_inputs) {
  for (const char* stabiliser : kStabilisers)
    for (Fill fill : {Fill::equal_keys, Fill::max_zero, Fill::scores_100, Fill::scores_1000})
      for (bool causal : {false, true}) {
        SCOPED_TRACE(static_cast<int>(fill));
        check({"hard", 1, 2, 2, 200, 200, 64, causal, Layout::bhtd, fill}, plan_with(stabiliser));
      }
}

TEST_F(Hopper, keel) {
  for (const char* stabiliser : kStabilisers)
    check({"keel", 1, 2, 2, 200, 200, 64, true}, plan_with(stabiliser) + ",keel=0.01");
}

// --- Bits.
bool same(const Tensor<float>& a, const Tensor<float>& b) {
  return std::memcmp(a.values().data(), b.values().data(), a.values().size() * sizeof(float)) == 0;
}
void expect_same(const Device::Outputs& a, const Device::Outputs& b) {
  EXPECT_TRUE(same(a.o, b.o));
  EXPECT_TRUE(same(a.lse, b.lse));
  EXPECT_TRUE(same(a.dq, b.dq));
  EXPECT_TRUE(same(a.dk, b.dk));
  EXPECT_TRUE(same(a.dv, b.dv));
}

TEST_F(Hopper, same_bits_twice_and_on_two_streams_at_once) {
  const Case cases[] = {{"first", 2, 8, 8, 900, 900, 64, true}, {"second", 2, 8, 2, 700, 800, 128, false}};
  for (const char* stabiliser : kStabilisers) {
    SCOPED_TRACE(stabiliser);
    const PrecisionPlan plan = parse_plan(plan_with(stabiliser));
    std::vector<Device::Outputs> alone;
    std::vector<std::unique_ptr<Device>> devices;
    for (const Case& c : cases) {
      const Host host(c);
      Device once(c, host, plan);
      once.launch();
      alone.push_back(once.collect());
      once.launch();
      expect_same(alone.back(), once.collect());
      devices.push_back(std::make_unique<Device>(c, host, plan));
    }
    const DeviceStream one, two;
    for (int repeat = 0; repeat < 5; ++repeat) {
      devices[0]->launch(one.get());
      devices[1]->launch(two.get());
    }
    device_wait();
    for (size_t n = 0; n < devices.size(); ++n) expect_same(alone[n], devices[n]->collect());
  }
}

// Memory layout changes no bit; nor do lengths that say what is there anyway.
TEST_F(Hopper, layout_changes_no_bit) {
  for (const char* stabiliser : kStabilisers) {
    SCOPED_TRACE(stabiliser);
    const PrecisionPlan plan = parse_plan(plan_with(stabiliser));
    const auto run = [&](Layout layout, std::vector<int32_t> lengths) {
      const Case c{"layouts", 2, 3, 3, 190, 190, 64, true, layout, Fill::normal, lengths, lengths};
      const Host host(c);
      Device device(c, host, plan);
      device.launch();
      return device.collect();
    };
    const Device::Outputs expected = run(Layout::bhtd, {});
    for (Layout layout : {Layout::bthd, Layout::gapped, Layout::packed_qkv})
      expect_same(expected, run(layout, {}));
    expect_same(expected, run(Layout::bhtd, {190, 190}));
    expect_same(expected, run(Layout::sequences, {190, 190}));
  }
}

// --- The bits of one plan for all heads, as they were before heads could differ: forms and plans by head cost them nothing.
uint64_t digest_of(const Device::Outputs& out) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const Tensor<float>* x : {&out.o, &out.lse, &out.dq, &out.dk, &out.dv})
    for (float value : x->values()) hash = (hash ^ std::bit_cast<uint32_t>(value)) * 0x100000001b3u;
  return hash;
}
TEST_F(Hopper, bits_of_one_plan_for_all_heads) {
  const Case cases[] = {{"causal", 2, 4, 2, 400, 400, 64, true},
                        {"full", 2, 4, 4, 200, 330, 128, false},
                        {"lengths",
                         4,
                         2,
                         1,
                         129,
                         200,
                         64,
                         true,
                         Layout::sequences,
                         Fill::normal,
                         {70, 0, 129, 1},
                         {70, 30, 20, 200}}};
  uint64_t all = 0;
  for (const Case& c : cases)
    for (const char* stabiliser : kStabilisers) {
      const Host host(c);
      Device device(c, host, parse_plan(plan_with(stabiliser) + ",keel=1e-3"));
      device.launch();
      all = all * 31 + digest_of(device.collect());
    }
  if (tested_family() == "hopper") EXPECT_EQ(all, 0x5d4a1181eb268ae4u);
}

// The step read from device memory is the step; and it matters where random numbers are used.
TEST_F(Hopper, step_from_device_memory) {
  const Case c{"step", 1, 2, 2, 150, 150, 64, true, Layout::bhtd, Fill::equal_keys};
  const Host host(c);
  const DeviceMemory step(std::vector<uint32_t>{5});
  for (const char* stabiliser : {"dither", "paper_capped"}) {
    SCOPED_TRACE(stabiliser);
    const auto run = [&](uint32_t host_step, const uint32_t* device_step) {
      Device device(c, host, parse_plan(plan_with(stabiliser)));
      device.problem.step = host_step;
      device.problem.device_step = device_step;
      device.launch();
      return device.collect();
    };
    const Device::Outputs expected = run(5, nullptr);
    expect_same(expected, run(0, step.as<uint32_t>()));
    EXPECT_FALSE(same(expected.o, run(0, nullptr).o));
  }
}

}  // namespace
}  // namespace evenkeel

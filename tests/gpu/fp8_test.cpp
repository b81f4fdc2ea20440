// Hopper's FP8 kernels on the GPU, first stage by stage (quantiser, scores, where probabilities meet values, sums). Then both
// passes whole: their errors against FP64 beside those of the CPU with the same plan, every length and layout, the same bits
// twice; and whether the rows of dS sum to zero. What the kernels do without a GPU is hopper_fp8_test.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "attention/kernel_families.h"
#include "fp8_judge.h"
#include "gpu/device_memory.h"

namespace evenkeel {
namespace {

using cases::Case;
using cases::Fill;
using cases::make_problem;
using cases::Problem;
using fp8_judge::kernel_plan;

constexpr const char* kStabilisers[] = {"none", "zero_sum"};
const bool kSmall = std::getenv("EVENKEEL_SMALL") != nullptr;

uint16_t to_bits(float x) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(round_to(Rounding{kBf16}, x)) >> 16);
}
float from_bits(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// A tensor on the device between guards, NaN at birth: (B, heads, rows, D), or all sequences' rows on one axis.
class Operand {
 public:
  Operand(const std::array<int64_t, 4>& shape, const std::vector<int32_t>& lengths, bool packed)
      : shape_(shape), lengths_(lengths), packed_(packed), offsets_(lengths.size()) {
    std::exclusive_scan(lengths.begin(), lengths.end(), offsets_.begin(), 0);
    rows_ = packed ? std::accumulate(lengths.begin(), lengths.end(), int64_t{0}) : shape[2];
    stride_ = packed ? std::array{int64_t{0}, shape[3], shape[1] * shape[3], int64_t{1}}
                     : contiguous_strides(shape);
    image_.assign(
        kGuard + static_cast<size_t>((packed ? 1 : shape[0]) * shape[1] * rows_ * shape[3]) + kGuard, 0xffff);
    memory_ = DeviceMemory(image_.size() * sizeof(uint16_t));
  }
  void write(const View<const float>& values) {
    each([&](int64_t b, int64_t h, int64_t i, int64_t d, uint16_t& to) {
      to = to_bits(*values.at(b, h, i, d));
    });
    upload();
  }
  void upload() { memory_.upload(image_.data(), image_.size() * sizeof(uint16_t)); }
  Tensor<float> read() {
    memory_.download(image_.data(), image_.size() * sizeof(uint16_t));
    for (size_t n = 0; n < kGuard; ++n)
      if (image_[n] != 0xffff || image_[image_.size() - 1 - n] != 0xffff) {
        ADD_FAILURE() << "written beside the output";
        break;
      }
    Tensor<float> values(shape_);
    each([&](int64_t b, int64_t h, int64_t i, int64_t d, uint16_t& from) {
      *values.view().at(b, h, i, d) = from_bits(from);
    });
    return values;
  }
  DeviceTensor tensor() const { return {memory_.as<uint16_t>() + kGuard, stride_}; }
  const std::vector<int32_t>& offsets() const { return offsets_; }
  int64_t rows() const { return rows_; }

 private:
  static constexpr size_t kGuard = 1024;
  template <class F>
  void each(F f) {
    for (int64_t b = 0; b < shape_[0]; ++b)
      for (int64_t h = 0; h < shape_[1]; ++h)
        for (int64_t i = 0; i < (packed_ ? lengths_[static_cast<size_t>(b)] : shape_[2]); ++i)
          for (int64_t d = 0; d < shape_[3]; ++d) {
            const int64_t row = packed_ ? offsets_[static_cast<size_t>(b)] + i : i;
            f(b, h, i, d,
              image_[kGuard + static_cast<size_t>(b * stride_[0] + h * stride_[1] + row * stride_[2] + d)]);
          }
  }

  std::array<int64_t, 4> shape_, stride_;
  std::vector<int32_t> lengths_;
  bool packed_;
  std::vector<int32_t> offsets_;
  int64_t rows_ = 0;
  std::vector<uint16_t> image_;
  DeviceMemory memory_;
};

struct Result : fp8_judge::Found {
  std::vector<uint8_t> workspace;  // as the forward pass left it
  AttentionProblem problem;
};
Result run(const AttentionProblem& config, const Problem& host, bool packed = false) {
  AttentionProblem p = problem_of(config, host.in);
  p.type = TensorType::bf16;
  const auto queries = [&] { return Operand({p.B, p.H, p.T, p.D}, host.query_lengths, packed); };
  const auto keys = [&] { return Operand({p.B, p.G, p.N, p.D}, host.key_lengths, packed); };
  Operand q = queries(), k = keys(), v = keys(), grad = queries(), o = queries(), dq = queries(), dk = keys(),
          dv = keys();
  q.write(host.in.q), k.write(host.in.k), v.write(host.in.v), grad.write(host.grad_output);
  for (Operand* output : {&o, &dq, &dk, &dv}) output->upload();
  const DeviceMemory query_lengths(host.query_lengths), key_lengths(host.key_lengths),
      query_offsets(q.offsets()), key_offsets(k.offsets());
  if (!host.query_lengths.empty()) {
    p.mask.query_lengths = {query_lengths.as<const int32_t>(), host.query_lengths.size()};
    p.mask.key_lengths = {key_lengths.as<const int32_t>(), host.key_lengths.size()};
  }
  if (packed) {
    p.mask.query_offsets = {query_offsets.as<const int32_t>(), q.offsets().size()};
    p.mask.key_offsets = {key_offsets.as<const int32_t>(), k.offsets().size()};
    p.mask.query_rows = q.rows(), p.mask.key_rows = k.rows();
  }
  const AttentionCall call = resolve(p, cuda_device());
  EXPECT_EQ(call.choice().kernel, "hopper_fp8") << call.choice().why;
  DeviceMemory workspace(call.sizes().workspace), saved(call.sizes().saved),
      lse(static_cast<size_t>(p.B * p.H * p.T) * sizeof(float));
  workspace.fill(0xff), lse.fill(0xff);
  const PassInputs in{q.tensor(), k.tensor(), v.tensor()};
  const ForwardPass forward{o.tensor(), lse.as<float>(), saved.data()};
  call.forward(in, forward, workspace.data(), nullptr);
  device_wait();
  Result result;
  result.workspace = workspace.download<uint8_t>();
  result.problem = call.problem();
  workspace.fill(0xff);
  call.backward(in, grad.tensor(), forward, {dq.tensor(), dk.tensor(), dv.tensor()}, workspace.data(),
                nullptr);
  device_wait();
  result.o = o.read(), result.dq = dq.read(), result.dk = dk.read(), result.dv = dv.read();
  result.lse = Tensor<float>({p.B, p.H, p.T, 1});
  lse.download(result.lse.values().data(), result.lse.values().size() * sizeof(float));
  return result;
}

class Fp8 : public testing::Test {
 protected:
  void SetUp() override {
    AttentionProblem plain;
    plain.B = plain.H = plain.G = plain.T = plain.N = 1;
    plain.D = 64;
    plain.type = TensorType::bf16;
    plain.plans = {kernel_plan("none")};
    const std::string what = not_taken(kernel_family("hopper_fp8"), complete(plain), cuda_device());
    if (!what.empty()) GTEST_SKIP() << "the Hopper FP8 kernels do not take " << what;
  }
};

// --- Stage by stage. Each says the first thing that is not as it should be.

TEST_F(Fp8, a_the_quantiser_is_the_definition_to_the_bit) {
  for (const auto& [T, N, D] : {std::array<int64_t, 3>{70, 130, 64}, {130, 200, 128}, {3, 200, 40}}) {
    const Problem host = make_problem({{2, 2, 1, T, N, D}, {}, ""});
    Result found = run(host.with(kernel_plan("none")), host);
    const hopper_fp8::Layout layout = hopper_fp8::lay_out(found.problem, found.workspace.data());
    EXPECT_EQ(fp8_judge::wrong_numbers(layout.k, host.in.k, N, false), 0) << "k, D " << D;
    EXPECT_EQ(fp8_judge::wrong_numbers(layout.v, host.in.v, N, true), 0) << "v, D " << D;
  }
}

TEST_F(Fp8, a_queries_are_rounded_in_the_kernel) {
  for (const int64_t D : {40, 64, 128}) {
    const Problem host = fp8_judge::scores_are_queries({2, 4, 4, 700, 1, D});
    EXPECT_EQ(fp8_judge::wrong_scores(host, run(host.with(kernel_plan("none")), host).lse), 0) << "D " << D;
  }
}

// One key: L is the score, O is that key's value.
TEST_F(Fp8, b_scores_alone) {
  for (const int64_t D : {64, 128}) {
    const Problem host = make_problem({{1, 2, 2, 150, 1, D}, {}, ""});
    const AttentionProblem config = host.with(kernel_plan("none"));
    const Result found = run(config, host);
    AttentionBuffers cpu(host.in, false);
    attention_forward(config, host.in, cpu.forward());
    int wrong = 0;
    for (size_t n = 0; n < found.lse.values().size() && wrong < 4; ++n)
      if (!(std::fabs(found.lse.values()[n] - cpu.lse.values()[n]) < 2e-2f) && ++wrong)
        ADD_FAILURE() << "D " << D << ", score of head " << n / 150 << " row " << n % 150 << ": "
                      << found.lse.values()[n] << ", expected " << cpu.lse.values()[n];
  }
}

// Row i sees key i alone, all others being far below: O is that key's value. Says which key's value came instead.
TEST_F(Fp8, c_probabilities_meet_their_values) {
  for (const int64_t D : {64, 128}) {
    constexpr int64_t kKeys = 64;
    Problem host = make_problem({{1, 1, 1, kKeys, kKeys, D}, {}, ""});
    for (int64_t i = 0; i < kKeys; ++i)
      for (int64_t d = 0; d < D; ++d) {
        *host.q().at(0, 0, i, d) = d == i ? 448.0f : 0.0f;
        *host.k().at(0, 0, i, d) = d == i ? 1.0f : 0.0f;
        *host.v().at(0, 0, i, d) =
            static_cast<float>((i * 7 + d * 3) % 15 + 1);  // numbers of E4M3 times 15 / 448
        if (d == 0) *host.v().at(0, 0, i, d) = static_cast<float>(i % 8 + 8);
        if (d == 1) *host.v().at(0, 0, i, d) = static_cast<float>(i / 8 + 8);
      }
    const Result found = run(host.with(kernel_plan("none")), host);
    int wrong = 0;
    for (int64_t i = 0; i < kKeys && wrong < 8; ++i) {
      const auto key_of_row = [&] {
        const auto digit = [&](int64_t d) {
          return static_cast<int>(std::lround(*found.o.view().at(0, 0, i, d))) - 8;
        };
        return digit(0) + 8 * digit(1);
      }();
      if (key_of_row != i && ++wrong)
        ADD_FAILURE() << "D " << D << ", row " << i << " got the value of key " << key_of_row;
      for (int64_t d = 0; d < D && wrong < 8; ++d) {
        const float expected = *host.in.v.at(0, 0, i, d), value = *found.o.view().at(0, 0, i, d);
        if (!(std::fabs(value - expected) <= 0.07f * expected) && ++wrong)
          ADD_FAILURE() << "D " << D << ", O of row " << i << " feature " << d << " is " << value
                        << ", expected " << expected;
      }
    }
  }
}

// Scores of 0: O is the mean of the values, over two sums of the tensor cores.
TEST_F(Fp8, d_sums_alone) {
  for (const int64_t D : {64, 128}) {
    Problem host = make_problem({{1, 1, 1, 64, 200, D}, {}, ""});
    for (int64_t i = 0; i < 64; ++i)
      for (int64_t d = 0; d < D; ++d) *host.q().at(0, 0, i, d) = 0;
    const AttentionProblem config = host.with(kernel_plan("none"));
    const Result found = run(config, host);
    AttentionBuffers cpu(host.in, false);
    attention_forward(config, host.in, cpu.forward());
    int wrong = 0;
    for (int64_t i = 0; i < 64 && wrong < 4; ++i)
      for (int64_t d = 0; d < D && wrong < 4; ++d) {
        const float expected = *cpu.o.view().at(0, 0, i, d), value = *found.o.view().at(0, 0, i, d);
        if (!(std::fabs(value - expected) < 2e-3f) && ++wrong)
          ADD_FAILURE() << "D " << D << ", mean of values, row " << i << " feature " << d << ": " << value
                        << ", expected " << expected;
      }
  }
}

// --- Whole

// Twice: with the problem's q, k and v, and as they are after their rounding, which is then no part of the error.
void expect_accurate(const Case& c, const std::string& stabiliser, bool packed = false) {
  for (const bool rounded : {false, true}) {
    Problem host = make_problem(c);
    if (rounded) fp8_judge::round_operands(host);
    const AttentionProblem config = host.with(kernel_plan(stabiliser));
    Result found = run(config, host, packed);
    if (packed)  // rows beyond a sequence do not exist
      for (int64_t b = 0; b < c.B; ++b)
        for (int64_t h = 0; h < c.H; ++h)
          for (int64_t i = host.query_lengths[static_cast<size_t>(b)]; i < c.T; ++i)
            *found.lse.view().at(b, h, i) = -INFINITY;
    const std::string name = std::string(c.name) + ", " + stabiliser + (rounded ? ", rounded" : "");
    std::printf("  %-44s", name.c_str());
    for (const auto& [what, ours, cpu] : fp8_judge::judge(name, config, host, found))
      std::printf(" %s %.1e (%.2f, mean %+.1f)", what, ours.rms, ours.rms / cpu.rms,
                  ours.standard_error > 0 ? ours.mean / ours.standard_error : 0);
    std::printf("\n");
  }
}

TEST_F(Fp8, e_errors_are_those_of_the_plan) {
  std::printf("  rms of the errors (against the CPU's; their mean in standard errors)\n");
  const Case kCases[] = {
      {{1, 2, 1, 70, 200, 128}, {}, "full"},
      {{1, 1, 1, 200, 200, 128}, {.causal = true}, "causal"},
      {{1, 2, 2, 200, 200, 64}, {.causal = true}, "causal, head size 64"},
      {{2, 4, 2, 193, 321, 128}, {.causal = true}, "grouped"},
      {{1, 1, 1, 100, 30, 64}, {.causal = true}, "rows without keys"},
      {{1, 1, 1, 30, 100, 96}, {.causal = true}, "head size 96"},
      {{1, 1, 1, 65, 65, 40}, {}, "head size 40"},
      {{1, 1, 1, 64, 130, 128}, {.fill = Fill::one_signed}, "values of one sign"},
      {{1, 1, 1, 64, 48, 64}, {.fill = Fill::ties_tail}, "ties"},
      {{1, 1, 1, 64, 48, 64}, {.fill = Fill::huge}, "huge scores"},
  };
  for (const Case& c : kCases)
    for (const char* stabiliser : kStabilisers) expect_accurate(c, stabiliser);
}

TEST_F(Fp8, f_lengths) {
  for (const int64_t T : {1, 63, 64, 65, 127, 129, 193})
    for (const bool causal : {false, true}) {
      expect_accurate({{1, 1, 1, T, T, 128}, {.causal = causal}, "odd length"}, "zero_sum");
      expect_accurate({{1, 2, 2, T, 65, 64}, {.causal = causal}, "odd length 64"}, "none");
    }
  expect_accurate({{5, 2, 1, 140, 150, 64}, {.causal = true, .ragged = true}, "ragged"}, "zero_sum");
  expect_accurate({{5, 2, 1, 140, 150, 64}, {.causal = true, .ragged = true}, "packed"}, "zero_sum", true);
}

// Many items a block, and many keys: sums of 13 bits must not show.
TEST_F(Fp8, g_long_sequences) {
  if (kSmall) return;
  expect_accurate({{3, 4, 4, 700, 700, 128}, {.causal = true}, "many items"}, "zero_sum");
  expect_accurate({{4, 12, 12, 500, 500, 64}, {.causal = true}, "many items 64"}, "none");
  for (const Fill fill : {Fill::normal, Fill::one_signed}) {
    const Problem host = make_problem({{1, 1, 1, 64, 16384, 128}, {.fill = fill}, ""});
    const AttentionProblem config = host.with(kernel_plan("none"));
    const Result found = run(config, host);
    fp8_judge::judge("16384 keys", config, host,
                     {found.o, found.lse, {}, {}, {}});  // the CPU's gradients take long
  }
}

TEST_F(Fp8, h_the_same_bits_twice) {
  for (const int64_t D : {64, 128}) {
    const Problem host = make_problem({{2, 8, 4, 600, 600, D}, {.causal = true}, ""});
    const AttentionProblem config = host.with(kernel_plan("zero_sum"));
    const Result first = run(config, host);
    for (int again = 0; again < 3; ++again) {
      const Result second = run(config, host);
      for (const auto member : {&Result::o, &Result::lse, &Result::dq, &Result::dk, &Result::dv})
        EXPECT_EQ((first.*member).values(), (second.*member).values());
    }
  }
}

// What dS adds up to, by a feature that all keys share and no query has: it changes no score, and its part of dQ is the sum of
// the row of dS, which is zero.
struct Leak {
  double rms, mean_in_errors;
};
Leak leak_of(const Result& found) {
  double sum = 0, squares = 0;
  const auto [B, H, T, D] = found.dq.shape();
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t i = 0; i < T; ++i) {
        const double leak = double{*found.dq.view().at(b, h, i, 0)};
        sum += leak, squares += leak * leak;
      }
  return {std::sqrt(squares / static_cast<double>(B * H * T)), sum / std::sqrt(squares)};
}
// What rows of P add up to: dV summed over the keys, in units of dO summed over the rows.
double probabilities_of(const Result& found, const Problem& host) {
  double product = 0, square = 0;
  const auto [B, H, T, D] = found.dq.shape();
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t d = 0; d < D; ++d) {
        double values = 0, grads = 0;
        for (int64_t i = 0; i < T; ++i) {
          values += double{*found.dv.view().at(b, h, i, d)};
          grads += double{*host.grad_output.at(b, h, i, d)};
        }
        product += values * grads, square += grads * grads;
      }
  return product / square;
}

// zero_sum keeps both, and without it P's rounding leaks. A feature of queries and keys gives all scores an offset, of which FP8's
// sums of 13 bits lose a part: the L that the forward pass found is not that of the scores of the backward pass.
TEST_F(Fp8, i_zero_sum_keeps_the_sum) {
  for (const int64_t D : {64, 128})
    for (const float offset : {0.0f, 64.0f}) {
      Problem host = make_problem({{2, 4, 4, 512, 512, D}, {.fill = Fill::one_signed, .causal = true}, ""});
      for (int64_t b = 0; b < 2; ++b)
        for (int64_t h = 0; h < 4; ++h)
          for (int64_t i = 0; i < 512; ++i) {
            *host.q().at(b, h, i, 0) = 0, *host.k().at(b, h, i, 0) = 1;
            *host.q().at(b, h, i, 1) = *host.k().at(b, h, i, 1) =
                std::sqrt(offset * std::sqrt(static_cast<float>(D)));
          }
      Leak leak[2];
      for (size_t n = 0; n < 2; ++n) {
        const Result found = run(host.with(kernel_plan(kStabilisers[n])), host);
        leak[n] = leak_of(found);
        const double sum = probabilities_of(found, host);
        std::printf(
            "  head size %d, offset %.0f, %s: leak rms %.1e, mean %+.1f standard errors; P adds up to %.4f\n",
            static_cast<int>(D), double{offset}, kStabilisers[n], leak[n].rms, leak[n].mean_in_errors, sum);
        if (n == 1) EXPECT_NEAR(sum, 1, 1e-3);
      }
      EXPECT_LT(leak[1].rms, leak[0].rms / 4);
      EXPECT_LT(std::fabs(leak[1].mean_in_errors), 5);
    }
}

}  // namespace
}  // namespace evenkeel

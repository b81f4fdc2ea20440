// Problems that the definition does not allow: CPU, GPU and C interface refuse each with the same words, which one check
// says. No GPU is needed: the problem is refused before a device is looked at.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "attention/attention.h"
#include "attention/attention_call.h"
#include "evenkeel.h"

namespace evenkeel {
namespace {

constexpr int64_t kB = 2, kH = 4, kG = 2, kT = 5, kN = 7, kD = 8;

AttentionProblem valid() {
  AttentionProblem p;
  p.B = kB, p.H = kH, p.G = kG, p.T = kT, p.N = kN, p.D = kD;
  p.plans = {parse_plan("flash2")};
  return p;
}

evenkeel_attention valid_c(int32_t device) {
  evenkeel_attention a;
  evenkeel_attention_defaults(&a, sizeof a);
  a.device = device;
  a.type = EVENKEEL_FP32;
  a.B = kB, a.H = kH, a.G = kG, a.T = kT, a.N = kN, a.D = kD;
  a.plan = "flash2";
  return a;
}

CudaDevice hopper() {
  CudaDevice d;
  d.present = true;
  d.name = "made up";
  d.major = 9;
  return d;
}

std::string refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::invalid_argument& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another error: ") + error.what();
  }
  return "not refused";
}

struct Invalid {
  const char* words;
  std::function<void(AttentionProblem&)> change;
  std::function<void(evenkeel_attention&)> change_c;  // empty: C cannot say it
};

const int32_t kNumbers[kB] = {1, 1};

std::vector<Invalid> invalid_problems() {
  return {
      {"expected B from 1 to 2^31 - 1, got 0", [](auto& p) { p.B = 0; }, [](auto& a) { a.B = 0; }},
      {"expected T from 1 to 2^31 - 1, got -1", [](auto& p) { p.T = -1; }, [](auto& a) { a.T = -1; }},
      {"expected N from 1 to 2^31 - 1, got 2147483648", [](auto& p) { p.N = int64_t{1} << 31; },
       [](auto& a) { a.N = int64_t{1} << 31; }},
      {"expected D from 1 to 2^31 - 1, got 0", [](auto& p) { p.D = 0; }, [](auto& a) { a.D = 0; }},
      {"expected Dv from 1 to 2^31 - 1, or 0 for D, got -1", [](auto& p) { p.Dv = -1; },
       [](auto& a) { a.Dv = -1; }},
      {"expected query heads in whole groups for 3 key/value heads, got 4 query heads",
       [](auto& p) { p.G = 3; }, [](auto& a) { a.G = 3; }},
      {"expected fewer than 2^48 elements a tensor", [](auto& p) { p.B = p.T = INT32_MAX; },
       [](auto& a) { a.B = a.T = INT32_MAX; }},
      {"expected 1 plan or one for each of 4 query heads, got 0", [](auto& p) { p.plans.clear(); }, {}},
      {"expected 1 plan or one for each of 4 query heads, got 3", [](auto& p) { p.plans.resize(3); }, {}},
      {"expected a finite scale, got nan", [](auto& p) { p.scale = NAN; }, [](auto& a) { a.scale = NAN; }},
      {"expected a finite softcap of 0 (off) or more, got -1", [](auto& p) { p.softcap = -1; },
       [](auto& a) { a.softcap = -1; }},
      {"expected a finite softcap of 0 (off) or more, got inf", [](auto& p) { p.softcap = INFINITY; },
       [](auto& a) { a.softcap = INFINITY; }},
      {"centre_keys cannot go with softcap: a soft-capped softmax sees a constant added to a row; got "
       "softcap "
       "30 on head 0",
       [](auto& p) {
         p.softcap = 30;
         p.plans = {parse_plan("flash2,stabiliser=centre_keys")};
       },
       [](auto& a) {
         a.softcap = 30;
         a.plan = "flash2,stabiliser=centre_keys";
       }},
      {"got softcap 30 on head 2",
       [](auto& p) {
         p.softcap = 30;
         p.plans.resize(4, p.plans[0]);
         p.plans[2].stabiliser = Stabiliser::centre_keys;
       },
       [](auto& a) {
         a.softcap = 30;
         a.plan = "flash2; head 2: stabiliser=centre_keys";
       }},
      {"expected a plan that rounds nothing with fp64 tensors, such as \"fp32\", got \"flash2\"",
       [](auto& p) { p.type = TensorType::fp64; }, [](auto& a) { a.type = EVENKEEL_FP64; }},
      {"expected tile_keys of 0 (all keys) or more, got -1", [](auto& p) { p.tile_keys = -1; },
       [](auto& a) { a.tile_keys = -1; }},
      {"expected tile_rows of 1 or more, got 0", [](auto& p) { p.tile_rows = 0; }, {}},
      {"expected a first sequence of 0 or more, got -1", [](auto& p) { p.first_sequence = -1; }, {}},
      {"expected fact_sequences from 0 (all) to 2, got 3", [](auto& p) { p.fact_sequences = 3; }, {}},
      {"expected query_lengths with one number for each of 2 sequences, got 1",
       [](auto& p) {
         p.mask.query_lengths = {kNumbers, 1};
       },
       {}},
      {"expected key_offsets with one number for each of 2 sequences, got 1",
       [](auto& p) {
         p.mask.key_offsets = {kNumbers, 1};
       },
       {}},
      {"expected query_lengths with query_offsets, got none",
       [](auto& p) { p.mask.query_offsets = kNumbers; }, [](auto& a) { a.query_offsets = kNumbers; }},
      {"expected key_lengths with key_offsets, got none", [](auto& p) { p.mask.key_offsets = kNumbers; },
       [](auto& a) { a.key_offsets = kNumbers; }},
      {"expected query_rows, the rows of all sequences, with query_offsets, got 0",
       [](auto& p) { p.mask.query_offsets = p.mask.query_lengths = kNumbers; },
       [](auto& a) { a.query_offsets = a.query_lengths = kNumbers; }},
      {"expected key_rows, the keys of all sequences, with key_offsets, got 0",
       [](auto& p) { p.mask.key_offsets = p.mask.key_lengths = kNumbers; },
       [](auto& a) { a.key_offsets = a.key_lengths = kNumbers; }},
      {"expected a mask of shape (B, H, T, N) = (2, 4, 5, 7), got (2, 4, 7, 5)",
       [](auto& p) {
         static const uint8_t seen = 1;
         p.mask.visible = {&seen, {kB, kH, kN, kT}, {}};
       },
       {}},
  };
}

TEST(AttentionProblem, what_the_definition_does_not_allow_is_refused_everywhere_with_the_same_words) {
  for (const Invalid& invalid : invalid_problems()) {
    SCOPED_TRACE(invalid.words);
    AttentionProblem p = valid();
    EXPECT_NO_THROW(check(p));
    invalid.change(p);
    const std::string words = refusal([&] { check(p); });
    EXPECT_EQ(words.rfind("[attention] ", 0), 0u) << words;
    EXPECT_NE(words.find(invalid.words), std::string::npos) << words;
    EXPECT_EQ(refusal([&] { complete(p); }), words);
    EXPECT_EQ(refusal([&] { resolve(p, Cpu{}); }), words);
    EXPECT_EQ(refusal([&] { resolve(p, hopper()); }), words);
    EXPECT_EQ(refusal([&] { choose_kernel(p, hopper()); }), words);
    if (!invalid.change_c) continue;
    for (int32_t device : {EVENKEEL_CPU, EVENKEEL_CUDA}) {
      evenkeel_attention a = valid_c(device);
      invalid.change_c(a);
      evenkeel_sizes sizes;
      evenkeel_forward forward{};
      forward.struct_size = sizeof forward;
      evenkeel_backward backward{};
      backward.struct_size = sizeof backward;
      const char *kernel, *why;
      const std::function<int32_t()> calls[] = {
          [&] { return evenkeel_attention_sizes(&a, &sizes); },
          [&] { return evenkeel_attention_kernel(&a, &kernel, &why); },
          [&] { return evenkeel_attention_forward(&a, &forward, nullptr); },
          [&] { return evenkeel_attention_backward(&a, &backward, nullptr); }};
      for (const auto& call : calls) {
        EXPECT_EQ(call(), EVENKEEL_BAD_ARGUMENT) << "device " << device;
        EXPECT_EQ(evenkeel_last_error(), words) << "device " << device;
      }
    }
  }
}

// The calls on views take their sizes from the tensors; what is left is checked by the same check.
TEST(AttentionProblem, calls_on_views_refuse_the_same) {
  Tensor<float> q({kB, kH, kT, kD}), k({kB, kG, kN, kD});
  const AttentionInputs in{q.view(), k.view(), k.view()};
  AttentionBuffers buffers(in, /*with_facts=*/false);
  for (const Invalid& invalid : invalid_problems()) {
    SCOPED_TRACE(invalid.words);
    AttentionProblem p = valid();
    invalid.change(p);
    const bool by_sizes = p.B != kB || p.G != kG || p.T != kT || p.N != kN || p.D != kD || p.Dv != 0 ||
                          p.type == TensorType::fp64;
    if (by_sizes) continue;
    const std::string words = refusal([&] { check(p); });
    EXPECT_EQ(refusal([&] { attention_reference(p, in); }), words);
    EXPECT_EQ(refusal([&] { attention_forward(p, in, buffers.forward()); }), words);
    EXPECT_EQ(refusal([&] { attention_backward(p, in, q.view(), buffers.forward(), buffers.backward()); }),
              words);
  }
}

TEST(AttentionProblem, is_completed) {
  AttentionProblem p = valid();
  p.D = 64;
  EXPECT_EQ(complete(p).scale, 0.125f);
  EXPECT_EQ(complete(p).Dv, 64);
  EXPECT_EQ(complete(p).fact_sequences, kB);
  p.scale = -0.5f;
  p.fact_sequences = 1;
  EXPECT_EQ(complete(p).scale, -0.5f);
  EXPECT_EQ(complete(p).fact_sequences, 1);
  p.plans.resize(4, p.plans[0]);
  EXPECT_EQ(complete(p).plans.size(), 1u);
  p.plans[2].keel = 1e-3f;
  EXPECT_EQ(complete(p).plans.size(), 4u);
  EXPECT_EQ(complete(p).plan(2).keel, 1e-3f);
}

}  // namespace
}  // namespace evenkeel

// Which family of kernels is chosen, on devices made up here, and the check of a pass. No GPU is needed.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "attention/kernel_families.h"
#include "base/error.h"

namespace evenkeel {
namespace {

CudaDevice device(int major, int minor) {
  CudaDevice d;
  d.present = true;
  d.name = "made up";
  d.major = major;
  d.minor = minor;
  return d;
}
const CudaDevice kHopper = device(9, 0);

constexpr const char* kFlash2InFp16 =
    "flash2,probs=fp16,output=fp16,probs_bwd=fp16,dscores=fp16,dq=fp16,dk=fp16,dv=fp16";

AttentionProblem problem(std::string_view plan = "flash2,stabiliser=consistent") {
  AttentionProblem p;
  p.B = 2;
  p.H = 4;
  p.G = 2;
  p.T = p.N = 128;
  p.D = 64;
  p.type = TensorType::bf16;
  p.plans = {parse_plan(plan)};
  return p;
}

// What is refused, and the word for it.
template <class Body>
void expect_refused(const char* word, Body body) {
  try {
    body();
    ADD_FAILURE() << "not refused: " << word;
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  }
}

TEST(KernelChoice, hopper_takes_flash2_with_the_fast_stabilisers) {
  for (const char* stabiliser : {"none", "paper_capped", "dither", "wide_output", "consistent", "zero_sum"})
    for (const char* more : {"", ",keel=1e-3", ",beta=4,cap=12,seed=7"}) {
      const std::string plan = std::string("flash2,stabiliser=") + stabiliser + more;
      const KernelChoice choice = choose_kernel(problem(plan.c_str()), kHopper);
      EXPECT_EQ(choice.kernel, "hopper") << plan << ": " << choice.why;
      EXPECT_NE(choice.why.find(stabiliser), std::string::npos) << choice.why;
    }
  for (int64_t D : {8, 40, 64, 96, 128}) {
    AttentionProblem p = problem();
    p.D = D;
    EXPECT_EQ(choose_kernel(p, kHopper).kernel, "hopper") << D;
  }
}

TEST(KernelChoice, larger_heads_run_on_hopper_with_forms_too) {
  for (auto [D, Dv] :
       {std::pair<int64_t, int64_t>{136, 136}, {192, 192}, {256, 256}, {192, 128}, {64, 128}, {128, 256}}) {
    AttentionProblem p = problem();
    p.D = D, p.Dv = Dv, p.mask.causal = true;
    EXPECT_EQ(choose_kernel(p, kHopper).kernel, "hopper") << D << ", " << Dv;
    EXPECT_EQ(choose_kernel(p, device(8, 6)).kernel, "ampere") << D << ", " << Dv;
    p.mask.window_left = 10, p.softcap = 30;
    const KernelChoice choice = choose_kernel(p, kHopper);
    const bool small = D <= 128 && Dv <= 128;  // values of another size
    EXPECT_EQ(choice.kernel, small ? "ampere" : "hopper") << D << ", " << Dv;
    if (small)
      EXPECT_NE(choice.why.find("the Hopper kernels do not take more than a causal or full mask with"),
                std::string::npos)
          << choice.why;
  }
}

TEST(KernelChoice, sizes_of_values_that_nobody_takes) {
  const auto refuse = [](const char* word, int64_t D, int64_t Dv, const char* plan) {
    AttentionProblem p = problem(plan);
    p.D = D, p.Dv = Dv;
    expect_refused(word, [&] { choose_kernel(p, kHopper); });
  };
  refuse("values of another head size (Dv)", 64, 32, "bf16_all");
  refuse("head size 264 (a multiple of 8 up to 256 is taken)", 64, 264, "flash2");
  refuse("head size 60", 64, 60, "flash2");
}

TEST(KernelChoice, the_wide_output_is_16_bits_and_said_so) {
  for (const char* plan : {"flash2,stabiliser=wide_output", "flash2,stabiliser=consistent",
                           "flash2,stabiliser=consistent,output_for_delta=fp32",
                           "flash2,stabiliser=wide_output,output_for_delta=e8m15",
                           "flash2,stabiliser=consistent,output_for_delta=e8m15/stochastic"}) {
    const KernelChoice choice = choose_kernel(problem(plan), kHopper);
    EXPECT_EQ(choice.kernel, "hopper") << plan;
    EXPECT_NE(choice.why.find("16 significand bits"), std::string::npos) << choice.why;
  }
  // Without one of the two, O for delta is what the plan says, and the kernel has no other.
  EXPECT_EQ(choose_kernel(problem("flash2,output_for_delta=fp32"), kHopper).kernel, "any_plan");
  EXPECT_EQ(choose_kernel(problem("flash2,stabiliser=consistent,output_for_delta=e8m9"), kHopper).kernel,
            "any_plan");
}

TEST(KernelChoice, plans_of_all_heads_alike_are_one_plan) {
  AttentionProblem p = problem();
  p.plans = std::vector(4, p.plans[0]);
  EXPECT_EQ(choose_kernel(p, kHopper).kernel, "hopper");
  EXPECT_EQ(choose_kernel(p, kHopper).why.find("by head"), std::string::npos);
  // Those that differ run on the same kernels, and are named.
  p.plans[2] = parse_plan("flash2,stabiliser=zero_sum,keel=1e-3");
  const KernelChoice mixed = choose_kernel(p, kHopper);
  EXPECT_EQ(mixed.kernel, "hopper");
  EXPECT_NE(mixed.why.find("stabiliser consistent, zero_sum on compute capability 9.0, by head"),
            std::string::npos)
      << mixed.why;
  p.plans[2] = parse_plan("bf16_all");
  EXPECT_EQ(choose_kernel(p, kHopper).kernel, "any_plan");
}

// The gradient of the log-sum-exp is a pass's: the family is chosen by it where the caller says so beforehand.
TEST(KernelChoice, a_gradient_of_the_log_sum_chooses_a_family_that_takes_one) {
  const KernelChoice choice = choose_kernel(problem(), kHopper, Feature::grad_lse);
  EXPECT_TRUE(kernel_family(choice.kernel).limits.has(Feature::grad_lse)) << choice.kernel;
  EXPECT_EQ(choose_kernel(problem(), device(8, 0), Feature::grad_lse).kernel, "ampere");
  AttentionProblem wide = problem("fp32");
  wide.type = TensorType::fp32;
  expect_refused("the any-plan kernels do not take a gradient of the log-sum-exp",
                 [&] { choose_kernel(wide, kHopper, Feature::grad_lse); });
  expect_refused("grad_lse", [] { choose_kernel(problem(), kHopper, Feature::sinks); });
}

// One thing after another that the fast kernels do not take, and the word for it.
TEST(KernelChoice, everything_else_goes_to_any_plan_and_says_why) {
  const auto expect = [](const AttentionProblem& p, const char* word, const CudaDevice& on = kHopper) {
    const KernelChoice choice = choose_kernel(p, on);
    EXPECT_EQ(choice.kernel, "any_plan") << word;
    EXPECT_NE(choice.why.find(word), std::string::npos) << choice.why;
  };
  expect(problem(), "10.0", device(10, 0));
  expect(problem("fp32"), "Ampere-class kernels do not take probs=fp32", device(8, 0));
  expect(problem("fp32"), "probs=fp32");
  expect(problem("bf16_all"), "scores=bf16");
  expect(problem("flash2,row_sum=bf16"), "row_sum=bf16");
  expect(problem("flash2,probs=bf16/stochastic"), "probs=bf16/stochastic");
  expect(problem("fp8"), "q=e4m3");
  expect(problem("flash2,stabiliser=paper"), "paper");
  expect(problem("flash2,stabiliser=stochastic_output"), "stochastic_output");
  expect(problem("flash2,stabiliser=centre_keys"), "centre_keys");
  const auto changed = [](auto change) {
    AttentionProblem p = problem();
    change(p);
    return p;
  };
  expect(changed([](auto& p) { p.type = TensorType::fp32; }), "fp32");
  expect(changed([](auto& p) { p.scale = -1; }), "negative scale");
  expect(changed([](auto& p) { p.D = 65; }), "65");
  expect(changed([](auto& p) { p.aligned = false; }), "aligned");
  expect(changed([](auto& p) { p.with_facts = true; }), "outputs");
}

// One plan, both passes; and who does not ask for it does not hear of it.
TEST(KernelChoice, hopper_fp8_runs_its_plan) {
  const KernelFamily& family = kernel_family("hopper_fp8");
  const std::string plan(kHopperFp8Plan);
  for (const char* change : {"", ",stabiliser=zero_sum", ",accumulate=h200/4", ",keel=0.1"}) {
    EXPECT_EQ(not_taken(family, complete(problem(plan + change)), kHopper), "") << change;
    const KernelChoice choice = choose_kernel(problem(plan + change), kHopper);
    EXPECT_EQ(choice.kernel, "hopper_fp8") << change;
    EXPECT_NE(choice.why.find(plan + " with stabiliser"), std::string::npos) << choice.why;
  }
  for (const auto& [change, words] :
       {std::pair{",flash2", "q=fp32 (fp8_trains has e4m3*tile@e8m0_up)"},
        {",q=e4m3*tile", "q=e4m3*tile (fp8_trains has e4m3*tile@e8m0_up)"},
        {",probs=bf16", "probs=bf16"},
        {",v=e4m3*tile@e8m0_up", "v=e4m3*tile@e8m0_up"},
        {",k_bwd=bf16", "k_bwd=bf16"},
        {",row_sum=bf16", "row_sum=bf16"},
        {",dscores=e5m2^22", "dscores=e5m2^22"},
        {",dq=fp32", "dq=fp32"},
        {",keys=centred", "keys=centred"},
        {",queries=centred", "queries=centred"},
        {",stabiliser=consistent", "the stabiliser consistent (they have none and zero_sum)"},
        {",stabiliser=wide_output", "the stabiliser wide_output"},
        {",accumulate=h200", "theirs are accumulate=h200/4"},
        {",accumulate=a100/4", "theirs are accumulate=h200/4"}}) {
    const std::string found = not_taken(family, problem(plan + change), kHopper);
    EXPECT_NE(found.find(words), std::string::npos) << change << ": " << found;
  }
  EXPECT_NE(not_taken(family, problem(plan), device(8, 0)), "");
  EXPECT_EQ(choose_kernel(problem(plan), device(8, 0)).kernel, "any_plan");
  const KernelChoice consistent = choose_kernel(problem(plan + ",stabiliser=consistent"), kHopper);
  EXPECT_EQ(consistent.kernel, "any_plan");
  EXPECT_NE(consistent.why.find("the Hopper FP8 kernels do not take the stabiliser consistent"),
            std::string::npos)
      << consistent.why;
  EXPECT_EQ(choose_kernel(problem("bf16_all"), kHopper).why.find("FP8"), std::string::npos);
  AttentionProblem by_head = problem(plan);
  by_head.plans = std::vector(4, by_head.plans[0]);
  by_head.plans[1] = parse_plan(plan + ",stabiliser=zero_sum");
  EXPECT_EQ(choose_kernel(by_head, kHopper).kernel, "hopper_fp8");
  by_head.plans[1] = parse_plan("flash2");
  EXPECT_EQ(choose_kernel(by_head, kHopper).kernel, "any_plan");
  EXPECT_EQ(choose_kernel(problem(plan), kHopper, Feature::grad_lse).kernel, "hopper_fp8");
}

// What no kernels of a GPU have is refused in words, never computed as something else.
TEST(KernelChoice, shared_scales_and_the_like_are_refused_on_a_gpu) {
  const std::pair<const char*, const char*> cases[] = {
      {"mxfp8", "probs=e4m3*block32@e8m0_up (scales that blocks of P or dS share run on the CPU)"},
      {"flash2,dscores=int8*tile", "dscores=int8*tile"},
      {"flash2,probs=int8*column", "probs=int8*column"},
      {"flash2,queries=centred", "queries=centred (queries less their mean run on the CPU)"},
      {"hifloat8", "dscores=hif8*tile@e8m0_up/nearest_away"},
      {"flash2,grad_output=bf16,grad_output_for_dprobs=fp32",
       "grad_output_for_dprobs=fp32 beside grad_output=bf16"},
      {"flash2,accumulate=h200/4", "sums of another chip or with promotion"},
      {"flash2,accumulate=a100", "sums of another chip or with promotion"},
      {"fp8_fa3,accumulate=h200", "the chip's sums of FP8 products run on the CPU"},
      {"flash2,dscores=e5m2,accumulate=tensor_core", "dscores=e5m2 with accumulate=h200"},
  };
  for (const auto& [plan, words] : cases) {
    try {
      const KernelChoice choice = choose_kernel(problem(plan), kHopper);
      ADD_FAILURE() << plan << " was taken by " << choice.kernel;
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
  }
  EXPECT_EQ(choose_kernel(problem("flash2,keys=centred"), kHopper).kernel, "any_plan");
  for (const char* plan : {"pasa_fp16", "fp8_fa3", "flash2,q=int8*tile",
                           "flash2,k=int4*column,v=e4m3*column32", "flash2,v_bwd=bf16", "flash2,probs=e2m1"})
    EXPECT_EQ(choose_kernel(problem(plan), kHopper).kernel, "any_plan") << plan;
  EXPECT_EQ(choose_kernel(problem("flash2,accumulate=h200"), kHopper).kernel, "hopper");
}

// Both fast families take every form; not on what they were never compiled for.
TEST(KernelChoice, the_fast_kernels_run_on_their_machines_and_take_every_form) {
  for (const CudaDevice& on : {device(8, 0), device(8, 6), device(8, 9), device(12, 0), kHopper}) {
    const auto expect = [&](auto change) {
      AttentionProblem p = problem();
      change(p);
      const KernelChoice choice = choose_kernel(p, on);
      EXPECT_EQ(choice.kernel, on.major == 9 ? "hopper" : "ampere") << choice.why;
    };
    expect([](auto&) {});
    expect([](auto& p) { p.mask.window_left = 5; });
    expect([](auto& p) { p.softcap = 30; });
    static const float numbers[4] = {1, 2, 3, 4};
    expect([](auto& p) { p.slopes = p.sinks = numbers; });
    expect([](auto& p) { p.mask.visible = {reinterpret_cast<const uint8_t*>(&p), {2, 4, 128, 128}, {}}; });
    expect([](auto& p) {
      p.plans.resize(4, p.plans[0]);
      p.plans[1] = parse_plan("flash2,stabiliser=zero_sum,keel=1e-3");
    });
    expect([](auto& p) {
      p.type = TensorType::fp16;
      p.plans = {parse_plan(kFlash2InFp16)};
      p.plans[0].stabiliser = Stabiliser::wide_output;
    });
    AttentionProblem facts = problem();
    facts.with_facts = true;
    EXPECT_EQ(choose_kernel(facts, on).kernel, "any_plan");
  }
  EXPECT_EQ(choose_kernel(problem(), device(8, 7)).kernel, "any_plan");
  EXPECT_EQ(choose_kernel(problem(), device(9, 1)).kernel, "any_plan");
  EXPECT_EQ(choose_kernel(problem(), kHopper).kernel, "hopper");
  setenv("EVENKEEL_KERNELS", "ampere", 1);
  EXPECT_EQ(choose_kernel(problem(), kHopper).kernel, "ampere");
  expect_refused("the Ampere-class kernels do not take probs=fp32",
                 [] { choose_kernel(problem("fp32"), kHopper); });
  setenv("EVENKEEL_KERNELS", "volta", 1);
  expect_refused("volta", [] { choose_kernel(problem(), kHopper); });
  unsetenv("EVENKEEL_KERNELS");
  // A plan's formats are those of the tensors.
  AttentionProblem mixed = problem();
  mixed.type = TensorType::fp16;
  EXPECT_NE(not_taken(kernel_family("ampere"), mixed, kHopper).find("probs=bf16"), std::string::npos);
}

// Few query rows and many keys: on Hopper, too, by the class whose kernels split the keys.
TEST(KernelChoice, few_rows) {
  AttentionProblem p = problem();
  p.H = 32, p.G = 8, p.T = 16, p.N = 512;
  for (const CudaDevice& on : {kHopper, device(8, 0)}) {
    const KernelChoice choice = choose_kernel(p, on);
    EXPECT_EQ(choice.kernel, "ampere");
    EXPECT_NE(choice.why.find("few query rows, keys split over blocks"), std::string::npos) << choice.why;
  }
  const auto expect_hopper = [&](auto change) {
    AttentionProblem other = p;
    change(other);
    const KernelChoice choice = choose_kernel(other, kHopper);
    EXPECT_EQ(choice.kernel, "hopper");
    EXPECT_EQ(choice.why.find("few query rows"), std::string::npos) << choice.why;
  };
  expect_hopper([](auto& other) { other.T = 17; });
  expect_hopper([](auto& other) { other.N = 511; });
  expect_hopper([](auto& other) { other.plans[0].stabiliser = Stabiliser::paper_capped; });
  expect_hopper([](auto& other) {
    other.plans.resize(32, other.plans[0]);
    other.plans[1].stabiliser = Stabiliser::zero_sum;
  });
  setenv("EVENKEEL_KERNELS", "hopper", 1);
  EXPECT_EQ(choose_kernel(p, kHopper).kernel, "hopper");
  unsetenv("EVENKEEL_KERNELS");
}

TEST(KernelChoice, alignment) {
  const std::array<int64_t, 4> sizes = {2, 4, 128, 64};
  const auto at = [](uintptr_t address, std::array<int64_t, 4> stride) {
    return DeviceTensor{reinterpret_cast<void*>(address), stride};
  };
  EXPECT_TRUE(is_aligned(at(256, {32768, 8192, 64, 1}), sizes));
  EXPECT_TRUE(is_aligned(at(256, {0, 8192, 64, 1}), sizes));       // packed
  EXPECT_TRUE(is_aligned(at(16, {98304, 64, 768, 1}), sizes));     // of one (B, T, 3, H, D) tensor
  EXPECT_FALSE(is_aligned(at(8, {32768, 8192, 64, 1}), sizes));    // address
  EXPECT_FALSE(is_aligned(at(256, {32768, 8192, 64, 2}), sizes));  // features apart
  EXPECT_FALSE(is_aligned(at(256, {32768, 8192, 68, 1}), sizes));  // rows at 136 bytes
  EXPECT_FALSE(is_aligned(at(256, {32768, 0, 64, 1}), sizes));     // broadcast heads
  EXPECT_FALSE(is_aligned(at(256, {32768, -8192, 64, 1}), sizes));
  EXPECT_TRUE(is_aligned(at(256, {1, 1, 64, 1}), {1, 1, 128, 64}));  // one batch, one head: strides not used
}

// What no family of the device takes.
TEST(KernelChoice, nobody_takes_what_is_beyond_every_limit) {
  const auto refuse = [](const char* word, auto change) {
    AttentionProblem p = problem();
    change(p);
    expect_refused(word, [&] { choose_kernel(p, kHopper); });
  };
  refuse("head size 264 (a multiple of 8 up to 256 is taken)", [](auto& p) { p.D = 264; });
  refuse("head size 136 (any up to 128 is taken)", [](auto& p) {
    p.D = 136;
    p.plans = {parse_plan("bf16_all")};
  });
  refuse("head size 129", [](auto& p) { p.D = 129; });
  refuse("fp64 tensors (bf16, fp32 are taken)", [](auto& p) {
    p.type = TensorType::fp64;
    p.plans = {parse_plan("fp32")};
  });
  refuse("tile_keys", [](auto& p) { p.tile_keys = 32; });
  refuse("first sequence", [](auto& p) { p.first_sequence = 1; });
  static const int32_t numbers[2] = {0, 0};
  static const uint32_t step = 0;
  const auto refuse_on_cpu = [](const char* word, auto change) {
    AttentionProblem p = problem();
    p.type = TensorType::fp32;
    change(p);
    expect_refused(word, [&] { resolve(p, Cpu{}); });
  };
  refuse_on_cpu("bf16 tensors (fp32, fp64 are taken)", [](auto& p) { p.type = TensorType::bf16; });
  refuse_on_cpu("device_step", [](auto& p) { p.device_step = &step; });
  refuse_on_cpu("packed sequences", [](auto& p) {
    p.mask.query_offsets = p.mask.query_lengths = numbers;
    p.mask.query_rows = 9;
  });
}

TEST(KernelChoice, absent_and_old_devices_are_no_fault_of_the_problem) {
  EXPECT_THROW(choose_kernel(problem(), CudaDevice{}), DataError);
  EXPECT_THROW(choose_kernel(problem(), device(7, 5)), DataError);
}

// One place has each limit: what the families take is what their rows say.
TEST(KernelFamilies, limits_are_kept) {
  for (const KernelFamily& family : kernel_families()) {
    EXPECT_EQ(&kernel_family(family.name), &family);
    AttentionProblem p = problem("fp32");
    if (family.plan_not_taken) p = problem("flash2");
    if (std::string_view(family.name) == "hopper_fp8") p = problem(kHopperFp8Plan);
    p.D = p.Dv = family.limits.head_step;
    const std::vector<PrecisionPlan> plans = p.plans;
    for (size_t n = 0; n < kTensorTypeNames.size(); ++n) {
      p.type = static_cast<TensorType>(n);
      if (family.plan_not_taken)
        p.plans = p.type == TensorType::fp16 ? std::vector{parse_plan(kFlash2InFp16)} : plans;
      EXPECT_EQ(not_taken(family, p, kHopper).empty(), family.limits.has(p.type)) << family.name << n;
    }
    p.type = family.on_gpu ? TensorType::bf16 : TensorType::fp32;
    p.plans = plans;
    for (int64_t D = 1; D <= 300; ++D) {
      p.D = p.Dv = D;
      const bool taken = D % family.limits.head_step == 0 &&
                         (family.limits.largest_head == 0 || D <= family.limits.largest_head);
      EXPECT_EQ(not_taken(family, p, kHopper).empty(), taken) << family.name << D;
    }
  }
  EXPECT_THROW(kernel_family("no such"), std::invalid_argument);
}

// docs/kernels.md says what the table says.
TEST(KernelFamilies, the_table_in_the_docs_is_true) {
  std::ifstream file(EVENKEEL_SOURCE_DIR "/docs/kernels.md");
  const std::string page(std::istreambuf_iterator<char>(file), {});
  const auto expect_line = [&](const std::string& form, auto cell) {
    std::string line = "| " + form + " |";
    for (const KernelFamily& family : kernel_families()) line += " " + cell(family) + " |";
    EXPECT_NE(page.find("\n" + line + "\n"), std::string::npos) << "docs/kernels.md lacks the line\n" << line;
  };
  expect_line("form", [](const KernelFamily& family) { return std::string(family.name); });
  expect_line("tensors", [](const KernelFamily& family) { return types_taken(family.limits); });
  expect_line("largest head size", [](const KernelFamily& family) {
    return family.limits.largest_head == 0 ? "any" : std::to_string(family.limits.largest_head);
  });
  const std::pair<const char*, Feature> forms[] = {{"plans that differ by head", Feature::plans_by_head},
                                                   {"soft cap", Feature::softcap},
                                                   {"sliding windows", Feature::windows},
                                                   {"a mask of its own", Feature::visible},
                                                   {"packed sequences", Feature::packed},
                                                   {"slopes by distance (ALiBi)", Feature::slopes},
                                                   {"sinks", Feature::sinks},
                                                   {"gradient of the log-sum-exp", Feature::grad_lse},
                                                   {"values of another head size", Feature::value_size},
                                                   {"facts (ties, delta, residual)", Feature::facts},
                                                   {"unaligned tensors", Feature::unaligned}};
  for (const auto& [form, feature] : forms)
    expect_line(form, [f = feature](const KernelFamily& family) {
      return std::string(family.limits.has(f) ? "yes" : "\u2013");
    });
  expect_line("leak and ties by a pass behind the other two",
              [](const KernelFamily& family) { return std::string(family.facts ? "yes" : "\u2013"); });
}

TEST(KernelFamilies, a_pass_for_facts_behind_the_other_two) {
  const auto has = [](const char* family, auto change) {
    AttentionProblem p = problem();
    change(p);
    p = complete(p);
    EXPECT_EQ(not_taken(kernel_family(family), p, kHopper), "") << family;
    return has_fact_pass(kernel_family(family), p);
  };
  for (const char* plan : {"flash2", "flash2,stabiliser=consistent", "flash2,stabiliser=zero_sum,keel=1e-3"})
    EXPECT_TRUE(has("hopper", [&](auto& p) { p.plans = {parse_plan(plan)}; })) << plan;
  EXPECT_TRUE(has("hopper", [](auto& p) { p.D = 128, p.mask.causal = true; }));
  EXPECT_TRUE(has("hopper", [](auto& p) {
    p.plans.resize(4, p.plans[0]);
    p.plans[1].stabiliser = Stabiliser::consistent;
  }));
  EXPECT_FALSE(has("hopper", [](auto& p) { p.D = 256; }));
  EXPECT_FALSE(has("hopper", [](auto& p) { p.Dv = 128, p.D = 192; }));
  EXPECT_FALSE(has("hopper", [](auto& p) { p.softcap = 3; }));
  EXPECT_FALSE(has("hopper", [](auto& p) { p.mask.window_left = 3; }));
  EXPECT_FALSE(has("hopper", [](auto& p) {
    p.type = TensorType::fp16;
    p.plans = {parse_plan(kFlash2InFp16)};
  }));
  EXPECT_FALSE(has("ampere", [](auto&) {}));
  EXPECT_FALSE(has("any_plan", [](auto&) {}));
  EXPECT_FALSE(has("hopper_fp8", [](auto& p) { p.plans = {parse_plan(kHopperFp8Plan)}; }));
}

TEST(AttentionCall, on_the_cpu_is_resolved_and_says_why) {
  AttentionProblem p = problem();
  p.type = TensorType::fp32;
  AttentionCall call = resolve(p, Cpu{});
  EXPECT_EQ(call.choice().kernel, "cpu");
  EXPECT_NE(call.choice().why.find("threads"), std::string::npos);
  EXPECT_EQ(call.sizes().saved, 2u * 4 * 128 * (64 + 2) * sizeof(float));
  EXPECT_EQ(call.sizes().workspace, 0u);
  EXPECT_TRUE(call.could_give_facts());
  EXPECT_EQ(call.problem().scale, 0.125f);
  call.set_step(7);
  EXPECT_EQ(call.problem().step, 7u);
  EXPECT_EQ(AttentionCall(kernel_family("cpu"), p).choice().kernel, "cpu");
  p.type = TensorType::bf16;
  expect_refused("the CPU kernels do not take bf16", [&] { AttentionCall(kernel_family("cpu"), p); });
}

// Elements of what is written that share memory, whatever the stride; a view of a larger tensor has none.
TEST(PassCheck, refuses_written_elements_in_one_place) {
  alignas(256) static char memory[512];
  const AttentionProblem p = complete(problem());
  const PassSizes sizes{1024, 1024};
  const DeviceTensor query{memory, {32768, 8192, 64, 1}}, key{memory, {16384, 8192, 64, 1}};
  const auto forward = [&](const std::array<int64_t, 4>& stride, const char* family) {
    ForwardPass out{query, reinterpret_cast<float*>(memory), memory, nullptr};
    out.o.stride = stride;
    check_forward(p, kernel_family(family), sizes, {query, key, key}, out, memory, nullptr);
  };
  const int64_t batch = query.stride[0], head = query.stride[1], row = query.stride[2], one = query.stride[3];
  for (const char* family : {"any_plan", "cpu", "hopper"})
    for (const std::array<int64_t, 4>& stride : {std::array{batch, head, int64_t{0}, one},
                                                 {batch, int64_t{0}, row, one},
                                                 {batch, head, row / 2, one},
                                                 {batch, head / 2, row, one},
                                                 {batch / 2, head, row, one},
                                                 {head, head, row, one}})
      expect_refused("two elements in one place", [&] { forward(stride, family); });
  expect_refused("two elements in one place", [&] { forward({batch, head, -row / 2, one}, "cpu"); });
  for (const std::array<int64_t, 4>& stride : {std::array{2 * batch, row, 2 * p.H * row, one},
                                               {3 * batch, head, row, one},
                                               {batch, head, -row, one},
                                               {one, 4 * head, 4 * row, 4 * one}})
    forward(stride, "cpu");
}

TEST(PassCheck, refuses_tensors_that_do_not_fit) {
  alignas(256) static char memory[512];
  const AttentionProblem p = complete(problem());
  const PassSizes sizes{1024, 1024};
  const DeviceTensor query{memory, {32768, 8192, 64, 1}}, key{memory, {16384, 8192, 64, 1}};
  const PassInputs in{query, key, key};
  ForwardPass out{query, reinterpret_cast<float*>(memory), memory, nullptr};
  AttentionProblem with_facts = p;
  with_facts.with_facts = true;
  const KernelFamily &hopper = kernel_family("hopper"), &any_plan = kernel_family("any_plan"),
                     &cpu = kernel_family("cpu");
  check_forward(p, hopper, sizes, in, out, memory, nullptr);
  const auto forward = [&](const char* word, auto change,
                           const KernelFamily& family = kernel_family("hopper")) {
    PassInputs i = in;
    ForwardPass o = out;
    const void* workspace = memory;
    change(i, o, workspace);
    expect_refused(word, [&] { check_forward(p, family, sizes, i, o, workspace, nullptr); });
  };
  forward("tensor q", [](auto& i, auto&, auto&) { i.q.data = nullptr; });
  forward("tensor v", [](auto& i, auto&, auto&) { i.v.data = nullptr; });
  forward(
      "element's 2 bytes", [](auto& i, auto&, auto&) { i.k.data = memory + 1; }, any_plan);
  forward("multiple of 16", [](auto& i, auto&, auto&) { i.k.data = memory + 2; });
  forward("multiples of 8", [](auto& i, auto&, auto&) { i.k.stride[2] = 65; });
  forward("lse at a multiple", [](auto&, auto& o, auto&) { o.lse = reinterpret_cast<float*>(memory + 2); });
  forward("lse", [](auto&, auto& o, auto&) { o.lse = nullptr; });
  forward("saved", [](auto&, auto& o, auto&) { o.saved = nullptr; });
  forward("saved at a multiple of 256", [](auto&, auto& o, auto&) { o.saved = memory + 16; });
  forward("workspace", [](auto&, auto&, auto& w) { w = nullptr; });
  forward("with_facts", [](auto&, auto& o, auto&) { o.ties = reinterpret_cast<int32_t*>(memory); });
  // What only the fast kernels need is not asked of the others: any strides of inputs.
  PassInputs odd = in;
  odd.k.data = memory + 2;
  odd.k.stride = {0, 0, 65, 3};
  check_forward(p, any_plan, sizes, odd, out, memory, nullptr);
  expect_refused("stream", [&] { check_forward(p, cpu, sizes, in, out, memory, memory); });

  const BackwardPass back{query, key, key};
  check_backward(p, hopper, sizes, in, query, out, back, memory, nullptr);
  const auto backward = [&](const char* word, auto change) {
    DeviceTensor grad = query;
    ForwardPass saved = out;
    BackwardPass b = back;
    change(grad, saved, b);
    expect_refused(word, [&] { check_backward(p, hopper, sizes, in, grad, saved, b, memory, nullptr); });
  };
  backward("grad_output", [](auto& g, auto&, auto&) { g.data = nullptr; });
  backward("tensor o", [](auto&, auto& s, auto&) { s.o.data = nullptr; });
  backward("lse", [](auto&, auto& s, auto&) { s.lse = nullptr; });
  backward("saved", [](auto&, auto& s, auto&) { s.saved = nullptr; });
  backward("dq", [](auto&, auto&, auto& b) { b.dq.data = nullptr; });
  backward("dk", [](auto&, auto&, auto& b) { b.dk.stride[1] = 0; });
  backward("dv", [](auto&, auto&, auto& b) { b.dv.stride[3] = 2; });
  backward("with_facts", [](auto&, auto&, auto& b) { b.residual = reinterpret_cast<float*>(memory); });

  // Facts alone: without dk and dv, not without one of them.
  backward("dk", [](auto&, auto&, auto& b) { b.dk = b.dv = {}; });
  BackwardPass facts_alone = back;
  facts_alone.dk = facts_alone.dv = {};
  check_backward(with_facts, any_plan, sizes, in, query, out, facts_alone, memory, nullptr);
  facts_alone.dk = back.dk;
  expect_refused("dv", [&] {
    check_backward(with_facts, any_plan, sizes, in, query, out, facts_alone, memory, nullptr);
  });
}

// Facts of scores: both or none, and of kernels that find them.
TEST(PassCheck, facts_of_scores) {
  alignas(256) static char memory[512];
  const AttentionProblem p = complete(problem());
  const PassSizes sizes{1024, 1024};
  const DeviceTensor query{memory, {32768, 8192, 64, 1}}, key{memory, {16384, 8192, 64, 1}};
  const PassInputs in{query, key, key};
  ForwardPass out{query, reinterpret_cast<float*>(memory), memory, nullptr};
  out.largest_score = out.largest_row_mean = reinterpret_cast<float*>(memory);
  check_forward(p, kernel_family("hopper"), sizes, in, out, memory, nullptr);
  expect_refused("the Ampere-class kernels do not find the largest score",
                 [&] { check_forward(p, kernel_family("ampere"), sizes, in, out, memory, nullptr); });
  AttentionProblem window = p;
  window.mask.window_left = 5;
  expect_refused("of this problem",
                 [&] { check_forward(window, kernel_family("hopper"), sizes, in, out, memory, nullptr); });
  out.largest_row_mean = nullptr;
  expect_refused("or neither",
                 [&] { check_forward(p, kernel_family("hopper"), sizes, in, out, memory, nullptr); });
}

// The pass for facts of rows: kernels that have it, what it needs, and delta for it without with_facts.
TEST(PassCheck, facts_of_rows) {
  alignas(256) static char memory[512];
  const AttentionProblem p = complete(problem());
  const PassSizes sizes{1024, 1024};
  const DeviceTensor query{memory, {32768, 8192, 64, 1}}, key{memory, {16384, 8192, 64, 1}};
  const PassInputs in{query, key, key};
  const ForwardPass saved{query, reinterpret_cast<float*>(memory), memory, nullptr};
  const auto numbers = reinterpret_cast<float*>(memory);
  const FactPass all{numbers, numbers, reinterpret_cast<int32_t*>(memory)};
  const KernelFamily &hopper = kernel_family("hopper"), &ampere = kernel_family("ampere");
  check_facts(p, hopper, sizes, in, query, saved, all);
  const auto refused = [&](const char* word, auto change, const KernelFamily& family) {
    AttentionProblem asked = p;
    ForwardPass s = saved;
    FactPass f = all;
    change(asked, s, f);
    expect_refused(word, [&] { check_facts(asked, family, sizes, in, query, s, f); });
  };
  refused(
      "the Ampere-class kernels have no pass", [](auto&, auto&, auto&) {}, ampere);
  refused(
      "of this problem's rows", [](auto& asked, auto&, auto&) { asked.mask.window_left = 5; }, hopper);
  refused(
      "expected delta", [](auto&, auto&, auto& f) { f.delta = nullptr; }, hopper);
  refused(
      "and residual", [](auto&, auto&, auto& f) { f.residual = nullptr; }, hopper);
  refused(
      "lse", [](auto&, auto& s, auto&) { s.lse = nullptr; }, hopper);
  refused(
      "saved of 1024", [](auto&, auto& s, auto&) { s.saved = nullptr; }, hopper);
  refused(
      "ties at a multiple", [](auto&, auto&, auto& f) { f.ties = reinterpret_cast<int32_t*>(memory + 2); },
      hopper);

  BackwardPass back{query, key, key};
  back.delta = numbers;
  check_backward(p, hopper, sizes, in, query, saved, back, memory, nullptr);
  expect_refused("with_facts",
                 [&] { check_backward(p, ampere, sizes, in, query, saved, back, memory, nullptr); });
}

// Packed: a batch stride of 0 is asked for, and is no mistake in what is written.
TEST(PassCheck, packed_tensors_have_a_batch_stride_of_0) {
  alignas(256) static char memory[512];
  const PassSizes sizes{1024, 1024};
  const DeviceTensor query{memory, {32768, 8192, 64, 1}}, key{memory, {16384, 8192, 64, 1}};
  const PassInputs in{query, key, key};
  ForwardPass out{query, reinterpret_cast<float*>(memory), memory, nullptr};
  const KernelFamily& hopper = kernel_family("hopper");
  static const int32_t numbers[2] = {0, 0};
  AttentionProblem packed = problem();
  packed.mask.query_offsets = packed.mask.query_lengths = packed.mask.key_offsets = packed.mask.key_lengths =
      numbers;
  packed.mask.query_rows = packed.mask.key_rows = 200;
  packed = complete(packed);
  expect_refused("batch stride of 0",
                 [&] { check_forward(packed, hopper, sizes, in, out, memory, nullptr); });
  PassInputs flat = in;
  flat.q.stride[0] = flat.k.stride[0] = flat.v.stride[0] = out.o.stride[0] = 0;
  check_forward(packed, hopper, sizes, flat, out, memory, nullptr);
}

// A build without CUDA, or a machine without a driver, says so and does not crash.
TEST(CudaDevice, is_there_or_says_why_not) {
  const CudaDevice found = cuda_device();
  if (found.present) {
    EXPECT_GE(found.major, 1);
  } else {
    EXPECT_FALSE(found.why.empty());
    EXPECT_THROW(resolve(problem(), found), DataError);
  }
}

}  // namespace
}  // namespace evenkeel

// Which GPU kernel is chosen, on devices made up here, and the check of a GPU request. No GPU is needed.
#include <gtest/gtest.h>

#include <cmath>

#include "attention/cuda_request.h"

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

CudaAttention problem(const char* plan = "flash2,stabiliser=consistent") {
  CudaAttention p;
  p.B = 2;
  p.H = 4;
  p.G = 2;
  p.T = p.N = 128;
  p.D = 64;
  p.plans = {parse_plan(plan)};
  return p;
}

TEST(KernelChoice, hopper_takes_flash2_with_the_fast_stabilisers) {
  for (const char* stabiliser : {"none", "paper_capped", "dither", "wide_output", "consistent", "zero_sum"})
    for (const char* more : {"", ",keel=1e-3", ",beta=4,cap=12,seed=7"}) {
      const std::string plan = std::string("flash2,stabiliser=") + stabiliser + more;
      const KernelChoice choice = choose_kernel(kHopper, problem(plan.c_str()), false);
      EXPECT_EQ(choice.kernel, AttentionKernel::hopper) << plan << ": " << choice.why;
      EXPECT_NE(choice.why.find(stabiliser), std::string::npos) << choice.why;
    }
  for (int64_t D : {8, 40, 64, 96, 128}) {
    CudaAttention p = problem();
    p.D = D;
    EXPECT_EQ(choose_kernel(kHopper, p, false).kernel, AttentionKernel::hopper) << D;
  }
}

TEST(KernelChoice, the_wide_output_is_16_bits_and_said_so) {
  for (const char* plan : {"flash2,stabiliser=wide_output", "flash2,stabiliser=consistent",
                           "flash2,stabiliser=consistent,output_for_delta=fp32",
                           "flash2,stabiliser=wide_output,output_for_delta=e8m15",
                           "flash2,stabiliser=consistent,output_for_delta=e8m15/stochastic"}) {
    const KernelChoice choice = choose_kernel(kHopper, problem(plan), false);
    EXPECT_EQ(choice.kernel, AttentionKernel::hopper) << plan;
    EXPECT_NE(choice.why.find("16 significand bits"), std::string::npos) << choice.why;
  }
  // Without one of the two, O for delta is what the plan says, and the kernel has no other.
  EXPECT_EQ(choose_kernel(kHopper, problem("flash2,output_for_delta=fp32"), false).kernel,
            AttentionKernel::any_plan);
  EXPECT_EQ(
      choose_kernel(kHopper, problem("flash2,stabiliser=consistent,output_for_delta=e8m9"), false).kernel,
      AttentionKernel::any_plan);
}

TEST(KernelChoice, plans_of_all_heads_alike_are_one_plan) {
  CudaAttention p = problem();
  p.plans = std::vector(4, p.plans[0]);
  EXPECT_EQ(choose_kernel(kHopper, p, false).kernel, AttentionKernel::hopper);
  EXPECT_EQ(complete(p).plans.size(), 1u);
  p.plans[2].keel = 1e-3f;
  EXPECT_EQ(choose_kernel(kHopper, p, false).kernel, AttentionKernel::any_plan);
  EXPECT_EQ(complete(p).plans.size(), 4u);
}

// One thing after another that the fast kernels do not take, and the word for it.
TEST(KernelChoice, everything_else_goes_to_any_plan_and_says_why) {
  const auto expect = [](const CudaAttention& p, const char* word, const CudaDevice& on = kHopper,
                         bool facts = false) {
    const KernelChoice choice = choose_kernel(on, p, facts);
    EXPECT_EQ(choice.kernel, AttentionKernel::any_plan) << word;
    EXPECT_NE(choice.why.find(word), std::string::npos) << choice.why;
  };
  expect(problem(), "8.0", device(8, 0));
  expect(problem(), "8.9", device(8, 9));
  expect(problem(), "10.0", device(10, 0));
  expect(problem(), "outputs", kHopper, /*facts=*/true);
  expect(problem("fp32"), "probs=fp32");
  expect(problem("bf16_all"), "scores=bf16");
  expect(problem("flash2,row_sum=bf16"), "row_sum=bf16");
  expect(problem("flash2,probs=bf16/stochastic"), "probs=bf16/stochastic");
  expect(problem("fp8"), "q=e4m3");
  expect(problem("flash2,stabiliser=paper"), "paper");
  expect(problem("flash2,stabiliser=stochastic_output"), "stochastic_output");
  expect(problem("flash2,stabiliser=centre_keys"), "centre_keys");
  const auto changed = [](auto change) {
    CudaAttention p = problem();
    change(p);
    return p;
  };
  expect(changed([](auto& p) { p.type = TensorType::fp32; }), "fp32");
  expect(changed([](auto& p) { p.scale = -1; }), "negative scale");
  expect(changed([](auto& p) { p.D = 136; }), "136");
  expect(changed([](auto& p) { p.D = 65; }), "65");
  expect(changed([](auto& p) { p.softcap = 30; }), "softcap");
  expect(changed([](auto& p) { p.window_left = 5; }), "window");
  expect(changed([](auto& p) { p.window_right = 0; }), "window");
  expect(changed([](auto& p) { p.visible.data = &p; }), "mask");
  expect(changed([](auto& p) { p.aligned = false; }), "aligned");
  expect(changed([](auto& p) { p.plans.clear(); }), "without a plan");
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

// What complete and the checks of a pass refuse, and the word for it.
template <class Body>
void expect_refused(const char* word, Body body) {
  try {
    body();
    ADD_FAILURE() << "not refused: " << word;
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  }
}

TEST(CudaRequest, is_completed) {
  const CudaAttention p = complete(problem());
  EXPECT_EQ(p.scale, 0.125f);
  CudaAttention given = problem();
  given.scale = 0.5f;
  EXPECT_EQ(complete(given).scale, 0.5f);
  EXPECT_EQ(p.fact_sequences, p.B);
  given.fact_sequences = 1;
  EXPECT_EQ(complete(given).fact_sequences, 1);
}

TEST(CudaRequest, refuses_what_the_definition_does_not_allow) {
  static const int32_t number = 0;
  const auto refuse = [](const char* word, auto change) {
    CudaAttention p = problem();
    change(p);
    expect_refused(word, [&] { complete(p); });
  };
  refuse("B from 1", [](auto& p) { p.B = 0; });
  refuse("N from 1", [](auto& p) { p.N = int64_t{1} << 31; });
  refuse("head size", [](auto& p) { p.D = 129; });
  refuse("groups", [](auto& p) { p.G = 3; });
  refuse("1 plan or one for each", [](auto& p) { p.plans = std::vector(3, p.plans[0]); });
  refuse("1 plan or one for each", [](auto& p) { p.plans.clear(); });
  refuse("scale", [](auto& p) { p.scale = NAN; });
  refuse("softcap", [](auto& p) { p.softcap = -1; });
  refuse("tile_keys", [](auto& p) { p.tile_keys = 32; });
  refuse("fact_sequences", [](auto& p) { p.fact_sequences = p.B + 1; });
  refuse("fact_sequences", [](auto& p) { p.fact_sequences = -1; });
  refuse("query_lengths", [](auto& p) { p.query_offsets = &number; });
  refuse("key_lengths", [](auto& p) { p.key_offsets = &number; });
  refuse("query_rows", [](auto& p) { p.query_offsets = p.query_lengths = &number; });
  refuse("key_rows", [](auto& p) { p.key_offsets = p.key_lengths = &number; });
}

TEST(CudaRequest, refuses_tensors_that_do_not_fit) {
  alignas(256) static char memory[512];
  const CudaAttention p = complete(problem());
  const CudaSizes sizes{1024, 1024};
  const DeviceTensor query{memory, {32768, 8192, 64, 1}}, key{memory, {16384, 8192, 64, 1}};
  const CudaInputs in{query, key, key};
  CudaForward out{query, reinterpret_cast<float*>(memory), memory, nullptr};
  const auto hopper = AttentionKernel::hopper, any_plan = AttentionKernel::any_plan;
  check_forward(p, hopper, sizes, in, out, false, memory);
  const auto forward = [&](const char* word, auto change, AttentionKernel kernel = AttentionKernel::hopper) {
    CudaInputs i = in;
    CudaForward o = out;
    const void* workspace = memory;
    bool facts = false;
    change(i, o, workspace, facts);
    expect_refused(word, [&] { check_forward(p, kernel, sizes, i, o, facts, workspace); });
  };
  forward("tensor q", [](auto& i, auto&, auto&, auto&) { i.q.data = nullptr; });
  forward("tensor v", [](auto& i, auto&, auto&, auto&) { i.v.data = nullptr; });
  forward(
      "element's 2 bytes", [](auto& i, auto&, auto&, auto&) { i.k.data = memory + 1; }, any_plan);
  forward("multiple of 16", [](auto& i, auto&, auto&, auto&) { i.k.data = memory + 2; });
  forward("multiples of 8", [](auto& i, auto&, auto&, auto&) { i.k.stride[2] = 65; });
  forward(
      "stride of 0", [](auto&, auto& o, auto&, auto&) { o.o.stride[2] = 0; }, any_plan);
  forward("lse", [](auto&, auto& o, auto&, auto&) { o.lse = nullptr; });
  forward("saved", [](auto&, auto& o, auto&, auto&) { o.saved = nullptr; });
  forward("saved at a multiple of 256", [](auto&, auto& o, auto&, auto&) { o.saved = memory + 16; });
  forward("workspace", [](auto&, auto&, auto& w, auto&) { w = nullptr; });
  forward("with_facts", [](auto&, auto& o, auto&, auto&) { o.ties = reinterpret_cast<int32_t*>(memory); });
  // What only the fast kernels need is not asked of the others: any strides of inputs.
  CudaInputs odd = in;
  odd.k.data = memory + 2;
  odd.k.stride = {0, 0, 65, 3};
  check_forward(p, any_plan, sizes, odd, out, false, memory);

  const CudaBackward back{query, key, key};
  check_backward(p, hopper, sizes, in, query, out, back, false, memory);
  const auto backward = [&](const char* word, auto change) {
    DeviceTensor grad = query;
    CudaForward saved = out;
    CudaBackward b = back;
    change(grad, saved, b);
    expect_refused(word, [&] { check_backward(p, hopper, sizes, in, grad, saved, b, false, memory); });
  };
  backward("grad_output", [](auto& g, auto&, auto&) { g.data = nullptr; });
  backward("tensor o", [](auto&, auto& s, auto&) { s.o.data = nullptr; });
  backward("lse", [](auto&, auto& s, auto&) { s.lse = nullptr; });
  backward("saved", [](auto&, auto& s, auto&) { s.saved = nullptr; });
  backward("dq", [](auto&, auto&, auto& b) { b.dq.data = nullptr; });
  backward("dk", [](auto&, auto&, auto& b) { b.dk.stride[1] = 0; });
  backward("dv", [](auto&, auto&, auto& b) { b.dv.stride[3] = 2; });
  backward("with_facts", [](auto&, auto&, auto& b) { b.delta = reinterpret_cast<float*>(memory); });

  // Facts alone: without dk and dv, not without one of them.
  backward("dk", [](auto&, auto&, auto& b) { b.dk = b.dv = {}; });
  CudaBackward facts_alone = back;
  facts_alone.dk = facts_alone.dv = {};
  check_backward(p, any_plan, sizes, in, query, out, facts_alone, true, memory);
  facts_alone.dk = back.dk;
  expect_refused("dv",
                 [&] { check_backward(p, any_plan, sizes, in, query, out, facts_alone, true, memory); });

  // Packed: a batch stride of 0 is asked for, and is no mistake in what is written.
  static const int32_t number = 0;
  CudaAttention packed = problem();
  packed.query_offsets = packed.query_lengths = packed.key_offsets = packed.key_lengths = &number;
  packed.query_rows = packed.key_rows = 200;
  packed = complete(packed);
  expect_refused("batch stride of 0", [&] { check_forward(packed, hopper, sizes, in, out, false, memory); });
  CudaInputs flat = in;
  flat.q.stride[0] = flat.k.stride[0] = flat.v.stride[0] = out.o.stride[0] = 0;
  check_forward(packed, hopper, sizes, flat, out, false, memory);
}

// A build without CUDA, or a machine without a driver, says so and does not crash.
TEST(CudaDevice, is_there_or_says_why_not) {
  const CudaDevice found = cuda_device();
  if (found.present) {
    EXPECT_GE(found.major, 1);
  } else {
    EXPECT_FALSE(found.why.empty());
    EXPECT_THROW(cuda_attention_sizes(problem(), false), std::runtime_error);
  }
}

}  // namespace
}  // namespace evenkeel

// What never changes a bit of CPU attention: tiles of rows, threads, plans by head, strides, lengths, zeros.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "attention_cases.h"
#include "attention_runs.h"
#include "base/threads.h"

namespace evenkeel {
namespace {

using namespace attention_runs;
using cases::find_case;
using cases::kCases;

const char* const kManyPlans[] = {
    "fp32",
    "bf16_all",
    "fp8",
    "flash2,row_sum=bf16/stochastic,pv=bf16/stochastic,dscores=bf16/stochastic,dk=bf16/stochastic,seed=5",
    "flash2,stabiliser=paper,keel=0.1",
    "bf16_all,stabiliser=paper_capped",
    "bf16_all,stabiliser=dither",
    "flash2,stabiliser=stochastic_output",
    "bf16_all,stabiliser=wide_output",
    "flash2,stabiliser=consistent",
    "bf16_all,stabiliser=consistent",
    "bf16_all,stabiliser=zero_sum",
    "flash2,accumulate=tensor_core",
    "fp8,probs_bwd=e4m3,dscores=e5m2,accumulate=tensor_core",
    "flash2,q=int8*tile,k=int4*head,grad_output=e4m3*tensor,probs=int8*tile,dscores=int8*tile/stochastic",
    "nvfp4,stabiliser=consistent",
    "hifloat8,q_bwd=bf16,stabiliser=zero_sum",
    "fp8_deepseek,accumulate=h200/2",
    "flash2,q=int4*column,k=int4*column,v=e4m3*column32,grad_output=e2m1*column16@e4m3*column,probs=int8*"
    "column,"
    "dscores=e4m3*column32@e8m0/stochastic",
    "flash2,q=int8*tensor,k=int4*column64,queries=centred,stabiliser=consistent",
};
const char* const kManyCases[] = {"odd_65",      "grouped", "window",   "ragged",
                                  "masked_rows", "softcap", "ties_tail"};

TEST(AttentionBits, tile_rows_never_change_one) {
  for (const char* case_name : kManyCases)
    for (const char* plan : kManyPlans) {
      SCOPED_TRACE(std::string(case_name) + " " + plan);
      const Problem p = make_problem(find_case(case_name));
      AttentionProblem config = p.with(parse_plan(plan));
      config.tile_rows = 64;
      const AttentionBuffers first = run(config, p);
      for (int64_t tile_rows : {16, 33, 1, 48, 1000}) {
        if (kSanitized && tile_rows != 16) break;
        SCOPED_TRACE(tile_rows);
        config.tile_rows = tile_rows;
        expect_same_bits(first, run(config, p));
      }
    }
}

TEST(AttentionBits, threads_never_change_one) {
  const int threads = thread_count();
  for (const char* case_name : kManyCases)
    for (const char* plan : kManyPlans) {
      SCOPED_TRACE(std::string(case_name) + " " + plan);
      const Problem p = make_problem(find_case(case_name));
      AttentionProblem config = p.with(parse_plan(plan));
      config.tile_rows = 16;
      set_thread_count(1);
      const AttentionBuffers first = run(config, p);
      for (int count : {2, 3, 5}) {
        SCOPED_TRACE(count);
        set_thread_count(count);
        expect_same_bits(first, run(config, p));
      }
    }
  set_thread_count(threads);
}

TEST(AttentionBits, plans_by_head_equal_runs_of_those_plans) {
  for (bool grouped : {false, true}) {
    SCOPED_TRACE(grouped);
    const Problem p =
        make_problem({{2, 6, grouped ? 2 : 6, 33, 40, 16}, {.causal = true, .tile_keys = 16}, ""});
    std::vector<PrecisionPlan> plans;
    for (const char* text : {"fp32", "bf16_all,keel=0.1", "fp8", "flash2,stabiliser=zero_sum",
                             "bf16_all,stabiliser=dither,seed=4", "flash2,stabiliser=centre_keys,k=bf16"})
      plans.push_back(parse_plan(text));
    const AttentionBuffers mixed = run(p.with(plans), p);
    for (int64_t h = 0; h < 6; ++h) {
      SCOPED_TRACE(h);
      const AttentionBuffers alone = run(p.with(plans[size_of(h)]), p);
      for (size_t n = 0; n < tensors_of(mixed).size(); ++n) {
        const auto [tensor, values] = tensors_of(mixed)[n];
        const bool by_key = values->shape()[2] == p.shape.N;
        if (grouped && by_key) continue;  // the sum over a group of heads with different plans
        for (int64_t b = 0; b < 2; ++b)
          EXPECT_TRUE(same_bits(part_of(*values, b, h, values->shape()[2]),
                                part_of(*tensors_of(alone)[n].tensor, b, h, values->shape()[2])))
              << tensor;
      }
      for (int64_t b = 0; b < 2; ++b) {
        EXPECT_TRUE(same_bits(part_of(mixed.residual, b, h, 33), part_of(alone.residual, b, h, 33)));
        EXPECT_TRUE(same_bits(part_of(mixed.ties, b, h, 33), part_of(alone.ties, b, h, 33)));
      }
    }
  }
}

// Scales of one head's plan are its own, whatever the others share; `tensor` looks at all heads, alike in both runs.
TEST(AttentionBits, shared_scales_by_head_equal_runs_of_those_plans) {
  const Problem p = make_problem({{2, 4, 4, 70, 70, 16}, {.fill = Fill::fp32_normal, .causal = true}, ""});
  std::vector<PrecisionPlan> plans;
  for (const char* text :
       {"q=int8*head,k=int8*tensor", "q=int8*tile,k=int8*tile", "q=int8*tensor,v=int4*column,queries=centred",
        "q=int4*column,grad_output=int8*column16"})
    plans.push_back(parse_plan(text));
  const AttentionBuffers mixed = run(p.with(plans), p);
  for (int64_t h = 0; h < 4; ++h) {
    const AttentionBuffers alone = run(p.with(plans[size_of(h)]), p);
    for (size_t n = 0; n < tensors_of(mixed).size(); ++n)
      for (int64_t b = 0; b < 2; ++b)
        EXPECT_TRUE(same_bits(part_of(*tensors_of(mixed)[n].tensor, b, h, 70),
                              part_of(*tensors_of(alone)[n].tensor, b, h, 70)))
            << tensors_of(mixed)[n].name << " of head " << h;
  }
}

// The same values in another layout, inputs and outputs both.
TEST(AttentionBits, strides_never_change_one) {
  for (const char* plan : {"fp32", "bf16_all", "flash2,stabiliser=consistent,row_sum=bf16/stochastic"}) {
    const Case base{{2, 3, 3, 35, 35, 24}, {.fill = Fill::fp32_normal, .causal = true, .tile_keys = 16}, ""};
    const Problem plain = make_problem(base);
    const AttentionBuffers expected = run(plain.with(parse_plan(plan)), plain);
    for (cases::Layout layout : {cases::Layout::bthd, cases::Layout::packed}) {
      SCOPED_TRACE(std::string(plan) + (layout == cases::Layout::packed ? " packed" : " bthd"));
      Case other = base;
      other.layout = layout;
      const Problem p = make_problem(other);
      expect_same_bits(expected, run(p.with(parse_plan(plan)), p));

      // Outputs with the features backwards in steps of two: every stride is unusual.
      AttentionBuffers memory = poisoned_buffers(p.in);
      AttentionForward forward = memory.forward();
      AttentionBackward backward = memory.backward();
      const auto spread = [](View<float>& view, std::vector<float>& values) {
        const auto [B, H, T, D] = view.shape;
        values.assign(size_of(B * H * T * D * 2), kNan);
        view.stride = {H * 2, 2, D * B * H * 2, B * H * 2};  // (T, D, B, H, 2)
        view.data = values.data() + 1;
      };
      std::vector<float> o, for_delta, dq, dk, dv;
      spread(forward.o, o);
      spread(forward.o_for_delta, for_delta);
      spread(backward.dq, dq);
      spread(backward.dk, dk);
      spread(backward.dv, dv);
      attention_forward(p.with(parse_plan(plan)), p.in, forward);
      attention_backward(p.with(parse_plan(plan)), p.in, p.grad_output, forward, backward);
      const auto expect_bits = [](const char* tensor, const View<float>& got, const Tensor<float>& want) {
        std::vector<float> packed;
        for (int64_t b = 0; b < got.shape[0]; ++b)
          for (int64_t h = 0; h < got.shape[1]; ++h)
            for (int64_t row = 0; row < got.shape[2]; ++row)
              for (int64_t d = 0; d < got.shape[3]; ++d) {
                packed.push_back(*got.at(b, h, row, d));
                EXPECT_TRUE(std::isnan(got.at(b, h, row, d)[-1]))
                    << "wrote between the elements of " << tensor;
              }
        EXPECT_TRUE(same_bits(packed, want.values())) << tensor;
      };
      expect_bits("o", forward.o, expected.o);
      expect_bits("o_for_delta", forward.o_for_delta, expected.o_for_delta);
      expect_bits("dq", backward.dq, expected.dq);
      expect_bits("dk", backward.dk, expected.dk);
      expect_bits("dv", backward.dv, expected.dv);
    }
  }
}

// A zero adds nothing to any sum; the definition agrees with itself, too. Random numbers are numbered by feature: no plan draws.
TEST(AttentionBits, values_of_another_size_equal_the_problem_filled_with_zeros) {
  for (const cases::Narrowed& c : cases::kNarrowed) {
    const Problem wide = c.wide(), narrow = c.narrow();
    ASSERT_NE(narrow.in.v.shape[3], narrow.in.q.shape[3]);
    for (const char* plan :
         {"fp32", "bf16_all,keel=0.1", "flash2,stabiliser=consistent", "flash2,stabiliser=zero_sum",
          "flash2,stabiliser=dither,accumulate=tensor_core"}) {
      const AttentionProblem config = wide.with(parse_plan(plan));
      const AttentionBuffers found = run(config, narrow);
      EXPECT_EQ(found.o.shape()[3], c.narrow_Dv);
      EXPECT_EQ(found.dk.shape()[3], c.narrow_D);
      expect_narrowed(run(config, wide), found, std::string(c.name) + ", " + plan);
    }
    const AttentionProblem config = wide.with(parse_plan("fp32,keel=0.1"));
    expect_narrowed(attention_reference(config, wide.in, wide.grad_output),
                    attention_reference(config, narrow.in, narrow.grad_output), c.name);
  }
}

// A sequence with lengths is the shorter problem, but for random numbers: their names count all rows.
TEST(AttentionBits, lengths_equal_runs_of_the_shorter_problem) {
  for (const char* case_name : {"ragged", "masked_ragged"})
    for (const char* text :
         {"fp32", "bf16_all", "fp8", "flash2,stabiliser=paper", "bf16_all,stabiliser=consistent",
          "flash2,stabiliser=consistent", "bf16_all,stabiliser=zero_sum,keel=0.1",
          "flash2,stabiliser=centre_keys", "bf16_all,stabiliser=wide_output"}) {
      SCOPED_TRACE(std::string(case_name) + " " + text);
      Problem p = make_problem(find_case(case_name));
      // What lies beyond the lengths is not read.
      for (int64_t b = 0; b < p.shape.B; ++b) {
        for (int64_t h = 0; h < p.shape.H; ++h)
          for (int64_t i = p.query_lengths[size_of(b)]; i < p.shape.T; ++i)
            *p.q().at(b, h, i, 1) = *p.grad().at(b, h, i, 1) = kNan;
        for (int64_t g = 0; g < p.shape.G; ++g)
          for (int64_t j = p.key_lengths[size_of(b)]; j < p.shape.N; ++j)
            *p.k().at(b, g, j, 1) = *p.v().at(b, g, j, 1) = kNan;
      }
      const AttentionBuffers whole = run(p.with(parse_plan(text)), p);
      int64_t compared = 0;
      for (int64_t b = 0; b < p.shape.B; ++b) {
        SCOPED_TRACE(b);
        const int64_t rows = p.query_lengths[size_of(b)], keys = p.key_lengths[size_of(b)];
        for (int64_t h = 0; h < p.shape.H; ++h)
          for (int64_t i = rows; i < p.shape.T; ++i) {
            EXPECT_EQ(*whole.ties.view().at(b, h, i), 0);
            EXPECT_EQ(*whole.residual.view().at(b, h, i), 0);
            EXPECT_EQ(*whole.delta.view().at(b, h, i), 0);
            for (int64_t d = 0; d < p.shape.D; ++d) {
              EXPECT_EQ(*whole.o.view().at(b, h, i, d), 0);
              EXPECT_EQ(*whole.dq.view().at(b, h, i, d), 0);
            }
          }
        for (int64_t g = 0; g < p.shape.G; ++g)
          for (int64_t j = keys; j < p.shape.N; ++j)
            for (int64_t d = 0; d < p.shape.D; ++d) {
              EXPECT_EQ(*whole.dk.view().at(b, g, j, d), 0);
              EXPECT_EQ(*whole.dv.view().at(b, g, j, d), 0);
            }
        if (rows == 0 || keys == 0) continue;
        ++compared;
        AttentionProblem config = p.with(parse_plan(text));
        config.mask.query_lengths = config.mask.key_lengths = {};
        if (config.mask.visible.present()) {
          config.mask.visible.data = config.mask.visible.at(b, 0, 0);
          config.mask.visible.shape = {1, p.shape.H, rows, keys};
        }
        const auto cut = [&](View<const float> view, int64_t length) {
          return View<const float>{view.at(b, 0, 0), {1, view.shape[1], length, view.shape[3]}, view.stride};
        };
        const AttentionInputs in{cut(p.in.q, rows), cut(p.in.k, keys), cut(p.in.v, keys)};
        AttentionBuffers alone = poisoned_buffers(in);
        attention_forward(config, in, alone.forward());
        attention_backward(config, in, cut(p.grad_output, rows), alone.forward(), alone.backward());
        for (size_t n = 0; n < tensors_of(whole).size(); ++n) {
          const auto [tensor, values] = tensors_of(alone)[n];
          for (int64_t h = 0; h < values->shape()[1]; ++h)
            EXPECT_TRUE(same_bits(part_of(*values, 0, h, values->shape()[2]),
                                  part_of(*tensors_of(whole)[n].tensor, b, h, values->shape()[2])))
                << tensor;
        }
      }
      EXPECT_GE(compared, 3);
    }
}

}  // namespace
}  // namespace evenkeel

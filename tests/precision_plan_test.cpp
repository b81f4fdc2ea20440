// Precision plans as text: names, overrides, scopes, the round trip, and what every mistake is answered with.
#include "attention/precision_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <set>
#include <stdexcept>
#include <string>

#include "numerics/random.h"
#include "sanitized.h"

namespace evenkeel {
namespace {

const Rounding kToBf16{kBf16}, kToFp32{};

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}

PrecisionPlan with_sites(PrecisionPlan plan, std::initializer_list<Site> sites, const Rounding& rounding) {
  for (Site site : sites) plan.at(site) = rounding;
  return plan;
}

TEST(PrecisionPlan, names_go_both_ways) {
  const std::set<std::string_view> distinct(kSiteNames.begin(), kSiteNames.end());
  EXPECT_EQ(distinct.size(), static_cast<size_t>(kSiteCount));
  for (int i = 0; i < kSiteCount; ++i) {
    const Site site = static_cast<Site>(i);
    EXPECT_EQ(parse_site(name(site)), site);
  }
  EXPECT_EQ(name(Site::q), "q");
  EXPECT_EQ(name(Site::row_sum), "row_sum");
  EXPECT_EQ(name(Site::output_for_delta), "output_for_delta");
  EXPECT_EQ(name(Site::dv), "dv");
  for (size_t i = 0; i < kStabiliserNames.size(); ++i) {
    const Stabiliser stabiliser = static_cast<Stabiliser>(i);
    EXPECT_EQ(parse_stabiliser(name(stabiliser)), stabiliser);
  }
  EXPECT_EQ(name(Stabiliser::zero_sum), "zero_sum");
  EXPECT_EQ(name(Accumulate::tensor_core), "tensor_core");
}

TEST(PrecisionPlan, named_plans_are_what_they_are_documented_to_be) {
  const PrecisionPlan flash2 = with_sites({},
                                          {Site::probs, Site::output, Site::output_for_delta, Site::probs_bwd,
                                           Site::dscores, Site::dq, Site::dk, Site::dv},
                                          kToBf16);
  EXPECT_EQ(parse_plan("fp32"), PrecisionPlan{});
  EXPECT_EQ(parse_plan("flash2"), flash2);
  EXPECT_EQ(
      parse_plan("bf16_all"),
      with_sites(flash2, {Site::scores, Site::shifted, Site::row_sum, Site::pv, Site::dprobs}, kToBf16));
  const Rounding e4m3{kE4m3, RoundingMode::nearest_even, true},
      scaled{kE4m3, RoundingMode::nearest_even, true, 8};
  EXPECT_EQ(
      parse_plan("fp8"),
      with_sites(
          with_sites(
              with_sites(flash2, {Site::q, Site::k, Site::v, Site::q_bwd, Site::k_bwd, Site::v_bwd}, e4m3),
              {Site::probs}, scaled),
          {Site::grad_output, Site::grad_output_for_dprobs}, kToBf16));
  // The systems of papers: every operand of a product is below 16 bits where the paper says so, nothing else is.
  const auto eight_bits = [](const char* name) {
    std::string sites;
    const PrecisionPlan plan = parse_plan(name);
    for (int s = 0; s < kSiteCount; ++s)
      if (code_bits(plan.at(static_cast<Site>(s)).format) <= 8) sites += std::string(kSiteNames[s]) + " ";
    return sites;
  };
  const std::string all =
      "q k v grad_output probs probs_bwd dscores q_bwd k_bwd v_bwd grad_output_for_dprobs ";
  for (const char* name : {"fp8_deepseek", "mxfp8", "hifloat8"}) EXPECT_EQ(eight_bits(name), all) << name;
  EXPECT_EQ(eight_bits("sage_int8"), "q k v grad_output probs probs_bwd dscores q_bwd k_bwd ");
  EXPECT_EQ(eight_bits("nvfp4"), "q k v probs probs_bwd q_bwd k_bwd v_bwd ");
  for (const char* name : {"fp8_fa3", "fp8_trains", "turbo"})
    EXPECT_EQ(eight_bits(name), "q k v probs q_bwd k_bwd v_bwd ") << name;
  EXPECT_EQ(eight_bits("pasa_fp16"), "");
  for (const char* name : {"sage_int8", "pasa_fp16"})
    EXPECT_EQ(parse_plan(name).keys, KeyRule::centred) << name;
  EXPECT_EQ(parse_plan("mxfp8").at(Site::dscores), parse_rounding("e4m3*block32@e8m0_up"));
  EXPECT_EQ(parse_plan("nvfp4").at(Site::v), parse_rounding("e2m1*block16@e4m3*tensor"));
  // Both passes read the same q, k and v, and all of them are BF16 numbers.
  for (Site site : {Site::q, Site::k_bwd})
    EXPECT_EQ(parse_plan("fp8_trains").at(site), parse_rounding("e4m3*tile@e8m0_up"));
  EXPECT_EQ(parse_plan("fp8_trains").at(Site::v_bwd), parse_rounding("e4m3*head@e8m0_up"));
  for (std::string_view known : kPlanNames) EXPECT_EQ(to_string(parse_plan(known)), known);
}

TEST(PrecisionPlan, overrides_are_read_from_the_left) {
  EXPECT_EQ(parse_plan("bf16_all,row_sum=fp32"),
            with_sites(parse_plan("bf16_all"), {Site::row_sum}, kToFp32));
  EXPECT_EQ(parse_plan("row_sum=bf16"), with_sites({}, {Site::row_sum}, kToBf16));
  EXPECT_EQ(parse_plan("row_sum=bf16,row_sum=fp32"), PrecisionPlan{});
  EXPECT_EQ(parse_plan("row_sum=bf16,fp32"), PrecisionPlan{});  // a later name gives every site its format
  EXPECT_EQ(parse_plan("keel=0.5,flash2").keel, 0.5f);          // and leaves the other keys
  EXPECT_EQ(parse_plan(" bf16_all ,\trow_sum = fp32 "), parse_plan("bf16_all,row_sum=fp32"));

  const PrecisionPlan all = parse_plan(
      "flash2,stabiliser=zero_sum,accumulate=tensor_core,keel=1e-3,beta=4,cap=16,tie_tolerance=0.01,"
      "seed=18446744073709551615,row_sum=e5m2/stochastic,probs=e4m3^8/saturate");
  EXPECT_EQ(all.stabiliser, Stabiliser::zero_sum);
  EXPECT_EQ(all.accumulate, Accumulate::tensor_core);
  EXPECT_EQ(all.keel, 1e-3f);
  EXPECT_EQ(all.beta, 4);
  EXPECT_EQ(all.cap, 16);
  EXPECT_EQ(all.tie_tolerance, 0.01f);
  EXPECT_EQ(all.seed, UINT64_MAX);
  EXPECT_EQ(all.at(Site::row_sum), (Rounding{kE5m2, RoundingMode::stochastic}));
  EXPECT_EQ(all.at(Site::probs), (Rounding{kE4m3, RoundingMode::nearest_even, true, 8}));
  EXPECT_EQ(all.at(Site::output), kToBf16);
}

TEST(PrecisionPlan, output_takes_the_output_for_delta_along_unless_that_is_set_by_itself) {
  EXPECT_EQ(parse_plan("fp32,output=bf16").at(Site::output_for_delta), kToBf16);
  EXPECT_EQ(parse_plan("flash2,output=fp32").at(Site::output_for_delta), kToFp32);
  EXPECT_EQ(parse_plan("output=bf16,output_for_delta=fp32").at(Site::output_for_delta), kToFp32);
  EXPECT_EQ(parse_plan("output_for_delta=fp32,output=bf16").at(Site::output_for_delta), kToFp32);
  EXPECT_EQ(parse_plan("flash2,output_for_delta=fp32").at(Site::output), kToBf16);
  // A name forgets what was set before it.
  EXPECT_EQ(parse_plan("output_for_delta=fp32,fp32,output=bf16").at(Site::output_for_delta), kToBf16);
}

TEST(PrecisionPlan, every_second_reading_follows_its_first) {
  const PrecisionPlan plan = parse_plan("fp32,q=bf16,k=e4m3,k_bwd=fp16,grad_output=e5m2");
  EXPECT_EQ(plan.at(Site::q_bwd), kToBf16);
  EXPECT_EQ(plan.at(Site::k_bwd), Rounding{kFp16});
  EXPECT_EQ(plan.at(Site::v_bwd), kToFp32);
  EXPECT_EQ(plan.at(Site::grad_output_for_dprobs), Rounding{kE5m2});
  EXPECT_EQ(to_string(plan), "fp32,q=bf16,k=e4m3,grad_output=e5m2,k_bwd=fp16");
}

TEST(PrecisionPlan, keys_and_accumulation) {
  EXPECT_EQ(to_string(parse_plan("flash2,keys=centred,stabiliser=zero_sum")),
            "flash2,keys=centred,stabiliser=zero_sum");
  EXPECT_EQ(to_string(parse_plan("sage_int8,keys=given")), "sage_int8,keys=given");
  EXPECT_EQ(to_string(parse_plan("queries=centred,sage_int8,v=int8*column")),
            "sage_int8,v=int8*column,queries=centred");
  EXPECT_EQ(parse_plan("keys=centred,flash2").keys, KeyRule::centred);  // a name without a rule leaves it
  for (const char* text : {"h200", "h200/4", "h200_mma", "a100/1"})
    EXPECT_EQ(to_string(parse_plan("flash2,accumulate=" + std::string(text))),
              "flash2,accumulate=" + std::string(text));
  EXPECT_EQ(parse_plan("flash2,accumulate=tensor_core"), parse_plan("flash2,accumulate=h200"));
  EXPECT_EQ(parse_plan("accumulate=h200/4").promote, 4);
  EXPECT_EQ(parse_plan("accumulate=h200/4,accumulate=fp32_sequential"), PrecisionPlan{});
}

TEST(PrecisionPlan, to_string_is_short) {
  EXPECT_EQ(to_string(parse_plan("bf16_all,row_sum=fp32")), "bf16_all,row_sum=fp32");
  EXPECT_EQ(to_string(parse_plan("flash2,stabiliser=zero_sum,keel=1e-3")),
            "flash2,stabiliser=zero_sum,keel=0.001");
  EXPECT_EQ(to_string(parse_plan("fp32,output=bf16")), "fp32,output=bf16");
  EXPECT_EQ(to_string(parse_plan("flash2,output_for_delta=fp32")), "flash2,output_for_delta=fp32");
  // bf16_all with its five extra sites taken back is flash2.
  EXPECT_EQ(to_string(parse_plan("bf16_all,scores=fp32,shifted=fp32,row_sum=fp32,pv=fp32,dprobs=fp32")),
            "flash2");
}

TEST(PrecisionPlan, random_plans_come_back_from_their_text) {
  const RandomKey key{7, 0, 0};
  uint64_t next = 0;
  const auto below = [&](uint32_t n) { return static_cast<int>(random_bits(key, next++) % n); };
  const auto number = [&](float low, float high) {  // any float of the range, not only short ones
    return std::clamp(low + (high - low) * random_unit(key, next++), low, high);
  };
  size_t longest = 0;
  for (int round = 0; round < (kSanitized ? 2000 : 20000); ++round) {
    PrecisionPlan plan = parse_plan(kPlanNames[below(kPlanNames.size())]);
    for (int changes = below(kSiteCount + 1); changes > 0; --changes) {
      Rounding r;
      r.format = below(2) ? kNamedFormats[below(std::size(kNamedFormats))].format
                          : Format{2 + below(7), 1 + below(23)};
      r.format = parse_format(to_string(r.format));  // a name may belong to an OCP row
      r.mode = static_cast<RoundingMode>(below(std::size(kRoundingModeNames)));
      r.saturate = below(2);
      r.scale_exponent = below(2) ? below(65) - 32 : 0;
      plan.at(static_cast<Site>(below(kSiteCount))) = r;
      if (below(4) == 0)
        plan.at(Site::dscores) = parse_rounding(below(2)   ? "int8*tile/stochastic"
                                                : below(2) ? "int4*column16@e8m0"
                                                           : "e2m1*block16@e4m3*row");
    }
    plan.stabiliser = static_cast<Stabiliser>(below(kStabiliserNames.size()));
    plan.accumulate = static_cast<Accumulate>(below(kAccumulateNames.size()));
    if (plan.accumulate == Accumulate::tensor_core && below(2)) {
      plan.chip = kTensorCoreModels[below(std::size(kTensorCoreModels))].chip;
      plan.promote = below(3);
    }
    plan.keys = static_cast<KeyRule>(below(2));
    plan.queries = static_cast<QueryRule>(below(2));
    if (below(2)) plan.keel = number(0, 1) * power_of_two(-below(40));
    if (below(2)) plan.beta = number(1, 1000);
    if (below(2)) plan.cap = number(0.01f, 80);
    if (below(2)) plan.tie_tolerance = number(0, 1000);
    if (below(2)) plan.seed = uint64_t{random_bits(key, next++)} * 0x9E3779B97F4A7C15u;
    const std::string text = to_string(plan);
    const PrecisionPlan back = parse_plan(text);
    ASSERT_EQ(back, plan) << text << "\ncame back as\n" << to_string(back);
    ASSERT_EQ(to_string(back), text);
    longest = std::max(longest, text.size());
  }
  EXPECT_GT(longest, 300u);  // the plans were really random
}

TEST(PrecisionPlan, every_mistake_is_answered_with_what_is_known) {
  const std::string plans =
      "expected one of fp32, flash2, bf16_all, fp8, fp8_fa3, fp8_trains, fp8_deepseek, mxfp8, nvfp4, "
      "sage_int8, "
      "turbo, hifloat8, "
      "pasa_fp16, or SITE=FORMAT, stabiliser=NAME, keel=Z";
  const std::string sites =
      "q, k, v, grad_output, scores, shifted, probs, row_sum, pv, output, output_for_delta, delta, "
      "probs_bwd, "
      "dprobs, dscores, dq, dk, dv, q_bwd, k_bwd, v_bwd, grad_output_for_dprobs";
  const std::string stabilisers =
      "none, paper, paper_capped, dither, stochastic_output, centre_keys, wide_output, consistent, zero_sum";
  const std::string formats =
      "expected fp32, tf32, bf16, fp16, e4m3, e5m2, e2m3, e3m2, e2m1, int8, int4, hif8, or eXmY with "
      "exponent bits X in 2..8 and significand "
      "bits Y in "
      "1..23";
  const struct {
    const char* text;
    std::string message;
  } bad[] = {
      {"", "unknown plan '': " + plans},
      {"  ", "unknown plan '': " + plans},
      {"bf16", "unknown plan 'bf16': " + plans},
      {"Flash2", "unknown plan 'Flash2': " + plans},
      {"flash2,", "unknown plan '': " + plans},
      {"flash2,,keel=1", "unknown plan '': " + plans},
      {"flash2 keel=1",
       "unknown key 'flash2 keel' in 'flash2 keel=1': expected a site (" + sites +
           ") or stabiliser, accumulate, keys, queries, keel, beta, cap, tie_tolerance, seed"},
      {"flash2,rowsum=fp32",
       "unknown key 'rowsum' in 'rowsum=fp32': expected a site (" + sites +
           ") or stabiliser, accumulate, keys, queries, keel, beta, cap, tie_tolerance, seed"},
      {"=fp32", "unknown key '' in '=fp32': expected a site (" + sites +
                    ") or stabiliser, accumulate, keys, queries, keel, beta, cap, tie_tolerance, seed"},
      {"stabiliser=magic", "unknown stabiliser 'magic': expected one of " + stabilisers},
      {"stabiliser=", "unknown stabiliser '': expected one of " + stabilisers},
      {"accumulate=fp64",
       "unknown accumulate 'fp64': expected fp32_sequential, tensor_core or a chip of h200, h200_mma, h100, "
       "b200, "
       "a100, a2, ada, l40s, v100, as in h200 or h200/4"},
      {"accumulate=h200/0",
       "accumulate=0: expected a whole number of blocks from 1 to 1048576 after the chip, as in h200/4"},
      {"probs=bf17", "unknown format 'bf17': " + formats},
      {"probs=", "unknown format '': " + formats},
      {"probs=e9m3", "unknown format 'e9m3': " + formats},
      {"probs=bf16=fp32", "unknown format 'bf16=fp32': " + formats},
      {"probs=bf16/half_up",
       "unknown rounding mode 'half_up': expected nearest_even, nearest_away, toward_zero, up, down or "
       "stochastic"},
      {"probs=bf16/up/down",
       "'down' does not fit in 'bf16/up/down': expected FORMAT[^SHIFT][/MODE][/saturate] or "
       "FORMAT*GROUP[@SCALE][*OUTER][/MODE]"},
      {"probs=e4m3^40",
       "bad scale '^40' in 'e4m3^40': expected a whole exponent of two in -32..32, as in e4m3^8"},
      {"keel=-1", "keel=-1: expected a number from 0 to 1e6"},
      {"keel=2e6", "keel=2e6: expected a number from 0 to 1e6"},
      {"keel=nan", "keel=nan: expected a number from 0 to 1e6"},
      {"keel=inf", "keel=inf: expected a number from 0 to 1e6"},
      {"keel=", "keel=: expected a number from 0 to 1e6"},
      {"keel=1e-3x", "keel=1e-3x: expected a number from 0 to 1e6"},
      {"keel=0,001", "unknown plan '001': " + plans},
      {"beta=0.5", "beta=0.5: expected a number from 1 to 1000"},
      {"cap=0", "cap=0: expected a number from 0.01 to 80 (nats)"},
      {"cap=81", "cap=81: expected a number from 0.01 to 80 (nats)"},
      {"tie_tolerance=-1e-3", "tie_tolerance=-1e-3: expected a number from 0 to 1000"},
      {"seed=-1", "seed=-1: expected a whole number from 0 to 2^64 - 1"},
      {"seed=1.5", "seed=1.5: expected a whole number from 0 to 2^64 - 1"},
      {"seed=18446744073709551616", "seed=18446744073709551616: expected a whole number from 0 to 2^64 - 1"},
  };
  for (const auto& b : bad) {
    EXPECT_EQ(message_of([&] { parse_plan(b.text); }), b.message);
    // Found when the plan is read, not when the layer comes up.
    EXPECT_EQ(message_of([&] { ScopedPlan::parse("layer 7: " + std::string(b.text)); }), b.message);
  }
  EXPECT_EQ(message_of([] { parse_site("rowsum"); }), "unknown site 'rowsum': expected one of " + sites);
  EXPECT_EQ(message_of([] { parse_stabiliser("zero-sum"); }),
            "unknown stabiliser 'zero-sum': expected one of " + stabilisers);
}

TEST(PrecisionPlan, every_mistake_in_a_scale_says_what_goes) {
  const struct {
    const char* text;
    std::string message;
  } bad[] = {
      {"keys=mean", "unknown rule for keys 'mean': expected one of given, centred"},
      {"queries=mean", "unknown rule for queries 'mean': expected one of given, centred"},
      {"output=int8*row",
       "output=int8*row: expected a format without a shared scale: only operands of products have one (q, k, "
       "v, "
       "grad_output, their second readings, probs, probs_bwd, dscores)"},
      {"probs=int8*head",
       "probs=int8*head: expected a scale that a block, a row, a column or a tile shares: probs is made tile "
       "by tile"},
      {"dscores=e2m1*block16@e4m3*tensor",
       "dscores=e2m1*block16@e4m3*tensor: expected a scale that a block, a row, a column or a tile shares: "
       "dscores is "
       "made tile "
       "by tile"},
      {"q=e4m3*block17",
       "unknown group 'block17' of a shared scale: expected block16, block32, block64, block128, row, "
       "column16, column32, column64, column, tile, head or tensor"},
  };
  for (const auto& b : bad) EXPECT_EQ(message_of([&] { parse_plan(b.text); }), b.message);
}

// --- Scopes --------------------------------------------------------------------------------------

TEST(ScopedPlan, without_a_scope_holds_everywhere) {
  const ScopedPlan plan = ScopedPlan::parse("bf16_all,keel=0.5");
  EXPECT_FALSE(plan.is_scoped());
  EXPECT_EQ(plan.at(0, 0), parse_plan("bf16_all,keel=0.5"));
  EXPECT_EQ(plan.at(11, 7), plan.at(0, 0));
  EXPECT_EQ(ScopedPlan().at(3, 1), PrecisionPlan{});
  EXPECT_EQ(ScopedPlan(parse_plan("flash2")).at(3, 1), parse_plan("flash2"));
}

TEST(ScopedPlan, clauses_change_their_layers_and_heads_alone) {
  const ScopedPlan plan =
      ScopedPlan::parse("bf16_all; layer 1 head 3,7: output_for_delta=fp32; layer 2: stabiliser=zero_sum");
  EXPECT_TRUE(plan.is_scoped());
  for (int layer = 0; layer < 4; ++layer)
    for (int head = 0; head < 12; ++head) {
      PrecisionPlan expected = parse_plan("bf16_all");
      if (layer == 1 && (head == 3 || head == 7)) expected.at(Site::output_for_delta) = kToFp32;
      if (layer == 2) expected.stabiliser = Stabiliser::zero_sum;
      EXPECT_EQ(plan.at(layer, head), expected) << "layer " << layer << " head " << head;
    }
}

TEST(ScopedPlan, lists_are_numbers_and_ranges) {
  const ScopedPlan plan = ScopedPlan::parse("layer 0, 2-4 ,9 head 5 - 6: keel=1; head 1: keel=2");
  for (int layer = 0; layer < 12; ++layer)
    for (int head = 0; head < 8; ++head) {
      const bool first = (layer == 0 || (layer >= 2 && layer <= 4) || layer == 9) && (head == 5 || head == 6);
      EXPECT_EQ(plan.at(layer, head).keel, head == 1 ? 2.0f : first ? 1.0f : 0.0f) << layer << " " << head;
    }
}

TEST(ScopedPlan, later_clauses_win) {
  const ScopedPlan plan =
      ScopedPlan::parse("flash2; layer 1: keel=1, row_sum=bf16; layer 1 head 2: keel=2; seed=9");
  EXPECT_EQ(plan.at(0, 0), parse_plan("flash2,seed=9"));
  EXPECT_EQ(plan.at(1, 0), parse_plan("flash2,keel=1,row_sum=bf16,seed=9"));
  EXPECT_EQ(plan.at(1, 2), parse_plan("flash2,keel=2,row_sum=bf16,seed=9"));
  // A name in a clause gives the sites their formats and leaves the rest.
  EXPECT_EQ(ScopedPlan::parse("flash2,keel=1; layer 3: fp32").at(3, 0), parse_plan("fp32,keel=1"));
  EXPECT_EQ(ScopedPlan::parse("flash2; layer 3: output=fp32").at(3, 0), parse_plan("flash2,output=fp32"));
}

TEST(ScopedPlan, every_bad_scope_is_an_error) {
  const std::string shape = "expected 'layer LIST', 'head LIST' or 'layer LIST head LIST'";
  const std::string numbers = "expected numbers from 0 and ranges, as in layer 1 head 0,2-4";
  const struct {
    const char* text;
    std::string message;
  } bad[] = {
      {": fp32", "empty scope in ': fp32': expected 'layer LIST', 'head LIST' or both before the ':'"},
      {"flash2; : fp32",
       "empty scope in ': fp32': expected 'layer LIST', 'head LIST' or both before the ':'"},
      {"block 1: fp32", "bad scope 'block 1': " + shape},
      {"1: fp32", "bad scope '1': " + shape},
      {"layer: fp32", "bad scope 'layer': " + numbers},
      {"head: fp32", "bad scope 'head': " + numbers},
      {"layer 1 head: fp32", "bad scope 'layer 1 head': " + numbers},
      {"layer one: fp32", "bad scope 'layer one': " + numbers},
      {"layer -1: fp32", "bad scope 'layer -1': " + numbers},
      {"layer 1-: fp32", "bad scope 'layer 1-': " + numbers},
      {"layer 1,: fp32", "bad scope 'layer 1,': " + numbers},
      {"layer 1.5: fp32", "bad scope 'layer 1.5': " + numbers},
      {"layer 99999999999: fp32", "bad scope 'layer 99999999999': " + numbers},
      {"layers 1: fp32", "bad scope 'layers 1': " + numbers},
      {"head 3 layer 1: fp32", "bad scope 'head 3 layer 1': " + numbers},
      {"layer 1 head 2 head 3: fp32", "bad scope 'layer 1 head 2 head 3': " + numbers},
      {"layer 4-2: fp32", "bad range '4-2' in scope 'layer 4-2': expected the smaller number first"},
  };
  for (const auto& b : bad) EXPECT_EQ(message_of([&] { ScopedPlan::parse(b.text); }), b.message);
  for (const char* empty : {"", ";", "flash2;", "layer 1:"})
    EXPECT_EQ(message_of([&] { ScopedPlan::parse(empty); }).substr(0, 15), "unknown plan ''") << empty;
}

}  // namespace
}  // namespace evenkeel

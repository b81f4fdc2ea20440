// Captures made up for tests.
#pragma once

#include "diagnosis/capture.h"
#include "numerics/random.h"

namespace evenkeel {

struct CaptureSizes {
  int64_t B = 1, H = 1, G = 1, T = 1, D = 1, C = 1;
};

// Random numbers, every plan the same; scores of about `spread`.
inline Capture random_capture(const CaptureSizes& s, const std::string& plan, uint64_t seed = 1,
                              double spread = 1) {
  RandomStream draw({seed, 0, 0});
  const auto filled = [&](const std::array<int64_t, 4>& shape, double size) {
    Tensor<float> t(shape);
    for (float& x : t.values()) x = static_cast<float>(size * draw.normal());
    return t;
  };
  Capture c;
  c.source = "made up";
  c.model = "none";
  c.step = 7;
  c.layer = 3;
  c.loss = 1.25;
  for (int64_t h = 0; h < s.H; ++h) c.heads.push_back(2 * h + 1), c.plans.push_back(parse_plan(plan));
  c.x = filled({s.B, 1, s.T, s.C}, 1);
  c.q = filled({s.B, s.H, s.T, s.D}, spread);
  c.k = filled({s.B, s.G, s.T, s.D}, 1);
  c.v = filled({s.B, s.G, s.T, s.D}, 1);
  c.d_o = filled({s.B, s.H, s.T, s.D}, 1e-3);
  c.w_q = filled({1, s.H, s.C, s.D}, 0.1);
  c.w_k = filled({1, s.G, s.C, s.D}, 0.1);
  c.w_v = filled({1, s.G, s.C, s.D}, 0.1);
  return c;
}

}  // namespace evenkeel

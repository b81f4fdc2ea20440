// A capture: what some heads of one layer's attention read at one step, frozen; with it the step can be looked at without
// the run, the model or the data. A safetensors file, which other programs can make, too (python/capture_torch.py):
//   q (B, H, T, D)  k v (B, G, T, D)  d_o (B, H, T, D): as attention read them; behind qk_norm, behind RoPE
//   x (B, T, C)     what the projections met; optional, like the weights
//   w_q (H, C, D)   w_k w_v (G, C, D)
// All F32. Its metadata, all text: evenkeel_capture (the version, 1), source, model, step, layer, heads ("0,3"), loss,
// scale, softcap, causal (0 or 1), tile_keys, plans (one a head, separated by ';'). Where they are known: positions
// (rotary, rotary_pairs, ...) and rotary_base. Where heads have them: slopes and sinks (one number a head, separated by ',').
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "base/safetensors.h"
#include "model/model.h"

namespace evenkeel {

struct Capture {
  std::string source;  // the run or the model it was taken from
  std::string model;   // its configuration, as free text
  int64_t step = 0, layer = 0;
  std::vector<int64_t> heads;    // (H): their numbers in the model
  double loss = 0;               // of the step; NaN: not known
  float scale = 0, softcap = 0;  // a; 0: 1 / sqrt(D), off
  bool causal = true;
  int64_t tile_keys = 64;
  Positions positions = Positions::none;  // how places reached q and k; none: not at all, or not known
  float rotary_base = 10000;
  std::vector<float> slopes, sinks;  // (H) each, or empty: attention_problem.h has their meaning
  std::vector<PrecisionPlan> plans;  // (H)
  Tensor<float> x;                   // (B, 1, T, C), or empty
  Tensor<float> q, d_o;              // (B, H, T, D)
  Tensor<float> k, v;                // (B, G, T, D)
  Tensor<float> w_q, w_k, w_v;       // (1, H, C, D), (1, G, C, D), or empty

  AttentionInputs inputs() const;
  // With the plans as they are: random numbers of stochastic sites are those of the run where all heads are there.
  AttentionProblem attention_problem() const;
  int64_t group_of(int64_t head) const {
    return head / (q.shape()[1] / k.shape()[1]);
  }  // among G; head among H
  bool is_rotary() const { return positions == Positions::rotary || positions == Positions::rotary_pairs; }
  bool has_weights() const { return !w_q.values().empty(); }
};

// Of a layer that the model has just captured (StepContext::capture_sequences). heads: numbers, ascending; none: all.
// std::invalid_argument where there is no such head.
Capture capture_of(const Model& model, int64_t layer, std::vector<int64_t> heads = {});
// The same without the model. parameters: of that step, (table.size()).
Capture capture_of(const LayerCapture& from, const ModelConfig& config, const ParameterTable& table,
                   std::span<const float> parameters, int64_t layer, std::vector<int64_t> heads = {});

void write_capture(const std::filesystem::path& file, const Capture& capture);
// DataError: what in the file is not as it must be.
Capture read_capture(const std::filesystem::path& file);
Capture read_capture(const Safetensors& file, const std::string& name);  // name: for messages

}  // namespace evenkeel

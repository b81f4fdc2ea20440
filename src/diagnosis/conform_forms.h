// The space of attention problems that the judge crosses: batches, heads, masks, options, sizes and hard numbers. A form is
// one problem of it, a few numbers long; its tensors follow from them. Which forms are judged: every pair of levels that
// the kernel offers (covering.h), and a few forms for one question each.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "diagnosis/attention_truth.h"

namespace evenkeel {

// Of q, k, v, o and their gradients: all numbers that the kernel is given are numbers of this type.
enum class FormType : uint8_t { bf16, fp16, fp32 };
inline constexpr std::array<std::string_view, 3> kFormTypeNames = {"bf16", "fp16", "fp32"};
// Which keys `visible` hides: none, one in three, or besides every fifth row wholly.
enum class FormMask : uint8_t { none, keys, rows };
inline constexpr std::array<std::string_view, 3> kFormMaskNames = {"none", "keys", "rows"};
enum class FormValues : uint8_t {
  random,
  one_signed,  // V and dO are negative: errors of O do not cancel in delta
  ties,        // keys come in equal pairs: two share every row's maximum
  rising,      // scores rise with the key: each tile brings a new maximum
  falling,     // the first tile has the maximum
  sink,        // key 0 has nearly all of every row
  far,         // half of the keys are 150 below: exp underflows
  identity,    // V and dO are unit matrices: O is P, and dV is the P of the backward pass
  nan,         // one value of V is NaN: it must be seen
};
inline constexpr std::array<std::string_view, 9> kFormValuesNames = {
    "random", "one_signed", "ties", "rising", "falling", "sink", "far", "identity", "nan"};

struct ConformForm {
  int64_t B = 1, H = 2, G = 2, T = 64, N = 64, D = 64, Dv = 64;
  bool causal = false;  // the last row sees the last key; so do windows
  int64_t window_left = -1, window_right = -1;
  FormMask mask = FormMask::none;
  bool packed = false;  // B sequences of different lengths, N keys the longest, behind one another
  float scale = 0;      // 0: 1 / sqrt(D)
  float softcap = 0;
  bool sinks = false, grad_lse = false;
  FormType type = FormType::bf16;
  double offset = 0;  // common to a row's scores
  double size = 1;    // of V and dO
  FormValues values = FormValues::random;
  uint64_t seed = 1;

  float softmax_scale() const;
  std::string text() const;  // "B 2, H 4/1, T 65, N 65, D 64/32, causal, bf16, offset 300, rising"
  // Rows and keys of sequence b.
  int64_t rows(int64_t b) const;
  int64_t keys(int64_t b) const;
  int64_t all_rows() const;  // on the row axis of the tensors: T, or those of all sequences
  int64_t all_keys() const;
  int64_t batch() const { return packed ? 1 : B; }                  // of the tensors
  int64_t work() const { return B * H * T * N * std::max(D, Dv); }  // products of one matrix, at most
  friend bool operator==(const ConformForm&, const ConformForm&) = default;
};
void to_json(nlohmann::ordered_json& json, const ConformForm& form);
// std::invalid_argument where a field is missing, of another kind or out of bounds.
ConformForm form_from_json(const nlohmann::ordered_json& json);

// A form's inputs, and the problem they make. Moves, does not copy: views point into it.
struct FormInputs {
  explicit FormInputs(const ConformForm& form);
  // Captured tensors in place of made-up ones: B, H, G, T, N and D are theirs, Dv is D. Their keys have no constant
  // feature: the leak is not judged.
  FormInputs(const ConformForm& form, const AttentionInputs& captured, View<const float> d_o);
  FormInputs(FormInputs&&) = default;

  AttentionProblem problem(const PrecisionPlan& plan) const;
  AttentionInputs inputs() const;
  View<const float> grad_output() const;
  TruthOptions options(const PrecisionPlan& plan) const;
  AttentionTruth truth(const PrecisionPlan& plan) const {
    return attention_truth(problem(plan), inputs(), grad_output(), options(plan));
  }

  ConformForm form;
  bool captured = false;
  std::vector<float> q, k, v, d_o;     // (B, H or G, T or N, D or Dv); packed: (H or G, rows of all, D or Dv)
  std::vector<float> sinks, grad_lse;  // (H), (B, H, T) or (H, rows of all); or empty
  std::vector<uint8_t> visible;        // (B, H, T, N), or empty
  std::vector<int32_t> query_starts, key_starts;  // (B + 1), or empty
  std::vector<int32_t> query_lengths, key_lengths;

 private:
  void set_starts();
};

// The plan for tensors of a type: bf16 becomes fp16, or nothing is rounded.
PrecisionPlan plan_for(const PrecisionPlan& plan, FormType type);
Rounding rounding_of(FormType type);

// One dimension of the space. The first level of each is the plain one.
struct FormLevel {
  std::string name;
  std::function<void(ConformForm&)> apply;
};
struct FormFactor {
  std::string name;
  std::vector<FormLevel> levels;
};
enum class FormExtent { quick, whole };
std::vector<FormFactor> form_factors(FormExtent extent);
// Form number n of `rows` (covering.h): levels applied, the rest settled. T is as large as the work allows. With
// `aligned` the kernel takes causal masks and windows with T unlike N; otherwise T is N there.
ConformForm settled_form(const std::vector<FormFactor>& factors, const std::vector<int>& levels, bool aligned,
                         FormExtent extent, uint64_t seed);
// Conditions under which public kernels have failed, rebuilt as inputs.
struct PublicBug {
  std::string_view report;     // where it was reported: "pytorch 196678, trl 7181"
  std::string_view condition;  // what it takes
  bool leaks;                  // seen in the sums of dS; otherwise in NaN or wrong numbers
  ConformForm form;
};
std::vector<PublicBug> public_bugs(FormType type, uint64_t seed);
// Forms for one question each: those of public_bugs, do forward and backward have the same probabilities, is a NaN seen.
std::vector<ConformForm> single_forms(FormType type, uint64_t seed);

}  // namespace evenkeel

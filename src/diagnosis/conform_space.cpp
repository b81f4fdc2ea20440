// The dimensions of the space of forms, and forms as JSON.
#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "diagnosis/conform_forms.h"
#include "numerics/names.h"

namespace evenkeel {
namespace {

using OrderedJson = nlohmann::ordered_json;

// Levels that set one member of a form.
template <class Value>
FormFactor factor(std::string name, Value ConformForm::*member, const std::vector<Value>& values) {
  FormFactor out{std::move(name), {}};
  for (const Value& value : values) {
    std::string text;
    if constexpr (std::is_enum_v<Value>)
      text = std::to_string(static_cast<int>(value));
    else
      text = fmt::format("{}", value);
    out.levels.push_back({text, [member, value](ConformForm& form) { form.*member = value; }});
  }
  return out;
}

FormFactor heads_factor() {
  FormFactor out{"heads", {}};
  for (const auto& [H, G] : {std::pair<int64_t, int64_t>{2, 2}, {4, 1}, {6, 2}, {1, 1}})
    out.levels.push_back(
        {fmt::format("{}/{}", H, G), [H = H, G = G](ConformForm& form) { form.H = H, form.G = G; }});
  return out;
}

FormFactor mask_factor() {
  const auto window = [](int64_t left, int64_t right) {
    return [left, right](ConformForm& form) { form.window_left = left, form.window_right = right; };
  };
  return {"mask",
          {{"none", [](ConformForm&) {}},
           {"causal", [](ConformForm& form) { form.causal = true; }},
           {"window", window(16, 5)},
           {"causal window", [](ConformForm& form) { form.causal = true, form.window_left = 20; }},
           {"keys", [](ConformForm& form) { form.mask = FormMask::keys; }},
           {"rows", [](ConformForm& form) { form.mask = FormMask::rows; }},
           {"packed", [](ConformForm& form) { form.packed = true; }},
           {"packed causal", [](ConformForm& form) { form.packed = form.causal = true; }}}};
}

// T by its relation to N; what is too much work is cut by settle().
FormFactor rows_factor() {
  return {"rows",
          {{"as keys", [](ConformForm& form) { form.T = 0; }},
           {"1", [](ConformForm& form) { form.T = 1; }},
           {"7", [](ConformForm& form) { form.T = 7; }}}};
}

std::vector<FormFactor> named(std::vector<FormFactor> factors) {
  for (FormFactor& f : factors)
    for (size_t n = 0; n < f.levels.size(); ++n) {
      if (f.name == "type") f.levels[n].name = kFormTypeNames[std::stoul(f.levels[n].name)];
      if (f.name == "values") f.levels[n].name = kFormValuesNames[std::stoul(f.levels[n].name)];
    }
  return factors;
}

constexpr int64_t kWholeWork = int64_t{1} << 22, kQuickWork = int64_t{1} << 19;

}  // namespace

std::vector<FormFactor> form_factors(FormExtent extent) {
  const bool quick = extent == FormExtent::quick;
  using F = ConformForm;
  using I = std::vector<int64_t>;
  using V = FormValues;
  std::vector<FormFactor> out;
  out.push_back(factor(
      "keys", &F::N,
      quick ? I{64, 1, 16, 33, 65, 129}
            : I{64, 1, 15, 16, 17, 31, 32, 33, 63, 65, 127, 128, 129, 255, 256, 257, 1000, 4096, 16384}));
  out.push_back(factor("offset", &F::offset,
                       quick ? std::vector<double>{0, -100, 300, -3000}
                             : std::vector<double>{0, 10, -10, 100, -100, 300, -300, 3000, -3000}));
  out.push_back(mask_factor());
  out.push_back(
      factor("values", &F::values,
             std::vector<V>{V::random, V::one_signed, V::ties, V::rising, V::falling, V::sink, V::far}));
  out.push_back(factor("head size", &F::D, quick ? I{64, 32, 128} : I{64, 32, 96, 128, 192, 256}));
  out.push_back({"value head size",
                 {{"as head size", [](F& form) { form.Dv = form.D; }},
                  {"another", [](F& form) { form.Dv = form.D > 64 ? form.D / 2 : 2 * form.D; }}}});
  out.push_back(heads_factor());
  out.push_back(factor("batch", &F::B, quick ? I{1, 2} : I{1, 2, 3}));
  out.push_back(rows_factor());
  out.push_back(
      factor("type", &F::type, std::vector<FormType>{FormType::bf16, FormType::fp16, FormType::fp32}));
  out.push_back(factor("size", &F::size, std::vector<double>{1, 1e-4, 1e4}));
  out.push_back(factor("scale", &F::scale, std::vector<float>{0, 0.05f, 1}));
  out.push_back(factor("softcap", &F::softcap, std::vector<float>{0, 20}));
  out.push_back({"sinks", {{"no", [](F&) {}}, {"yes", [](F& form) { form.sinks = true; }}}});
  out.push_back({"gradient of L", {{"no", [](F&) {}}, {"yes", [](F& form) { form.grad_lse = true; }}}});
  return named(out);
}

ConformForm settled_form(const std::vector<FormFactor>& factors, const std::vector<int>& levels, bool aligned,
                         FormExtent extent, uint64_t seed) {
  ConformForm form;
  for (size_t f = 0; f < factors.size(); ++f) factors[f].levels[static_cast<size_t>(levels[f])].apply(form);
  form.seed = seed;
  // In FP16 values of 10^4 and gradients of 10^3 leave its range in the products that are outputs.
  if (form.type == FormType::fp16) form.size = std::clamp(form.size, 1e-2, 30.0);
  const bool needs_same = (form.causal || form.window_left >= 0 || form.window_right >= 0) && !aligned;
  if (needs_same) {
    form.N = std::min<int64_t>(form.N, 257);
    form.T = form.N;
    return form;
  }
  const int64_t budget = extent == FormExtent::quick ? kQuickWork : kWholeWork;
  const int64_t a_row = form.B * form.H * form.N * std::max(form.D, form.Dv);
  const int64_t most = std::max<int64_t>(1, budget / a_row);
  form.T = std::min(form.T == 0 ? form.N : form.T, most);
  return form;
}

std::vector<PublicBug> public_bugs(FormType type, uint64_t seed) {
  ConformForm base;
  base.type = type, base.seed = seed;
  std::vector<PublicBug> out;
  const auto add = [&](const char* report, const char* condition, bool leaks, auto change) {
    out.push_back({report, condition, leaks, base});
    change(out.back().form);
  };
  // The backward pass scored the empty half of the last tile of 128 keys 0, and exp(0 - L) is infinite.
  add("pytorch 196678, trl 7181", "a mask, keys 64 beyond a multiple of 128, log-sum-exp below -88.7", false,
      [](ConformForm& form) { form.mask = FormMask::keys, form.offset = -120; });
  add("cudnn-frontend 1072", "one row, 128 keys, log-sum-exp below -88.7", false,
      [](ConformForm& form) { form.T = 1, form.N = 128, form.offset = -128; });
  // The backward pass rounded scores to FP16.
  add("cudnn-frontend 744", "scores near -400", false, [](ConformForm& form) { form.offset = -400; });
  add("TransformerEngine 3216",
      "head size 256, two sequences, grouped queries, causal, one key with nearly all of a row", false,
      [](ConformForm& form) {
        form.B = 2, form.H = 4, form.D = form.Dv = 256, form.T = form.N = 33;
        form.causal = true, form.values = FormValues::sink;
      });
  // Numerators are rounded and their sum is not: O errs with the sign of V.
  add("flash-attention 2721", "values of one sign", true,
      [](ConformForm& form) { form.T = form.N = 128, form.values = FormValues::one_signed; });
  // The backward pass multiplied rounded probabilities into dS.
  add("flash-attention 2893", "keys in equal pairs, gradients of one sign", true,
      [](ConformForm& form) { form.T = form.N = 96, form.values = FormValues::ties; });
  return out;
}

std::vector<ConformForm> single_forms(FormType type, uint64_t seed) {
  ConformForm base;
  base.type = type, base.seed = seed;
  std::vector<ConformForm> out;
  const auto add = [&](auto change) {
    ConformForm form = base;
    change(form);
    out.push_back(form);
  };
  for (const PublicBug& bug : public_bugs(type, seed)) out.push_back(bug.form);
  for (double offset : {0.0, -300.0, 3000.0})
    add([&](ConformForm& form) { form.values = FormValues::identity, form.offset = offset; });
  add([](ConformForm& form) { form.values = FormValues::nan; });
  // L below -88.7 with a causal mask; a second tile that is not full, with a hidden row.
  add([](ConformForm& form) { form.offset = -120, form.causal = true, form.T = form.N = 96; });
  add([](ConformForm& form) { form.mask = FormMask::rows, form.T = 33, form.N = 130; });
  // Errors of one sign need many heads.
  add([](ConformForm& form) { form.B = 4, form.H = form.G = 8; });
  // dS beyond FP16's range, outputs within it.
  add([](ConformForm& form) { form.size = 800, form.T = form.N = 4; });
  return out;
}

void to_json(OrderedJson& json, const ConformForm& f) {
  json = {{"B", f.B},
          {"H", f.H},
          {"G", f.G},
          {"T", f.T},
          {"N", f.N},
          {"D", f.D},
          {"Dv", f.Dv},
          {"causal", f.causal},
          {"window_left", f.window_left},
          {"window_right", f.window_right},
          {"mask", kFormMaskNames[static_cast<size_t>(f.mask)]},
          {"packed", f.packed},
          {"scale", f.scale},
          {"softcap", f.softcap},
          {"sinks", f.sinks},
          {"grad_lse", f.grad_lse},
          {"type", kFormTypeNames[static_cast<size_t>(f.type)]},
          {"offset", f.offset},
          {"size", f.size},
          {"values", kFormValuesNames[static_cast<size_t>(f.values)]},
          {"seed", f.seed}};
}

namespace {
template <class Enum, size_t kCount>
Enum enum_named(const std::string& text, const std::array<std::string_view, kCount>& names,
                const char* what) {
  if (const auto value = value_named<Enum>(text, names)) return *value;
  throw std::invalid_argument(fmt::format("[conform] unknown {} '{}' of a form", what, text));
}
}  // namespace

ConformForm form_from_json(const OrderedJson& json) {
  ConformForm f;
  try {
    const auto number = [&](const char* key, int64_t low, int64_t high) {
      const int64_t value = json.at(key).get<int64_t>();
      require(value >= low && value <= high, "[conform] expected {} of a form from {} to {}, got {}", key,
              low, high, value);
      return value;
    };
    f.B = number("B", 1, 64), f.H = number("H", 1, 1024), f.G = number("G", 1, 1024);
    f.T = number("T", 1, 1 << 16), f.N = number("N", 1, 1 << 16);
    f.D = number("D", 4, 1024), f.Dv = number("Dv", 1, 1024);
    f.window_left = number("window_left", -1, 1 << 16), f.window_right = number("window_right", -1, 1 << 16);
    f.causal = json.at("causal").get<bool>(), f.packed = json.at("packed").get<bool>();
    f.sinks = json.at("sinks").get<bool>(), f.grad_lse = json.at("grad_lse").get<bool>();
    f.scale = json.at("scale").get<float>(), f.softcap = json.at("softcap").get<float>();
    f.offset = json.at("offset").get<double>(), f.size = json.at("size").get<double>();
    f.seed = json.at("seed").get<uint64_t>();
    f.mask = enum_named<FormMask>(json.at("mask").get<std::string>(), kFormMaskNames, "mask");
    f.type = enum_named<FormType>(json.at("type").get<std::string>(), kFormTypeNames, "type");
    f.values = enum_named<FormValues>(json.at("values").get<std::string>(), kFormValuesNames, "values");
  } catch (const nlohmann::json::exception& error) {
    throw std::invalid_argument(fmt::format("[conform] not a form: {}", error.what()));
  }
  require(f.H % f.G == 0, "[conform] expected H a multiple of G, got {} and {}", f.H, f.G);
  require(!f.packed || f.B <= 3, "[conform] expected at most 3 packed sequences, got {}", f.B);
  require(f.work() < int64_t{1} << 36, "[conform] the form {} is too large", f.text());
  return f;
}

}  // namespace evenkeel

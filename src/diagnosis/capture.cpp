#include "diagnosis/capture.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

#include "base/error.h"
#include "numerics/names.h"

namespace evenkeel {
namespace {

constexpr std::string_view kVersionKey = "evenkeel_capture", kVersion = "1";

template <class Range>
std::string listed(const Range& values, const char* separator = ", ") {
  std::string text;
  for (const auto& value : values) text += (text.empty() ? "" : separator) + fmt::format("{}", value);
  return text;
}

// The key heads that some heads read: of all heads each one once, of some heads one for each of them.
std::vector<int64_t> key_heads_of(const ModelConfig& config, const std::vector<int64_t>& heads) {
  const int64_t G = config.key_head_count();
  std::vector<int64_t> found;
  if (static_cast<int64_t>(heads.size()) == config.heads)
    for (int64_t g = 0; g < G; ++g) found.push_back(g);
  else
    for (const int64_t h : heads) found.push_back(h / (config.heads / G));
  return found;
}

// Some heads of a tensor of all.
Tensor<float> pick(const Tensor<float>& from, const std::vector<int64_t>& heads) {
  const auto& s = from.shape();
  Tensor<float> to({s[0], static_cast<int64_t>(heads.size()), s[2], s[3]});
  for (int64_t b = 0; b < s[0]; ++b)
    for (size_t h = 0; h < heads.size(); ++h)
      std::copy_n(from.view().at(b, heads[h], 0), s[2] * s[3], to.view().at(b, static_cast<int64_t>(h), 0));
  return to;
}

// --- The file

// One walk over the tensors, for writing and for reading. visit(name, tensor, axes of the file, optional)
template <class C, class Visit>
void for_each_tensor(C& c, Visit visit) {
  visit("q", c.q, false);
  visit("k", c.k, false);
  visit("v", c.v, false);
  visit("d_o", c.d_o, false);
  visit("x", c.x, true);
  visit("w_q", c.w_q, true);
  visit("w_k", c.w_k, true);
  visit("w_v", c.w_v, true);
}

// x (B, 1, T, C) and w (1, H, C, D) have an axis of 1 in memory that the file does not have.
int dropped_axis(std::string_view name) { return name == "x" ? 1 : name[0] == 'w' ? 0 : -1; }

std::string join_plans(const std::vector<PrecisionPlan>& plans) {
  std::string text;
  for (const PrecisionPlan& plan : plans) text += (text.empty() ? "" : "; ") + to_string(plan);
  return text;
}

// The metadata of a file, with complaints that name it.
class Words {
 public:
  Words(const std::map<std::string, std::string>& words, const std::string& file)
      : words_(words), file_(file) {}

  const std::string& text(const std::string& key) const {
    const auto found = words_.find(key);
    require_data(found != words_.end(), "{}: expected '{}' in the metadata, found none", file_, key);
    return found->second;
  }
  std::string text_or(const std::string& key, const std::string& otherwise) const {
    const auto found = words_.find(key);
    return found == words_.end() ? otherwise : found->second;
  }
  double number(const std::string& key) const { return number_in(key, text(key)); }
  // Empty where there is no such key.
  std::vector<float> numbers(const std::string& key) const {
    std::vector<float> values;
    if (words_.contains(key))
      for_each_part(text(key), ',', [&](const std::string& part) {
        values.push_back(static_cast<float>(number_in(key, part)));
      });
    return values;
  }
  int64_t integer(const std::string& key, int64_t most) const { return integer_in(key, text(key), most); }
  std::vector<int64_t> integers(const std::string& key, int64_t most) const {
    std::vector<int64_t> values;
    for_each_part(text(key), ',',
                  [&](const std::string& part) { values.push_back(integer_in(key, part, most)); });
    return values;
  }
  std::vector<PrecisionPlan> plans(const std::string& key) const {
    std::vector<PrecisionPlan> values;
    try {
      for_each_part(text(key), ';', [&](const std::string& part) {
        values.push_back(parse_plan(part.substr(std::min(part.find_first_not_of(' '), part.size()))));
      });
    } catch (const std::invalid_argument& error) {
      throw DataError(fmt::format("{}: '{}' in the metadata: {}", file_, key, error.what()));
    }
    return values;
  }

 private:
  double number_in(const std::string& key, const std::string& word) const {
    double value = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    require_data(error == std::errc() && end == word.data() + word.size(),
                 "{}: expected a number as '{}' in the metadata, found '{}'", file_, key, word);
    return value;
  }
  int64_t integer_in(const std::string& key, const std::string& word, int64_t most) const {
    int64_t value = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    require_data(error == std::errc() && end == word.data() + word.size() && 0 <= value && value <= most,
                 "{}: expected whole numbers from 0 to {} as '{}' in the metadata, found '{}'", file_, most,
                 key, word);
    return value;
  }
  template <class Take>
  static void for_each_part(const std::string& text, char separator, Take take) {
    size_t begin = 0;
    for (size_t end; begin <= text.size(); begin = end + 1) {
      end = std::min(text.find(separator, begin), text.size());
      take(text.substr(begin, end - begin));
    }
  }

  const std::map<std::string, std::string>& words_;
  const std::string& file_;
};

// The tensor as a Tensor of four axes; empty where an optional one is not there.
Tensor<float> read_tensor(const Safetensors& file, const std::string& name, std::string_view key,
                          bool optional) {
  const StoredTensor* stored = file.find(key);
  if (!stored && optional) return {};
  require_data(stored, "{}: expected a tensor {}, found none", name, key);
  require_data(stored->type == element_type("F32"), "{}: {}: expected F32, found {}", name, key,
               stored->type.name);
  const int dropped = dropped_axis(key);
  const size_t axes = dropped < 0 ? 4 : 3;
  require_data(stored->shape.size() == axes, "{}: {}: expected {} axes, found ({})", name, key, axes,
               listed(stored->shape));
  std::array<int64_t, 4> shape{1, 1, 1, 1};
  constexpr uint64_t kMost =
      1 << 24;  // keeps products of sizes within 64 bits; the file's own size bounds the rest
  for (size_t n = 0, at = 0; n < 4; ++n) {
    if (static_cast<int>(n) == dropped) continue;
    const uint64_t size = stored->shape[at++];
    require_data(1 <= size && size <= kMost, "{}: {}: expected sizes from 1 to {}, found ({})", name, key,
                 kMost, listed(stored->shape));
    shape[n] = static_cast<int64_t>(size);
  }
  Tensor<float> tensor(shape);
  stored->copy_to(tensor.values().data(), tensor.values().size());
  return tensor;
}

}  // namespace

AttentionInputs Capture::inputs() const {
  return {std::as_const(q).view(), std::as_const(k).view(), std::as_const(v).view()};
}

AttentionProblem Capture::attention_problem() const {
  AttentionProblem config;
  config.plans = plans;
  config.scale = scale;
  config.softcap = softcap;
  config.slopes = slopes;
  config.sinks = sinks;
  config.mask.causal = causal;
  config.tile_keys = tile_keys;
  config.step = static_cast<uint32_t>(step);
  config.layer = static_cast<uint32_t>(layer);
  config.allow_nonfinite = true;  // what is not finite is a finding
  return config;
}

Capture capture_of(const Model& model, int64_t layer, std::vector<int64_t> heads) {
  const LayerCapture& from = model.captured(layer);
  std::vector<float> parameters(static_cast<size_t>(model.table().size()));
  model.read_parameters(parameters);
  return capture_of(from, model.config(), model.table(), parameters, layer, std::move(heads));
}

Capture capture_of(const LayerCapture& from, const ModelConfig& config, const ParameterTable& table,
                   std::span<const float> parameters, int64_t layer, std::vector<int64_t> heads) {
  if (heads.empty())
    for (int64_t h = 0; h < config.heads; ++h) heads.push_back(h);
  for (size_t n = 0; n < heads.size(); ++n)
    require(0 <= heads[n] && heads[n] < config.heads && (n == 0 || heads[n - 1] < heads[n]),
            "expected heads from 0 to {} in ascending order, got {}", config.heads - 1, listed(heads, ","));
  Capture c;
  c.model = describe(config);
  c.layer = layer;
  c.loss = std::numeric_limits<double>::quiet_NaN();
  c.softcap = config.softcap;
  c.tile_keys = config.tile_keys;
  c.positions = config.positions;
  c.rotary_base = config.rotary_base;
  const std::vector<float> slopes = alibi_slopes(config);
  const ParameterTensor* const sinks = table.find(fmt::format("h.{}.attn.sinks", layer));
  for (const int64_t h : heads) {
    if (!slopes.empty()) c.slopes.push_back(slopes[static_cast<size_t>(h)]);
    if (sinks) c.sinks.push_back(parameters[static_cast<size_t>(sinks->offset + h)]);
  }
  c.x = from.x;
  c.q = pick(from.q, heads);
  const std::vector<int64_t> key_heads = key_heads_of(config, heads);
  c.k = pick(from.k, key_heads);
  c.v = pick(from.v, key_heads);
  c.d_o = pick(from.d_o, heads);
  for (const int64_t h : heads) c.plans.push_back(from.plans[static_cast<size_t>(h)]);

  // c_attn: the columns of q, k, v, head after head.
  const int64_t C = config.width, D = config.head_size();
  const ParameterTensor& weight = *table.find(fmt::format("h.{}.attn.c_attn.weight", layer));
  const float* const all = parameters.data() + weight.offset;
  for (size_t part = 0; part < 3; ++part) {
    Tensor<float>& w = part == 0 ? c.w_q : part == 1 ? c.w_k : c.w_v;
    const std::vector<int64_t>& of_part = part == 0 ? heads : key_heads;
    w = Tensor<float>({1, static_cast<int64_t>(of_part.size()), C, D});
    for (size_t n = 0; n < of_part.size(); ++n)
      for (int64_t row = 0; row < C; ++row)
        std::copy_n(all + row * weight.shape[1] + weight.parts[part].first + of_part[n] * D, D,
                    w.view().at(0, static_cast<int64_t>(n), row));
  }
  c.heads = std::move(heads);
  return c;
}

void write_capture(const std::filesystem::path& file, const Capture& capture) {
  std::vector<TensorHeader> headers;
  for_each_tensor(capture, [&](const char* name, const Tensor<float>& tensor, bool) {
    if (tensor.values().empty()) return;
    TensorHeader header{name, element_type("F32"), {}};
    for (int n = 0; n < 4; ++n)
      if (n != dropped_axis(name))
        header.shape.push_back(static_cast<uint64_t>(tensor.shape()[static_cast<size_t>(n)]));
    headers.push_back(std::move(header));
  });
  std::map<std::string, std::string> words{
      {std::string(kVersionKey), std::string(kVersion)},
      {"source", capture.source},
      {"model", capture.model},
      {"step", fmt::format("{}", capture.step)},
      {"layer", fmt::format("{}", capture.layer)},
      {"heads", listed(capture.heads, ",")},
      {"loss", fmt::format("{}", capture.loss)},
      {"scale", fmt::format("{}", capture.scale)},
      {"softcap", fmt::format("{}", capture.softcap)},
      {"causal", capture.causal ? "1" : "0"},
      {"tile_keys", fmt::format("{}", capture.tile_keys)},
      {"positions", std::string(kPositionNames[static_cast<size_t>(capture.positions)])},
      {"rotary_base", fmt::format("{}", capture.rotary_base)},
      {"plans", join_plans(capture.plans)}};
  if (!capture.slopes.empty()) words["slopes"] = listed(capture.slopes, ",");
  if (!capture.sinks.empty()) words["sinks"] = listed(capture.sinks, ",");
  SafetensorsWriter writer(file, headers, words);
  for_each_tensor(capture, [&](const char* name, const Tensor<float>& tensor, bool) {
    if (!tensor.values().empty()) writer.append(name, std::as_bytes(std::span(tensor.values())));
  });
  writer.commit();
}

Capture read_capture(const std::filesystem::path& file) {
  return read_capture(Safetensors(file), file.string());
}

Capture read_capture(const Safetensors& file, const std::string& name) {
  const Words words(file.metadata(), name);
  require_data(words.text_or(std::string(kVersionKey), "none") == kVersion,
               "{}: expected a capture ({} = {} in the metadata), found {}", name, kVersionKey, kVersion,
               words.text_or(std::string(kVersionKey), "none"));
  Capture c;
  constexpr int64_t kMany = int64_t{1} << 31;
  c.source = words.text_or("source", "");
  c.model = words.text_or("model", "");
  c.step = words.integer("step", kMany);
  c.layer = words.integer("layer", kMany);
  c.heads = words.integers("heads", kMany);
  c.loss = words.number("loss");
  c.scale = static_cast<float>(words.number("scale"));
  c.softcap = static_cast<float>(words.number("softcap"));
  c.causal = words.integer("causal", 1) == 1;
  c.tile_keys = words.integer("tile_keys", 1 << 20);
  c.plans = words.plans("plans");
  c.slopes = words.numbers("slopes");
  c.sinks = words.numbers("sinks");
  const std::string positions = words.text_or("positions", "none");
  const auto named = value_named<Positions>(positions, kPositionNames);
  require_data(named.has_value(), "{}: positions: expected one of {}, found '{}'", name,
               fmt::join(kPositionNames, ", "), positions);
  c.positions = *named;
  if (words.text_or("rotary_base", "") != "") c.rotary_base = static_cast<float>(words.number("rotary_base"));
  for_each_tensor(c, [&](const char* key, Tensor<float>& tensor, bool optional) {
    tensor = read_tensor(file, name, key, optional);
  });
  const int64_t B = c.q.shape()[0], H = c.q.shape()[1], G = c.k.shape()[1], T = c.q.shape()[2],
                D = c.q.shape()[3];
  const auto expect = [&](const char* key, const Tensor<float>& tensor, const std::array<int64_t, 4>& shape) {
    require_data(tensor.values().empty() || tensor.shape() == shape,
                 "{}: {}: expected the shape ({}), found ({})", name, key, listed(shape),
                 listed(tensor.shape()));
  };
  expect("d_o", c.d_o, {B, H, T, D});
  require_data(
      !c.is_rotary() || (D % 2 == 0 && c.rotary_base > 1),
      "{}: expected an even head size and a rotary_base above 1 with rotary positions, found {} and {}", name,
      D, c.rotary_base);
  expect("k", c.k, {B, G, T, D});
  expect("v", c.v, {B, G, T, D});
  require_data(H % G == 0, "{}: expected heads in whole groups for {} key and value heads, found {}", name, G,
               H);
  const int64_t C = c.x.values().empty() ? c.w_q.shape()[2] : c.x.shape()[3];
  expect("x", c.x, {B, 1, T, C});
  expect("w_q", c.w_q, {1, H, C, D});
  expect("w_k", c.w_k, {1, G, C, D});
  expect("w_v", c.w_v, {1, G, C, D});
  require_data(
      c.w_q.values().empty() == c.w_k.values().empty() && c.w_q.values().empty() == c.w_v.values().empty(),
      "{}: expected all of w_q, w_k and w_v or none of them, found some", name);
  const auto heads = static_cast<int64_t>(c.heads.size()), plans = static_cast<int64_t>(c.plans.size());
  require_data(heads == H && plans == H, "{}: expected {} heads and plans, as q has, found {} and {}", name,
               H, heads, plans);
  require_data(std::isfinite(c.scale) && c.scale >= 0 && std::isfinite(c.softcap) && c.softcap >= 0,
               "{}: expected a finite scale and softcap of 0 or more, found {} and {}", name, c.scale,
               c.softcap);
  try {
    problem_of(c.attention_problem(), c.inputs());
  } catch (const std::invalid_argument& error) {
    throw DataError(fmt::format("{}: {}", name, error.what()));
  }
  return c;
}

}  // namespace evenkeel

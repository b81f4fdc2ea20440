#include "diagnosis/probe_recorder.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json_lines.h"

namespace evenkeel {
namespace {

using Json = nlohmann::json;

// Five digits: a record of every step and head is read by eyes and thresholds.
Json short_number(double x) {
  if (!std::isnormal(x)) return x;
  return std::strtod(fmt::format("{:.4e}", x).c_str(), nullptr);
}

// (L, H) as an array of arrays.
template <class Value>
Json by_head(int64_t L, int64_t H, Value value) {
  Json out = Json::array();
  for (int64_t l = 0; l < L; ++l) {
    Json layer = Json::array();
    for (int64_t h = 0; h < H; ++h) layer.push_back(short_number(value(static_cast<size_t>(l * H + h))));
    out.push_back(std::move(layer));
  }
  return out;
}

// Weights of two axes; a matrix of q, k and v side by side is three.
template <class Visit>
void for_each_matrix(const ParameterTable& table, std::span<const float> parameters, Visit visit) {
  for (const ParameterTensor& tensor : table.tensors()) {
    if (tensor.shape.size() != 2) continue;
    const int64_t rows = tensor.shape[0], columns = tensor.shape[1] / tensor.parts;
    for (int64_t part = 0; part < tensor.parts; ++part)
      visit(tensor.parts == 1 ? tensor.name : fmt::format("{}[{}]", tensor.name, "qkv"[part]),
            Matrix{parameters.data() + tensor.offset + part * columns, tensor.shape[1], 1}, rows, columns);
  }
}

}  // namespace

std::vector<double> from_heads(const Json& value, int64_t& L, int64_t& H) {
  std::vector<double> out;
  if (!value.is_array() || value.empty() || !value[0].is_array() || value[0].empty()) return {};
  if (L == 0) L = static_cast<int64_t>(value.size()), H = static_cast<int64_t>(value[0].size());
  if (static_cast<int64_t>(value.size()) != L) return {};
  for (const Json& layer : value) {
    if (!layer.is_array() || static_cast<int64_t>(layer.size()) != H) return {};
    for (const Json& number : layer) out.push_back(json_number(number).value_or(kNotKnown));
  }
  return out;
}

ProbeRecorder::ProbeRecorder(int64_t every, const std::filesystem::path& metrics, int64_t next_step,
                             bool captures)
    : every_(every), captures_(captures) {
  require(every >= 1, "[probe] expected 1 or more steps between probes, got {}", every);
  std::error_code error;
  if (next_step == 0 || !std::filesystem::exists(metrics, error)) return;
  read_json_lines(metrics, [&](const JsonLine& line) {
    const auto step = line.object.find("step"), found = line.object.find("probe");
    if (step == line.object.end() || !step->is_number_integer() || step->get<int64_t>() >= next_step) return;
    if (found == line.object.end() || !found->contains("delta_error_running")) return;
    int64_t L = 0, H = 0;
    delta_error_running_ = from_heads((*found)["delta_error_running"], L, H);
  });
}

void ProbeRecorder::prepare(int64_t step, StepContext& context) {
  context.tie_facts = context.residual_facts = true;
  context.fact_sequences = kFactSequences;
  if (!full(step)) return;
  if (captures_)
    context.capture_sequences = std::max(context.capture_sequences, kSequences);
  else
    context.score_facts = true;
}

void ProbeRecorder::see(int64_t step, double, Gpt2& model, Json& line) {
  const int64_t L = model.config().layers, H = model.config().heads;
  const std::vector<HeadFacts>& facts = model.facts();
  const auto add = [&](const char* name, auto HeadFacts::*value) {
    line[name] = by_head(L, H, [&](size_t n) { return static_cast<double>(facts[n].*value); });
  };
  line["fact_sequences"] = kFactSequences;
  add("mean_lse", &HeadFacts::mean_lse);
  add("largest_lse", &HeadFacts::largest_lse);
  add("tied_rows", &HeadFacts::tied_rows);
  add("residual_mean", &HeadFacts::residual_mean);
  add("residual_error", &HeadFacts::residual_error);
  add("residual_rms", &HeadFacts::residual_rms);
  add("delta_rms", &HeadFacts::delta_rms);
  if (!full(step)) return;

  std::vector<float> parameters(static_cast<size_t>(model.table().size()));
  model.read_parameters(parameters);
  const auto heads = static_cast<size_t>(L * H);
  probes_.assign(heads, {});
  norms_.resize(heads);
  delta_error_running_.resize(heads);
  probed_step_ = step;
  int64_t sequences = 0, rows = 0;
  for (int64_t l = 0; captures_ && l < L; ++l) {
    const Capture capture = capture_of(model, l, {}, parameters);
    sequences = capture.q.shape()[0], rows = sequences * capture.q.shape()[2];
    const auto norms = std::span(norms_).subspan(static_cast<size_t>(l * H), static_cast<size_t>(H));
    std::ranges::copy(probe(capture, norms), probes_.begin() + l * H);
  }
  for (size_t n = 0; n < heads; ++n) {
    HeadProbe& p = probes_[n];
    if (captures_) {
      if (!std::isnan(p.delta_error_sum)) delta_error_running_[n] += p.delta_error_sum;
      p.delta_error_running = delta_error_running_[n];
    } else {
      const HeadFacts& f = facts[n];
      p.largest_score = f.largest_score, p.largest_row_mean = f.largest_row_mean;
      p.mean_lse = f.mean_lse, p.largest_lse = f.largest_lse, p.tied_rows = f.tied_rows;
      p.residual_mean = f.residual_mean, p.residual_error = f.residual_error, p.residual_rms = f.residual_rms;
      p.residual_z = f.residual_mean / f.residual_error;
      p.delta_rms = f.delta_rms, p.residual_share = f.residual_rms / f.delta_rms;
    }
  }
  Json record = {{"sequences", sequences}, {"rows", rows}};
  for (const ProbeField& field : kProbeFields)
    record[std::string(field.name)] = by_head(L, H, [&](size_t n) { return probes_[n].*field.value; });
  Json& norms = record["norms"] = Json::object();
  for_each_matrix(model.table(), parameters,
                  [&](const std::string& name, const Matrix& matrix, int64_t matrix_rows, int64_t columns) {
                    norms[name] = short_number(matrix_norms_[name].of(matrix, matrix_rows, columns));
                  });
  line["probe"] = std::move(record);
}

ProbeHistory read_probe_history(const std::filesystem::path& metrics) {
  ProbeHistory history;
  read_json_lines(metrics, [&](const JsonLine& line) {
    const auto step = line.object.find("step"), found = line.object.find("probe"),
               loss = line.object.find("loss");
    if (step == line.object.end() || !step->is_number_integer() || found == line.object.end() ||
        !found->is_object())
      return;
    std::vector<HeadProbe> probes;
    for (const ProbeField& field : kProbeFields) {
      const auto values = found->find(std::string(field.name));
      if (values == found->end()) continue;
      const std::vector<double> of_heads = from_heads(*values, history.layers, history.heads);
      if (of_heads.empty()) return;
      probes.resize(of_heads.size());
      for (size_t n = 0; n < of_heads.size(); ++n) probes[n].*field.value = of_heads[n];
    }
    if (probes.empty()) return;
    const auto norms = found->find("norms");
    if (norms != found->end() && norms->is_object())
      for (const auto& [name, value] : norms->items()) {
        std::vector<double>& values = history.norms[name];
        values.resize(history.steps.size(), kNotKnown);
        values.push_back(json_number(value).value_or(kNotKnown));
      }
    history.steps.push_back(step->get<int64_t>());
    history.loss.push_back(loss == line.object.end() ? kNotKnown : json_number(*loss).value_or(kNotKnown));
    history.probes.push_back(std::move(probes));
    for (auto& [name, values] : history.norms) values.resize(history.steps.size(), kNotKnown);
  });
  return history;
}

}  // namespace evenkeel

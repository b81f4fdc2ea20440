#include "diagnosis/probe_recorder.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json_lines.h"
#include "base/threads.h"

namespace evenkeel {
namespace {

using Json = nlohmann::json;

// Five digits: a record of every step and head is read by eyes and thresholds.
Json short_number(double x) {
  if (!std::isnormal(x)) return x;
  char text[16];  // -1.2345e-308
  const auto written = std::to_chars(text, text + sizeof text, x, std::chars_format::scientific, 4);
  std::from_chars(text, written.ptr, x);
  return x;
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
struct NamedMatrix {
  std::string name;
  Matrix values;
  int64_t rows, columns;
};
std::vector<NamedMatrix> matrices_of(const ParameterTable& table, std::span<const float> parameters) {
  std::vector<NamedMatrix> matrices;
  for (const ParameterTensor& tensor : table.tensors()) {
    if (tensor.shape.size() != 2) continue;
    const int64_t rows = tensor.shape[0], columns = tensor.shape[1] / tensor.parts;
    for (int64_t part = 0; part < tensor.parts; ++part)
      matrices.push_back({tensor.parts == 1 ? tensor.name : fmt::format("{}[{}]", tensor.name, "qkv"[part]),
                          {parameters.data() + tensor.offset + part * columns, tensor.shape[1], 1},
                          rows,
                          columns});
  }
  return matrices;
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

ProbeRecorder::ProbeRecorder(const RunConfig& config, const std::filesystem::path& metrics, int64_t next_step)
    : model_(config.model),
      every_(config.probe_every),
      steps_(config.schedule.steps),
      sequences_(std::clamp<int64_t>(kRows / config.model.context, 1, kSequences)),
      rows_(std::min(kRows, config.model.context)),
      background_(config.backend == Backend::cuda) {
  require(every_ >= 1, "[probe] expected 1 or more steps between probes, got {}", every_);
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

ProbeRecorder::~ProbeRecorder() {
  if (pending_.valid()) pending_.wait();
}

void ProbeRecorder::prepare(int64_t step, StepContext& context) {
  context.tie_facts = context.residual_facts = true;
  context.fact_sequences = kFactSequences;
  if (!full(step)) return;
  context.capture_sequences = sequences_;
  context.capture_rows = rows_;
}

void ProbeRecorder::see(int64_t step, double loss, Gpt2& model, Json& line) {
  facts_ = model.facts();
  if (full(step)) {
    snapshot_.step = step;
    snapshot_.loss = loss;
    if (!snapshot_.parameters) snapshot_.parameters = model.make_host_buffer();
    model.read_parameters({snapshot_.parameters.get(), static_cast<size_t>(model.table().size())});
    model.swap_captures(snapshot_.layers);
    pending_ = std::async(background_ ? std::launch::async : std::launch::deferred,
                          [this, table = model.table()] { return full_set(table); });
  }
  // Always in the same line, however long it took: a record does not depend on the machine's load.
  if (pending_.valid() && (!background_ || full(step + 1) || step + 1 == steps_))
    line["probe"] = pending_.get();
}

void ProbeRecorder::tell(int64_t, Json& line) {
  const auto add = [&](const char* name, auto HeadFacts::*value) {
    line[name] =
        by_head(model_.layers, model_.heads, [&](size_t n) { return static_cast<double>(facts_[n].*value); });
  };
  line["fact_sequences"] = kFactSequences;
  add("mean_lse", &HeadFacts::mean_lse);
  add("largest_lse", &HeadFacts::largest_lse);
  add("tied_rows", &HeadFacts::tied_rows);
  add("residual_mean", &HeadFacts::residual_mean);
  add("residual_error", &HeadFacts::residual_error);
  add("residual_rms", &HeadFacts::residual_rms);
  add("delta_rms", &HeadFacts::delta_rms);
}

Json ProbeRecorder::full_set(const ParameterTable& table) {
  const std::span<const float> parameters(snapshot_.parameters.get(), static_cast<size_t>(table.size()));
  const int64_t L = model_.layers, H = model_.heads;
  const auto heads = static_cast<size_t>(L * H);
  std::vector<HeadProbe> probes(heads);  // (L, H)
  norms_.resize(heads);
  delta_error_running_.resize(heads);
  const std::vector<NamedMatrix> matrices = matrices_of(table, parameters);
  std::vector<SpectralNorm*> kept;  // from the last probe; the map is not to be changed side by side
  for (const NamedMatrix& matrix : matrices) kept.push_back(&matrix_norms_[matrix.name]);
  std::vector<double> found(matrices.size());
  // Matrices, the embeddings first, then layers: whoever is free takes the next one.
  const auto matrix_count = static_cast<int64_t>(matrices.size());
  std::atomic<int64_t> next = 0;
  parallel_for(
      background_ ? std::min(kBackgroundThreads, thread_count()) : thread_count(), [&](int64_t, int) {
        for (int64_t n; (n = next++) < matrix_count + L;) {
          if (n < matrix_count) {
            const NamedMatrix& matrix = matrices[static_cast<size_t>(n)];
            found[static_cast<size_t>(n)] =
                kept[static_cast<size_t>(n)]->of(matrix.values, matrix.rows, matrix.columns);
            continue;
          }
          const int64_t l = n - matrix_count;
          const auto norms = std::span(norms_).subspan(static_cast<size_t>(l * H), static_cast<size_t>(H));
          const Capture capture =
              capture_of(snapshot_.layers[static_cast<size_t>(l)], model_, table, parameters, l);
          std::ranges::copy(probe(capture, norms), probes.begin() + l * H);
        }
      });
  for (size_t n = 0; n < heads; ++n) {
    HeadProbe& p = probes[n];
    if (!std::isnan(p.delta_error_sum)) delta_error_running_[n] += p.delta_error_sum;
    p.delta_error_running = delta_error_running_[n];
  }
  const auto [sequences, _, rows, size] = snapshot_.layers[0].q.shape();
  Json record = {{"step", snapshot_.step},
                 {"loss", snapshot_.loss},
                 {"sequences", sequences},
                 {"rows", sequences * rows}};
  for (const ProbeField& field : kProbeFields)
    record[std::string(field.name)] = by_head(L, H, [&](size_t n) { return probes[n].*field.value; });
  Json& norms = record["norms"] = Json::object();
  for (size_t n = 0; n < matrices.size(); ++n) norms[matrices[n].name] = short_number(found[n]);
  return record;
}

ProbeHistory read_probe_history(const std::filesystem::path& metrics) {
  ProbeHistory history;
  read_json_lines(metrics, [&](const JsonLine& line) {
    const auto step = line.object.find("step"), found = line.object.find("probe"),
               loss = line.object.find("loss");
    if (step == line.object.end() || !step->is_number_integer() || found == line.object.end() ||
        !found->is_object())
      return;
    // Its own step and loss; without them (the first version's records) those of the line.
    const auto own_step = found->find("step"), own_loss = found->find("loss");
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
    const bool own = own_step != found->end() && own_step->is_number_integer() && own_loss != found->end();
    const Json& loss_of = own ? *own_loss : loss == line.object.end() ? Json() : *loss;
    history.steps.push_back((own ? *own_step : *step).get<int64_t>());
    history.loss.push_back(json_number(loss_of).value_or(kNotKnown));
    history.probes.push_back(std::move(probes));
    for (auto& [name, values] : history.norms) values.resize(history.steps.size(), kNotKnown);
  });
  return history;
}

}  // namespace evenkeel

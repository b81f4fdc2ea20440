#include "diagnosis/probe_recorder.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/error.h"
#include "base/threads.h"
#include "records/record_json.h"
#include "training/head_facts.h"

namespace evenkeel {
namespace {

using Json = nlohmann::json;

// Weights of two axes; matrices that lie side by side, as q, k and v do, one by one.
struct NamedMatrix {
  std::string name;
  Matrix values;
  int64_t rows, columns;
};
std::vector<NamedMatrix> matrices_of(const ParameterTable& table, std::span<const float> parameters) {
  std::vector<NamedMatrix> matrices;
  for (const ParameterTensor& tensor : table.tensors()) {
    if (tensor.shape.size() != 2) continue;
    std::vector<MatrixPart> parts = tensor.parts;
    if (parts.empty()) parts = {{"", 0, tensor.shape[1]}};  // an embedding
    for (const MatrixPart& part : parts)
      matrices.push_back({part.name.empty() ? tensor.name : fmt::format("{}[{}]", tensor.name, part.name),
                          {parameters.data() + tensor.offset + part.first, tensor.shape[1], 1},
                          tensor.shape[0],
                          part.columns});
  }
  return matrices;
}

}  // namespace

void LagOne::take(double value) {
  if (count_ == 0)
    first_ = value;
  else
    products_ += last_ * value;
  last_ = value;
  sum_ += value;
  squares_ += value * value;
  ++count_;
}

double LagOne::value() const {
  const auto n = static_cast<double>(count_);
  const double mean = sum_ / n, variance = squares_ - n * mean * mean;
  if (count_ < 3 || !(variance > 1e-12 * squares_)) return kNotKnown;
  // sum over neighbours of (x - mean)(y - mean)
  return (products_ - mean * (2 * sum_ - first_ - last_) + (n - 1) * mean * mean) / variance;
}

ProbeRecorder::ProbeRecorder(const RunConfig& config, const std::filesystem::path& folder, int64_t next_step)
    : model_(config.model),
      every_(config.probe_every),
      steps_(config.schedule.steps),
      sequences_(std::clamp<int64_t>(kRows / config.model.context, 1, kSequences)),
      rows_(std::min(kRows, config.model.context)),
      background_(config.backend == Backend::cuda) {
  require(every_ >= 1, "[probe] expected 1 or more steps between probes, got {}", every_);
  std::error_code error;
  if (next_step == 0 || !std::filesystem::exists(record_path(folder, RecordFile::metrics), error)) return;
  const Metrics before = read_metrics(folder, {model_.layers, model_.heads});
  // The leaks of the steps behind the last probe that was due, as they were recorded.
  const Series& leaks = before.of(HeadFact::leak_mean);
  for (size_t n = 0; n < leaks.steps.size() && leaks.steps[n] < next_step; ++n) {
    if (leaks.steps[n] <= (next_step - 1) / every_ * every_) continue;
    leaks_.resize(leaks.width);
    for (size_t head = 0; head < leaks.width; ++head) leaks_[head].take(leaks.row(n)[head]);
  }
  const auto found = before.probes.find("delta_error_running");
  if (found == before.probes.end()) return;
  const Series& running = found->second;
  for (size_t n = 0; n < running.steps.size() && before.steps[running.lines[n]] < next_step; ++n)
    delta_error_running_.assign(running.row(n).begin(), running.row(n).end());
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

void ProbeRecorder::see(int64_t step, double loss, Model& model, Json& line) {
  facts_ = model.facts();
  leaks_.resize(facts_.size());
  for (size_t n = 0; n < facts_.size(); ++n) leaks_[n].take(facts_[n].residual_mean);
  if (full(step)) {
    snapshot_.leaks = std::exchange(leaks_, {});
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
  add_number(line, "fact_sequences", kFactSequences);
  for (const HeadFact fact :
       {HeadFact::mean_lse, HeadFact::largest_lse, HeadFact::tied_rows, HeadFact::leak_mean,
        HeadFact::leak_error, HeadFact::leak_rms, HeadFact::delta_rms})
    add_fact(line, fact, model_.layers, model_.heads, values_of(facts_, fact));
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
    p.leak_lag_1 = snapshot_.leaks[n].value();
  }
  const auto [sequences, _, rows, size] = snapshot_.layers[0].q.shape();
  Json record = {{"step", snapshot_.step},
                 {"loss", snapshot_.loss},
                 {"sequences", sequences},
                 {"rows", sequences * rows}};
  for (const ProbeField& field : kProbeFields) {
    std::vector<double> values;
    // In full where it is a sum with which a run that is resumed goes on.
    const bool in_full = field.value == &HeadProbe::delta_error_running;
    for (const HeadProbe& probe : probes)
      values.push_back(in_full ? probe.*field.value : five_digits(probe.*field.value));
    record[std::string(field.name)] = heads_json(L, H, values);
  }
  Json& norms = record["norms"] = Json::object();
  for (size_t n = 0; n < matrices.size(); ++n) norms[matrices[n].name] = five_digits(found[n]);
  return record;
}

ProbeHistory probe_history(const Metrics& metrics) {
  ProbeHistory history;
  history.layers = metrics.layers, history.heads = metrics.heads;
  const auto heads = static_cast<size_t>(metrics.layers * metrics.heads);
  for (size_t n = 0; n < metrics.probe_loss.steps.size(); ++n) {
    const size_t line = metrics.probe_loss.lines[n];
    std::vector<HeadProbe> probes;
    for (const ProbeField& field : kProbeFields) {
      const auto series = metrics.probes.find(field.name);
      const std::span<const double> values =
          series == metrics.probes.end() ? std::span<const double>() : series->second.of_line(line);
      if (values.empty()) continue;
      probes.resize(heads);
      for (size_t h = 0; h < heads; ++h) probes[h].*field.value = values[h];
    }
    if (probes.empty()) continue;
    history.steps.push_back(metrics.probe_loss.steps[n]);
    history.loss.push_back(metrics.probe_loss.values[n]);
    history.probes.push_back(std::move(probes));
    for (const auto& [weight, series] : metrics.norms) {
      const std::span<const double> norm = series.of_line(line);
      history.norms[weight].push_back(norm.empty() ? kNotKnown : norm[0]);
    }
  }
  return history;
}

ProbeHistory read_probe_history(const std::filesystem::path& folder) {
  return probe_history(read_metrics(folder));
}

}  // namespace evenkeel

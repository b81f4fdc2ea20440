#include "training/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/error.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr int kMetricsSchema = 1;
// Batches for validation are drawn from a stream of their own, the same ones every time.
constexpr uint64_t kValidationSeed = 0x76616c6964617465;

const fs::path& made_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder / "checkpoints", error);
  require_data(!error, "{}: cannot be made: {}", folder.string(), error.message());
  return folder;
}

}  // namespace

std::optional<Finding> DivergenceWatch::see(int64_t step, double loss) {
  if (!std::isfinite(loss))
    return Finding{step, "not_finite", fmt::format("the loss of step {} is {}", step, loss)};
  if (window_.size() < kWindow)
    window_.push_back(loss);
  else
    window_[seen_ % kWindow] = loss;
  ++seen_;
  if (seen_ < kWindow) return {};
  double mean = 0;
  for (double value : window_) mean += value / static_cast<double>(kWindow);
  if (seen_ == kWindow || mean < best_) best_ = mean;
  if (rise_ > 0 && mean > best_ + rise_)
    return Finding{
        step, "divergence",
        fmt::format("the mean loss of the last {} steps is {:.4f} at step {}, {:.4f} above its best", kWindow,
                    mean, step, mean - best_)};
  return {};
}

std::unique_ptr<Trainer> Trainer::start(const fs::path& folder, const RunConfig& config) {
  validate(config);
  std::error_code error;
  require_data(
      !fs::exists(folder, error) || fs::is_empty(folder, error),
      "{}: expected a new or an empty folder for the run, found files in it; --resume goes on with a run",
      folder.string());
  BackendChoice choice = choose_backend(config.backend, cuda_device());
  RunConfig effective = config;
  effective.backend = choice.backend;
  return std::unique_ptr<Trainer>(new Trainer(folder, effective, std::move(choice.why), /*fresh=*/true));
}

std::unique_ptr<Trainer> Trainer::resume(const fs::path& folder, std::optional<Backend> backend) {
  const fs::path file = folder / "config.toml";
  std::error_code error;
  require_data(fs::exists(file, error), "{}: expected a run's folder, found no config.toml in it",
               folder.string());
  RunConfig config;
  read_run_config(file, config);
  validate(config);
  const CudaDevice device = cuda_device();
  require_data(backend || config.backend != Backend::cuda || device.present,
               "{}: expected a GPU, as this run is on the backend cuda, found none ({}); --backend cpu goes "
               "on without "
               "one, with other bits",
               folder.string(), device.why);
  BackendChoice choice = choose_backend(backend.value_or(config.backend), device);
  const bool moved = config.backend != choice.backend;
  config.backend = choice.backend;
  std::unique_ptr<Trainer> trainer(new Trainer(folder, config, std::move(choice.why), /*fresh=*/false));
  // Behind the lock of the folder, which the trainer holds.
  if (moved) write_whole_file(file, to_toml(to_toml_table(config)));
  return trainer;
}

Trainer::Trainer(const fs::path& folder, const RunConfig& config, std::string backend_why, bool fresh)
    : folder_(folder),
      config_(config),
      backend_why_(std::move(backend_why)),
      model_(make_gpt2(config.backend, config.model, config.seed)),
      optimizer_(make_optimizer(config.backend, config.optimizer, model_->table())),
      tokens_(TokenSource::open(config.data)),
      validation_(config.validation.empty() ? TokenSource::open_validation(config.data)
                                            : std::optional(TokenSource::open(config.validation))),
      watch_(config.divergence) {
  const int64_t needed = config.model.context + 1;
  for (const TokenSource* source : {&tokens_, validation_ ? &*validation_ : nullptr}) {
    if (!source) continue;
    require_data(source->vocabulary() <= config.model.vocabulary,
                 "{}: expected tokens below the vocabulary of {}, found a vocabulary of {}", config.data,
                 config.model.vocabulary, source->vocabulary());
    require_data(source->size() >= needed, "{}: expected at least {} tokens (a context and one), found {}",
                 config.data, needed, source->size());
  }
  require(config.validate_every == 0 || validation_.has_value(),
          "[train] expected tokens for validation (--validation, or a val file beside the data), found none");
  const BatchShape shape{config.sequences, needed, tokens_.size()};
  if (!config.batches.empty()) {
    given_batches_.emplace(config.batches);
    require_data(
        given_batches_->shape() == shape && given_batches_->steps() >= config.schedule.steps,
        "{}: expected {} steps of {} sequences of {} tokens from {}, found {} steps of {} of {} from {}",
        config.batches, config.schedule.steps, shape.sequences, shape.tokens, shape.source_size,
        given_batches_->steps(), given_batches_->shape().sequences, given_batches_->shape().tokens,
        given_batches_->shape().source_size);
  }

  made_folder(folder_);
  // Holds the lock of the folder: a second trainer is refused here, before anything is touched.
  uint64_t kept_bytes = 0;
  if (!fresh) {
    remove_leftovers(folder_ / "checkpoints");
    if (const std::vector<Checkpoint> checkpoints = find_checkpoints(folder_ / "checkpoints");
        !checkpoints.empty()) {
      load_checkpoint(checkpoints.back(), *model_, *optimizer_);
      next_step_ = saved_step_ = checkpoints.back().step;
    }
    std::error_code error;
    if (fs::exists(folder_ / "metrics.jsonl", error))
      read_json_lines(folder_ / "metrics.jsonl", [&](const JsonLine& line) {
        const auto step = line.object.find("step");
        if (step == line.object.end() || !step->is_number_integer() || step->get<int64_t>() >= next_step_)
          return;
        kept_bytes = line.end;
        const auto loss = line.object.find("loss");
        if (loss != line.object.end())
          if (const auto value = json_number(*loss)) watch_.see(step->get<int64_t>(), *value);
      });
  }
  JsonLinesWriter::Options options;
  options.keep = kept_bytes;
  metrics_ = std::make_unique<JsonLinesWriter>(folder_ / "metrics.jsonl", options);
  if (fresh) write_whole_file(folder_ / "config.toml", to_toml(to_toml_table(config_)));
  batches_ = std::make_unique<BatchRecorder>(folder_ / "batches.bin", shape, next_step_);
  events_ = std::make_unique<TensorboardWriter>(folder_, fresh ? std::nullopt : std::optional(next_step_));
  std::error_code error;
  fs::remove(folder_ / "findings.json", error);
  follow_plan();
}

void Trainer::follow_plan() {
  std::string text = config_.plan_at(next_step_);
  if (text == plan_) return;
  model_->set_plan(ScopedPlan::parse(text));
  plan_ = std::move(text);
}

std::vector<int64_t> Trainer::offsets_of(int64_t step) const {
  if (given_batches_) return given_batches_->offsets(step);
  std::vector<int64_t> offsets(static_cast<size_t>(config_.sequences));
  batch_offsets(config_.seed, step, config_.sequences, config_.model.context + 1, tokens_.size(),
                offsets.data());
  return offsets;
}

namespace {

// Tokens and targets of some sequences: (rows, T) each.
struct Rows {
  Rows(const TokenSource& source, std::span<const int64_t> offsets, int64_t T)
      : tokens(offsets.size() * static_cast<size_t>(T)), targets(tokens.size()) {
    std::vector<int32_t> row(static_cast<size_t>(T + 1));
    for (size_t n = 0; n < offsets.size(); ++n) {
      source.read(offsets[n], T + 1, row.data());
      std::copy_n(row.begin(), T, tokens.begin() + static_cast<std::ptrdiff_t>(n) * T);
      std::copy_n(row.begin() + 1, T, targets.begin() + static_cast<std::ptrdiff_t>(n) * T);
    }
    batch = {static_cast<int64_t>(offsets.size()), T, tokens, targets};
  }
  std::vector<int32_t> tokens, targets;
  Batch batch{};
};

}  // namespace

double Trainer::compute_gradients(const std::vector<int64_t>& offsets, const StepContext& context) {
  model_->zero_gradients();
  const auto rows = static_cast<size_t>(config_.sequences / config_.accumulate);
  double loss = 0;
  for (int64_t part = 0; part < config_.accumulate; ++part) {
    const Rows some(tokens_, std::span(offsets).subspan(static_cast<size_t>(part) * rows, rows),
                    config_.model.context);
    StepContext of_part = context;
    of_part.first_sequence = part * static_cast<int64_t>(rows);
    if (part > 0) of_part.capture_sequences = 0;  // captures are of the first part
    loss += model_->forward_backward(some.batch, 1.0f / static_cast<float>(config_.accumulate), of_part);
  }
  return loss / static_cast<double>(config_.accumulate);
}

double Trainer::validation_loss() {
  double loss = 0;
  std::vector<int64_t> offsets(static_cast<size_t>(config_.sequences / config_.accumulate));
  for (int64_t batch = 0; batch < config_.validation_batches; ++batch) {
    batch_offsets(kValidationSeed, batch, static_cast<int64_t>(offsets.size()), config_.model.context + 1,
                  validation_->size(), offsets.data());
    loss += model_->loss(Rows(*validation_, offsets, config_.model.context).batch);
  }
  return loss / static_cast<double>(config_.validation_batches);
}

StepReport Trainer::step() {
  require(!done(), "[train] expected a run with steps left, this one is over at step {}", next_step_);
  const auto began = std::chrono::steady_clock::now();
  follow_plan();
  StepReport report;
  report.step = next_step_;
  report.lr = config_.schedule.at(next_step_);
  StepContext context;
  context.step = static_cast<uint32_t>(next_step_);
  const bool facts = config_.facts_every > 0 && next_step_ % config_.facts_every == 0;
  context.score_facts = facts;
  if (watcher_) watcher_->prepare(next_step_, context);
  const std::vector<int64_t> offsets = offsets_of(next_step_);
  batches_->append(offsets);
  report.loss = compute_gradients(offsets, context);
  Json seen = Json::object();
  if (watcher_) watcher_->see(next_step_, report.loss, *model_, seen);
  const StepNorms norms = optimizer_->step(*model_, report.lr);
  report.gradient_norm = norms.gradient;
  report.applied = norms.applied;
  if (config_.model.qk_clip > 0 && norms.applied) model_->apply_qk_clip();
  ++next_step_;
  finding_ = watch_.see(report.step, report.loss);
  if (!finding_ && !norms.applied)
    finding_ = Finding{report.step, "not_finite",
                       fmt::format("the gradient's norm at step {} is {}", report.step, norms.gradient)};
  if (config_.validate_every > 0 && next_step_ % config_.validate_every == 0)
    report.validation_loss = validation_loss();
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  record(report, facts, std::move(seen));
  if (finding_) {
    const Json found = {
        {"schema", kMetricsSchema},
        {"findings",
         Json::array({{{"step", finding_->step}, {"kind", finding_->kind}, {"words", finding_->words}}})}};
    write_whole_file(folder_ / "findings.json", found.dump(2) + "\n");
  }
  const bool due = config_.checkpoint_every > 0 && next_step_ % config_.checkpoint_every == 0;
  if (due || done()) save();
  return report;
}

void Trainer::record(const StepReport& report, bool facts, Json line) {
  const double rate = static_cast<double>(config_.sequences * config_.model.context) / report.seconds;
  line["step"] = report.step;
  line["loss"] = report.loss;
  line["gradient_norm"] = report.gradient_norm;
  line["lr"] = report.lr;
  line["tokens_per_second"] = rate;
  if (report.step == 0) line["schema"] = kMetricsSchema;
  if (!std::exchange(backend_recorded_, true)) line["backend"] = name(config_.backend);
  if (report.validation_loss) line["validation_loss"] = *report.validation_loss;
  std::vector<Scalar> scalars = {{"train/loss", static_cast<float>(report.loss)},
                                 {"train/gradient_norm", static_cast<float>(report.gradient_norm)},
                                 {"train/lr", static_cast<float>(report.lr)},
                                 {"train/tokens_per_second", static_cast<float>(rate)}};
  if (report.validation_loss)
    scalars.push_back({"validation/loss", static_cast<float>(*report.validation_loss)});
  if (facts) {
    // (L, H) each
    Json score = Json::array(), mean = Json::array(), lse = Json::array(), largest_lse = Json::array();
    const auto H = static_cast<size_t>(config_.model.heads);
    for (size_t layer = 0; layer < static_cast<size_t>(config_.model.layers); ++layer) {
      Json of_layer[4] = {Json::array(), Json::array(), Json::array(), Json::array()};
      float worst_score = 0, worst_mean = 0;
      for (size_t head = 0; head < H; ++head) {
        const HeadFacts& f = model_->facts()[layer * H + head];
        of_layer[0].push_back(f.largest_score);
        of_layer[1].push_back(f.largest_row_mean);
        of_layer[2].push_back(f.mean_lse);
        of_layer[3].push_back(f.largest_lse);
        worst_score = std::max(worst_score, f.largest_score);
        worst_mean = std::max(worst_mean, f.largest_row_mean);
      }
      score.push_back(std::move(of_layer[0]));
      mean.push_back(std::move(of_layer[1]));
      lse.push_back(std::move(of_layer[2]));
      largest_lse.push_back(std::move(of_layer[3]));
      scalars.push_back({fmt::format("largest_score/layer {}", layer), worst_score});
      scalars.push_back({fmt::format("largest_row_mean/layer {}", layer), worst_mean});
    }
    line["largest_score"] = std::move(score);
    line["largest_row_mean"] = std::move(mean);
    line["mean_lse"] = std::move(lse);
    line["largest_lse"] = std::move(largest_lse);
  }
  metrics_->write(line);
  events_->write(report.step, scalars);
}

void Trainer::save() {
  if (saved_step_ == next_step_) return;
  metrics_->sync();
  batches_->sync();
  const fs::path folder = folder_ / "checkpoints";
  save_checkpoint(folder, next_step_, *model_, *optimizer_);
  saved_step_ = next_step_;
  std::vector<Checkpoint> ring = find_checkpoints(folder);
  std::erase_if(
      ring, [&](const Checkpoint& c) { return config_.keep_every > 0 && c.step % config_.keep_every == 0; });
  const auto spare =
      static_cast<std::ptrdiff_t>(ring.size()) - static_cast<std::ptrdiff_t>(config_.checkpoints_kept);
  for (std::ptrdiff_t n = 0; n < spare; ++n) {
    // Under the name of something unfinished first: half of a checkpoint must not look like one.
    const fs::path& old = ring[static_cast<size_t>(n)].folder;
    const fs::path dying = old.parent_path() / ("." + old.filename().string() + ".partial");
    std::error_code error;
    fs::rename(old, dying, error);
    if (!error) fs::remove_all(dying, error);
  }
}

}  // namespace evenkeel

#include "training/trainer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/error.h"
#include "base/whole_file.h"
#include "model/model_folder.h"
#include "training/device_ranks.h"
#include "training/head_facts.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// Batches for validation are drawn from a stream of their own, the same ones every time.
constexpr uint64_t kValidationSeed = 0x76616c6964617465;

const fs::path& made_folder(const fs::path& folder) {
  std::error_code error;
  refuse_link(folder / "checkpoints", "a folder");  // old checkpoints are removed from it, too
  fs::create_directories(folder / "checkpoints", error);
  require_data(!error, "{}: cannot be made: {}", folder.string(), error.message());
  return folder;
}

std::shared_ptr<Ranks> or_alone(std::shared_ptr<Ranks> ranks) {
  return ranks ? std::move(ranks) : std::make_shared<Ranks>();
}

// Each rank has an equal share of the parts, and the share is a whole branch of the tree over them.
void check_share(const RunConfig& config, const Ranks& ranks) {
  const int64_t size = ranks.size();
  require((size & (size - 1)) == 0 && config.accumulate % size == 0,
          "[train] expected a number of ranks that is a power of two and divides the {} parts of a step "
          "(accumulate), got {} ranks",
          config.accumulate, size);
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

std::unique_ptr<Trainer> Trainer::start(const fs::path& folder, const RunConfig& given,
                                        std::shared_ptr<Ranks> ranks) {
  ranks = or_alone(std::move(ranks));
  RunConfig config = given;
  config.accumulate = std::max<int64_t>(config.accumulate, ranks->size());
  validate(config);
  check_share(config, *ranks);
  std::error_code error;
  require_data(
      !ranks->first() || !fs::exists(folder, error) || fs::is_empty(folder, error),
      "{}: expected a new or an empty folder for the run, found files in it; --resume continues a run",
      folder.string());
  take_device(ranks->launch());
  BackendChoice choice = choose_backend(config.backend, cuda_device());
  config.backend = choice.backend;
  return std::unique_ptr<Trainer>(
      new Trainer(folder, config, std::move(choice.why), /*fresh=*/true, std::move(ranks)));
}

namespace {

// The run's length becomes `steps`. The past must stay what it was: learning rates of steps that are done included.
void change_length(RunConfig& config, int64_t steps, const fs::path& folder) {
  Schedule longer = config.schedule;
  longer.steps = steps;
  validate(longer);
  const std::vector<Checkpoint> checkpoints = find_checkpoints(folder / "checkpoints");
  const int64_t done = checkpoints.empty() ? 0 : checkpoints.back().step;
  require(steps >= done,
          "[train] schedule.steps (--steps): expected at least the {} steps that are done, found {}", done,
          steps);
  for (int64_t step = 0; step < done; ++step)
    require(
        config.schedule.at(step) == longer.at(step),
        "[train] schedule.steps (--steps): expected {} as the run began: with {}, the {} course would have "
        "given "
        "step {}, which is done, another learning rate; --branch makes a new run of an earlier checkpoint",
        config.schedule.steps, steps, name(config.schedule.course), step);
  config.schedule = longer;
}

}  // namespace

std::unique_ptr<Trainer> Trainer::resume(const fs::path& folder, std::optional<Backend> backend,
                                         std::shared_ptr<Ranks> ranks, std::optional<int64_t> steps) {
  ranks = or_alone(std::move(ranks));
  RunConfig config;
  if (ranks->first()) config = config_of_own_run(folder);
  const int64_t planned = config.schedule.steps;
  if (steps && ranks->first()) change_length(config, *steps, folder);
  const std::string text = ranks->broadcast(to_toml(to_toml_table(config)));
  if (!ranks->first()) read_run_config(parse_toml(text, "config.toml of rank 0"), config);
  validate(config);
  check_share(config, *ranks);
  take_device(ranks->launch());
  const CudaDevice device = cuda_device();
  require_data(backend || config.backend != Backend::cuda || device.present,
               "{}: expected a GPU, as this run is on the backend cuda, found none ({}); --backend cpu goes "
               "on without "
               "one, with other bits",
               folder.string(), device.why);
  BackendChoice choice = choose_backend(backend.value_or(config.backend), device);
  const bool changed =
      ranks->first() && (config.backend != choice.backend || config.schedule.steps != planned);
  config.backend = choice.backend;
  std::unique_ptr<Trainer> trainer(
      new Trainer(folder, config, std::move(choice.why), /*fresh=*/false, std::move(ranks)));
  // Behind the lock of the folder, which the trainer holds.
  if (changed) write_config_of_run(folder, config);
  return trainer;
}

Trainer::Trainer(const fs::path& folder, const RunConfig& config, std::string backend_why, bool fresh,
                 std::shared_ptr<Ranks> ranks)
    : ranks_(std::move(ranks)),
      folder_(folder),
      config_(config),
      backend_why_(std::move(backend_why)),
      model_(make_model(config.backend, config.model, config.seed)),
      optimizer_(make_optimizer(config.backend, config.optimizer, model_->table(),
                                config.shard_optimizer ? ranks_.get() : nullptr)),
      tokens_(TokenSource::open(config.data)),
      reader_(tokens_, config.model.context),
      validation_(config.validation.empty() ? TokenSource::open_validation(config.data)
                                            : std::optional(TokenSource::open(config.validation))),
      watch_(config.divergence),
      device_memory_(config.backend == Backend::cuda ? make_device_memory(model_->stream()) : nullptr) {
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

  check_data(fresh);
  if (config.backend == Backend::cuda && (config.model.sinks || !alibi_slopes(config.model).empty()))
    notes_.push_back(
        "ties and leaks of rows are not recorded (NaN): no GPU kernel returns them with sinks or slopes; "
        "--backend cpu does");
  if (ranks_->size() > 1) {
    ranks_->agree("settings and tokens", description());
    if (device_memory_) ranks_->use_device_link(connect_nccl(*ranks_, model_->stream(), way_of_sums_));
  }
  if (ranks_->first()) made_folder(folder_);
  if (!fresh) go_on();
  if (saved_step_ < 0 && !config_.weights.empty()) load_model_folder(config_.weights, *model_);
  follow_plan();
  if (!ranks_->first()) return;
  if (saved_step_ >= 0 && !given_batches_) check_batches(shape);
  // Holds the lock of the folder: a second trainer is refused here, before anything is touched.
  metrics_ = std::make_unique<MetricsWriter>(folder_, kept_metrics_);
  if (fresh) write_config_of_run(folder_, config_);
  batches_ = std::make_unique<BatchRecorder>(folder_ / "batches.bin", shape, next_step_);
  events_ = std::make_unique<TensorboardWriter>(folder_, fresh ? std::nullopt : std::optional(next_step_));
  remove_findings(folder_);
}

Trainer::~Trainer() { ranks_->use_device_link(nullptr); }  // which works on the model's stream

// A run continues with the tokens that it was started with, or its bits would be others.
void Trainer::check_data(bool fresh) {
  check_tokens(fresh, tokens_, config_.data, "data.digest", config_.data_digest);
  if (config_.validate_every > 0)
    check_tokens(fresh, *validation_, config_.validation.empty() ? config_.data : config_.validation,
                 "data.validation_digest", config_.validation_digest);
}

void Trainer::check_tokens(bool fresh, const TokenSource& tokens, const std::string& path,
                           const char* setting, std::string& digest) {
  if (digest.empty()) {
    if (fresh)
      digest = tokens.digest();
    else
      notes_.push_back(
          fmt::format("its config.toml has no {}: whether the text is the same is not known", setting));
    return;
  }
  const std::string found = tokens.digest();
  require_data(found == digest,
               "{}: expected the tokens that the run was started with ({} = {:.16}... in its config.toml), "
               "found {} others (digest {:.16}...): the data has changed since",
               path, setting, digest, tokens.size(), found);
}

// What all ranks must have alike.
std::string Trainer::description() const {
  std::string text = to_toml(to_toml_table(config_));
  for (const TokenSource* source : {&tokens_, validation_ ? &*validation_ : nullptr})
    if (source)
      text += fmt::format("{} tokens, vocabulary {}, digest {}\n", source->size(), source->vocabulary(),
                          source->digest());
  if (given_batches_) {
    uint64_t digest = 0;
    for (int64_t step = 0; step < config_.schedule.steps; ++step)
      for (int64_t offset : given_batches_->offsets(step))
        digest = digest * 31 + static_cast<uint64_t>(offset);
    text += fmt::format("batches of digest {:016x}\n", digest);
  }
  return text;
}

// From the newest checkpoint, if there is one. Rank 0 reads and sends it to the others.
void Trainer::go_on() {
  TrainingState state;
  std::vector<double> losses;  // of the steps before, for the watch
  if (ranks_->first()) {
    remove_leftovers(folder_ / "checkpoints");
    if (const std::vector<Checkpoint> checkpoints = find_checkpoints(folder_ / "checkpoints");
        !checkpoints.empty()) {
      state = load_checkpoint(checkpoints.back(), model_->table());
      next_step_ = checkpoints.back().step;
      if (!state.verified)
        notes_.push_back("its checkpoint has no checksums (an older version wrote it): not verified");
    }
    std::error_code error;
    if (fs::exists(record_path(folder_, RecordFile::metrics), error)) {
      const Metrics before = read_metrics(folder_);
      for (size_t n = 0; n < before.steps.size() && before.steps[n] < next_step_; ++n)
        kept_metrics_ = before.ends[n];
      for (size_t n = 0; n < before.loss.steps.size() && before.loss.steps[n] < next_step_; ++n)
        losses.push_back(before.loss.values[n]);
    }
  }
  const double counts[] = {static_cast<double>(next_step_), static_cast<double>(state.applied),
                           static_cast<double>(losses.size()), state.parameters.empty() ? 0.0 : 1.0};
  const std::vector<double> told = ranks_->gather(counts);  // rank 0's come first
  next_step_ = static_cast<int64_t>(told[0]);
  std::string bytes(losses.size() * sizeof(double), '\0');
  if (!losses.empty()) std::memcpy(bytes.data(), losses.data(), bytes.size());
  bytes = ranks_->broadcast(bytes);
  losses.resize(static_cast<size_t>(told[2]));
  if (!losses.empty()) std::memcpy(losses.data(), bytes.data(), bytes.size());
  for (double loss : losses) watch_.see(next_step_, loss);
  if (told[3] == 0) return;
  saved_step_ = next_step_;
  for (std::vector<float>* values : {&state.parameters, &state.first, &state.second}) {
    values->resize(static_cast<size_t>(model_->table().size()));
    ranks_->broadcast(*values);
  }
  optimizer_->write_state(state.first, state.second, static_cast<int64_t>(told[1]));
  model_->write_parameters(state.parameters);
}

// A run goes on with the batches of its seed: where those that it recorded are others, it would be two runs in one. From its
// oldest checkpoint on, since before it a branch has another run's.
void Trainer::check_batches(const BatchShape& shape) const {
  const BatchRecord record(folder_ / "batches.bin");
  if (record.shape() == shape)  // else BatchRecorder says what is another
    check_drawn(record, config_.seed, find_checkpoints(folder_ / "checkpoints").front().step, record.steps());
}

void Trainer::follow_plan() {
  std::string text = config_.plan_at(next_step_);
  if (text == plan_) return;
  model_->set_plan(ScopedPlan::parse(text));
  plan_ = std::move(text);
}

namespace {

void add_change(RunConfig& config, int64_t step, const std::string& clauses) {
  const auto later = std::find_if(config.changes.begin(), config.changes.end(),
                                  [&](const PlanChange& change) { return change.step > step; });
  config.changes.insert(later, {step, clauses});
  validate(config);
}

}  // namespace

void Trainer::change_plan(const std::string& clauses) {
  require(ranks_->size() == 1, "[train] expected one rank where the plan changes on the way, got {}",
          ranks_->size());
  add_change(config_, next_step_, clauses);
  write_config_of_run(folder_, config_);
}

void Trainer::roll_back(const fs::path& folder, int64_t step, const std::string& clauses) {
  RunConfig config = config_of_run(folder);
  const std::vector<Checkpoint> checkpoints = find_checkpoints(folder / "checkpoints");
  require_data(std::any_of(checkpoints.begin(), checkpoints.end(),
                           [&](const Checkpoint& c) { return c.step == step; }),
               "{}: expected a checkpoint of step {} to roll back to, found none", folder.string(), step);
  add_change(config, step, clauses);
  // The plan first: killed in between, the run goes on from where it was with the clauses in force.
  write_config_of_run(folder, config);
  for (auto c = checkpoints.rbegin(); c != checkpoints.rend() && c->step > step; ++c)
    remove_whole_folder(c->folder);
}

std::vector<int64_t> Trainer::offsets_of(int64_t step) const {
  if (given_batches_) return given_batches_->offsets(step);
  std::vector<int64_t> offsets(static_cast<size_t>(config_.sequences));
  batch_offsets(config_.seed, step, config_.sequences, config_.model.context + 1, tokens_.size(),
                offsets.data());
  return offsets;
}

namespace {

bool asks_for_facts(const StepContext& context) {
  return context.score_facts || context.tie_facts || context.residual_facts;
}

}  // namespace

// Reads in the background what this rank computes next. That is part `part` of the step with these offsets, or its first
// part of the next step where that part is no longer this rank's.
void Trainer::read_ahead(const std::vector<int64_t>& offsets, int64_t part) {
  const int64_t share = config_.accumulate / ranks_->size(), rows = config_.sequences / config_.accumulate;
  const int64_t first = ranks_->rank() * share;
  const bool same_step = part < first + share;
  if (!same_step && next_step_ + 1 >= config_.schedule.steps) return;
  const std::vector<int64_t> of_step = same_step ? offsets : offsets_of(next_step_ + 1);
  const auto begin = of_step.begin() + (same_step ? part : first) * rows;
  reader_.read_ahead({begin, begin + rows});
}

// The gradients of parts [first, first + count), added by halves, in the model's buffer. The results of each part are
// appended to `told` in order: its loss and, where asked for, the facts of every head.
void Trainer::add_parts(const std::vector<int64_t>& offsets, const StepContext& context, int64_t first,
                        int64_t count, std::vector<double>& told) {
  if (count == 1) {
    const auto rows = static_cast<size_t>(config_.sequences / config_.accumulate);
    const Batch batch = reader_.take(std::span(offsets).subspan(static_cast<size_t>(first) * rows, rows));
    read_ahead(offsets, first + 1);
    StepContext of_part = context;
    of_part.first_sequence = first * static_cast<int64_t>(rows);
    if (first > 0) of_part.capture_sequences = 0;  // captures are of the first part
    model_->zero_gradients();
    told.push_back(model_->forward_backward(batch, 1.0f / static_cast<float>(config_.accumulate), of_part));
    if (asks_for_facts(context))
      for (const HeadFacts& facts : model_->facts()) append_numbers(facts, told);
    return;
  }
  const int64_t half = count / 2, size = model_->table().size();
  add_parts(offsets, context, first, half, told);
  // One buffer a level is enough: what waits there is taken up before its level waits again.
  const auto level = static_cast<size_t>(std::bit_width(static_cast<uint64_t>(count - 1)) - 1);
  if (level >= waiting_.size()) waiting_.resize(level + 1);
  if (!waiting_[level]) waiting_[level] = memory().make(size);
  memory().copy(waiting_[level].get(), model_->gradients(), size);
  add_parts(offsets, context, first + half, count - half, told);
  memory().add(model_->gradients(), waiting_[level].get(), size);
}

// Sets the report's loss and stop (which comes in as this rank's own), and leaves in the model the gradients of the
// whole step (sharded: of this rank's slice) and its facts.
void Trainer::compute_gradients(const std::vector<int64_t>& offsets, const StepContext& context,
                                StepReport& report) {
  const int64_t parts = config_.accumulate, share = parts / ranks_->size();
  std::vector<double> told = {report.stop ? 1.0 : 0.0};
  add_parts(offsets, context, ranks_->rank() * share, share, told);
  const size_t of_rank = told.size(), of_part = (of_rank - 1) / static_cast<size_t>(share);
  told = ranks_->gather(told);
  std::vector<const double*> of_parts;
  double loss = 0;
  for (size_t rank = 0; rank < told.size() / of_rank; ++rank) {
    const double* const numbers = told.data() + rank * of_rank;
    report.stop = report.stop || numbers[0] != 0;
    for (size_t part = 0; part < static_cast<size_t>(share); ++part) {
      of_parts.push_back(numbers + 1 + part * of_part);
      loss += *of_parts.back();
    }
  }
  report.loss = loss / static_cast<double>(parts);
  if (asks_for_facts(context) && parts > 1) {
    std::vector<HeadFacts> facts;
    for (const double*& numbers : of_parts) ++numbers;  // behind the loss
    while (facts.size() < model_->facts().size()) {
      facts.push_back(combined_facts(of_parts));
      for (const double*& numbers : of_parts) numbers += kHeadFactCount;
    }
    model_->set_facts(std::move(facts));
  }
  if (config_.shard_optimizer)
    ranks_->sum_slices(memory(), model_->gradients(), model_->table().size());
  else
    ranks_->sum(memory(), model_->gradients(), model_->table().size());
}

double Trainer::validation_loss() {
  std::vector<int64_t> offsets(static_cast<size_t>(config_.sequences / config_.accumulate));
  // Dealt out one by one, added in their order.
  const int64_t size = ranks_->size(), share = (config_.validation_batches + size - 1) / size;
  std::vector<double> losses(static_cast<size_t>(share));
  Rows rows;
  for (int64_t batch = ranks_->rank(); batch < config_.validation_batches; batch += size) {
    batch_offsets(kValidationSeed, batch, static_cast<int64_t>(offsets.size()), config_.model.context + 1,
                  validation_->size(), offsets.data());
    rows.read(*validation_, offsets, config_.model.context);
    losses[static_cast<size_t>(batch / size)] = model_->loss(rows.batch());
  }
  losses = ranks_->gather(losses);  // (size, share)
  double loss = 0;
  for (int64_t batch = 0; batch < config_.validation_batches; ++batch)
    loss += losses[static_cast<size_t>(batch % size * share + batch / size)];
  return loss / static_cast<double>(config_.validation_batches);
}

StepReport Trainer::step(bool stop_asked) {
  require(!done(), "[train] expected a run with steps left, this one is over at step {}", next_step_);
  const auto began = std::chrono::steady_clock::now();
  follow_plan();
  StepReport report;
  report.step = next_step_;
  report.stop = stop_asked;
  report.lr = config_.schedule.at(next_step_);
  StepContext context;
  context.step = static_cast<uint32_t>(next_step_);
  const bool facts = config_.facts_every > 0 && next_step_ % config_.facts_every == 0;
  context.score_facts = facts;
  if (watcher_) watcher_->prepare(next_step_, context);
  const std::vector<int64_t> offsets = offsets_of(next_step_);
  if (batches_) batches_->append(offsets);
  compute_gradients(offsets, context, report);
  Json seen = Json::object();
  recording_.wait();  // for the step before
  if (watcher_ && ranks_->first()) watcher_->see(next_step_, report.loss, *model_, seen);
  const StepNorms norms = optimizer_->step(*model_, report.lr);
  if (config_.shard_optimizer && norms.applied && ranks_->size() > 1) {
    ranks_->share_slices(memory(), model_->parameters(), model_->table().size());
    model_->parameters_changed();
  }
  report.gradient_norm = norms.gradient;
  report.applied = norms.applied;
  if (config_.model.qk_clip > 0 && norms.applied) model_->apply_qk_clip();
  ++next_step_;
  finding_ = watch_.see(report.step, report.loss);
  if (!finding_ && !norms.applied)
    finding_ =
        Finding{report.step, "not_finite",
                // A NaN may have a sign, which says nothing.
                fmt::format("the gradient's norm at step {} is {}", report.step, std::fabs(norms.gradient))};
  if (config_.validate_every > 0 && next_step_ % config_.validate_every == 0)
    report.validation_loss = validation_loss();
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  if (ranks_->first())
    recording_.start([this, report, seen = std::move(seen),
                      told = facts ? model_->facts() : std::vector<HeadFacts>()]() mutable {
      record(report, told, std::move(seen));
    });
  if (finding_ && ranks_->first()) write_finding(folder_, *finding_);
  const auto due = [&](int64_t every) { return every > 0 && next_step_ % every == 0; };
  if (due(config_.checkpoint_every) || due(config_.keep_every) || done()) save();
  return report;
}

void Trainer::set_watcher(StepWatcher* watcher) {
  recording_.settle();
  watcher_ = watcher;
}

namespace {

// Of every layer the largest over its heads, for TensorBoard.
void add_layers(std::vector<Scalar>& scalars, HeadFact fact, int64_t H, const std::vector<double>& values) {
  for (size_t n = 0; n < values.size(); n += static_cast<size_t>(H)) {
    double worst = 0;
    for (size_t head = 0; head < static_cast<size_t>(H); ++head) worst = std::max(worst, values[n + head]);
    scalars.push_back(
        {fmt::format("{}/layer {}", name(fact), n / static_cast<size_t>(H)), static_cast<float>(worst)});
  }
}

}  // namespace

void Trainer::record(const StepReport& report, const std::vector<HeadFacts>& facts, Json line) {
  if (watcher_) watcher_->tell(report.step, line);
  const double rate = static_cast<double>(config_.sequences * config_.model.context) / report.seconds;
  std::vector<Scalar> scalars;
  const auto add = [&](const char* field, const char* tag, double value) {
    add_number(line, field, value);
    scalars.push_back({tag, static_cast<float>(value)});
  };
  line["step"] = report.step;
  add("loss", "train/loss", report.loss);
  add("gradient_norm", "train/gradient_norm", report.gradient_norm);
  add("lr", "train/lr", report.lr);
  add("tokens_per_second", "train/tokens_per_second", rate);
  if (report.step == 0) line["schema"] = kRecordSchema;
  if (!std::exchange(backend_recorded_, true)) line["backend"] = name(config_.backend);
  if (report.validation_loss) add("validation_loss", "validation/loss", *report.validation_loss);
  if (!facts.empty())
    for (const HeadFact fact : {HeadFact::largest_score, HeadFact::offset, HeadFact::mean_lse,
                                HeadFact::largest_lse, HeadFact::key_share}) {
      const std::vector<double> values = values_of(facts, fact);
      add_fact(line, fact, config_.model.layers, config_.model.heads, values, /*every_digit=*/true);
      if (fact == HeadFact::largest_score || fact == HeadFact::offset)
        add_layers(scalars, fact, config_.model.heads, values);
    }
  metrics_->write(line);
  events_->write(report.step, scalars);
}

// On rank 0; on the others, where states are sharded, what they contribute.
TrainingState Trainer::collect_state() {
  TrainingState state;
  const auto size = static_cast<size_t>(model_->table().size());
  state.first.resize(size);
  state.second.resize(size);
  optimizer_->read_state(state.first, state.second, state.applied);
  if (config_.shard_optimizer)
    for (std::vector<float>* values : {&state.first, &state.second})
      ranks_->share_slices(host_memory(), values->data(), model_->table().size());
  if (!ranks_->first()) return state;
  state.parameters.resize(size);
  model_->read_parameters(state.parameters);
  return state;
}

void Trainer::save() {
  recording_.wait();
  if (saved_step_ == next_step_) return;
  saved_step_ = next_step_;
  if (!ranks_->first()) {
    if (config_.shard_optimizer) collect_state();
    return;
  }
  metrics_->sync();
  batches_->sync();
  const fs::path folder = folder_ / "checkpoints";
  save_checkpoint(folder, next_step_, model_->table(), collect_state());
  std::vector<Checkpoint> ring = find_checkpoints(folder);
  std::erase_if(
      ring, [&](const Checkpoint& c) { return config_.keep_every > 0 && c.step % config_.keep_every == 0; });
  const auto spare =
      static_cast<std::ptrdiff_t>(ring.size()) - static_cast<std::ptrdiff_t>(config_.checkpoints_kept);
  for (std::ptrdiff_t n = 0; n < spare; ++n) remove_whole_folder(ring[static_cast<size_t>(n)].folder);
}

}  // namespace evenkeel

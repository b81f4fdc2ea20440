#include "diagnosis/capture_run.h"

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "training/replay.h"

namespace evenkeel {
namespace {

// Asks for captures at one step and takes them.
class Taker : public StepWatcher {
 public:
  Taker(std::string source, int64_t step, const CaptureRequest& request)
      : source_(std::move(source)), step_(step), request_(request) {}
  void prepare(int64_t step, StepContext& context) override {
    if (step != step_) return;
    context.capture_sequences = request_.sequences;
    context.capture_rows = request_.rows;
    context.capture_layer = request_.layer;
  }
  void see(int64_t step, double loss, Model& model, nlohmann::json&) override {
    if (step != step_) return;
    std::vector<float> parameters(static_cast<size_t>(model.table().size()));
    model.read_parameters(parameters);
    for (int64_t l = 0; l < model.config().layers; ++l) {
      if (request_.layer >= 0 && l != request_.layer) continue;
      taken.push_back(
          capture_of(model.captured(l), model.config(), model.table(), parameters, l, request_.heads));
      taken.back().source = source_;
      taken.back().step = step;
      taken.back().loss = loss;
    }
  }
  std::vector<Capture> taken;

 private:
  const std::string source_;
  const int64_t step_;
  const CaptureRequest& request_;
};

}  // namespace

std::vector<Capture> capture_run(const std::filesystem::path& run, int64_t step,
                                 const CaptureRequest& request) {
  Replay replay(run, step, request.backend);
  const ModelConfig& model = replay.trainer().config().model;
  require(request.layer < model.layers, "--layer: expected a layer from 0 to {}, got {}", model.layers - 1,
          request.layer);
  for (const int64_t h : request.heads)
    require(0 <= h && h < model.heads, "--heads: expected heads from 0 to {}, got {}", model.heads - 1, h);
  Taker taker(run.filename().string(), step, request);
  const ScopedWatcher watched(replay.trainer(), taker);
  const int64_t all = step + 1 - replay.trainer().next_step();
  int64_t done = 0;
  const auto tell = [&] {
    if (request.progress) request.progress(done, all);
  };
  tell();
  replay.run_to(step + 1, [&] {
    ++done;
    tell();
  });
  return std::move(taker.taken);
}

}  // namespace evenkeel

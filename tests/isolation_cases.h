// Small runs with a fault planted in them: a GPT-2 (or a Llama) of 3 layers and 2 heads on synthetic text. A step has 8 x 64 tokens, at a
// learning rate that a healthy run bears. Text, batches and sums are the same bits everywhere, so what is found is, too.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <functional>
#include <string>

#include "base/error.h"
#include "base/whole_file.h"
#include "model_families.h"
#include "sanitized.h"
#include "training/synth.h"
#include "training/trainer.h"

#define SKIP_LONG_RUNS() \
  if (kSanitized) GTEST_SKIP() << "the same numbers, ten times slower"

namespace evenkeel {

// A folder that goes when it goes.
class PlantedRun {
 public:
  PlantedRun() {
    static int count = 0;
    folder_ =
        std::filesystem::temp_directory_path() / fmt::format("evenkeel-planted-{}-{}", getpid(), count++);
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    config.model = model_preset("micro");
    config.model.heads = 2;
    config.model.width = 64;
    config.model.context = 64;
    config.seed = 3;
    config.sequences = 8;
    config.schedule.peak = 6e-3;
    config.schedule.warmup = 50;
    config.schedule.steps = 200;
    config.checkpoint_every = 50;
    config.checkpoints_kept = 20;
    config.facts_every = 5;
    config.divergence = 0;
    config.data = (folder_ / "text.txt").string();
    set_text(synthetic_text(/*seed=*/1, /*bytes=*/400'000));
  }
  ~PlantedRun() {
    std::error_code error;
    std::filesystem::remove_all(folder_, error);
  }
  PlantedRun(const PlantedRun&) = delete;
  PlantedRun& operator=(const PlantedRun&) = delete;

  // The same sizes with the other family's blocks, at a seed and a rate with which its drift shows early.
  PlantedRun& as_llama() {
    config.model = like_llama(config.model);
    config.seed = 1;
    config.schedule.peak = 9e-3;
    return *this;
  }
  void set_text(const std::string& text) const { write_whole_file(config.data, text); }
  // Trains; `watcher` may lay its hands on the model.
  void train(StepWatcher* watcher = nullptr) const {
    const auto trainer = Trainer::start(run(), config);
    trainer->set_watcher(watcher);
    while (!trainer->done()) trainer->step();
  }
  std::filesystem::path run() const { return folder_ / "run"; }

  RunConfig config;  // to be changed before train()

 private:
  std::filesystem::path folder_;
};

}  // namespace evenkeel

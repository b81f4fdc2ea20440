// `evenkeel export`: a checkpoint as a folder of Hugging Face's transformers.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/options.h"
#include "model/model_folder.h"
#include "training/checkpoint.h"
#include "training/run_config.h"

namespace evenkeel::cli {

int run_export(int argc, char** argv) {
  std::vector<std::string> words;
  std::string out;
  int64_t step = -1;
  bool json = false;
  Options options(
      "export RUN -o FOLDER [options]",
      "Writes the weights of a run's checkpoint as config.json and model.safetensors, in the form of\n"
      "Hugging Face's transformers. `train --weights FOLDER` reads such a folder, sharded ones too.",
      "export runs/a -o exported");
  options.words("RUN", words, 1, 1);
  options.value("-o", "FOLDER", "where it goes: a new folder", out);
  options.value("--step", "N", "of which step (default: the newest)", step, 0, int64_t{1} << 31);
  options.flag("--json", "what was written, as JSON", json);
  if (!options.parse(argc, argv)) return 0;
  require(!out.empty(), "expected -o FOLDER, got none");
  const RunConfig config = config_of_own_run(words[0]);
  const ParameterTable table(config.model);
  const std::vector<Checkpoint> checkpoints =
      find_checkpoints(std::filesystem::path(words[0]) / "checkpoints");
  const auto wanted = step < 0 ? checkpoints.end() - (checkpoints.empty() ? 0 : 1)
                               : std::find_if(checkpoints.begin(), checkpoints.end(),
                                              [&](const Checkpoint& c) { return c.step == step; });
  require_data(wanted != checkpoints.end(), "{}: expected a checkpoint{}, found none", words[0],
               step < 0 ? std::string() : fmt::format(" of step {}", step));
  std::error_code error;
  require_data(!std::filesystem::exists(out, error),
               "{}: expected the name of a new folder, found one that is there", out);
  save_model_folder(out, config.model, load_checkpoint(*wanted, table).parameters);
  if (json)
    fmt::print("{}\n",
               nlohmann::ordered_json{{"schema", 1}, {"folder", out}, {"step", wanted->step}}.dump(2));
  else
    fmt::print("{}: the weights of step {}, {:.1f} M parameters ({})\n", out, wanted->step,
               static_cast<double>(table.parameter_count()) * 1e-6, describe(config.model));
  return 0;
}

}  // namespace evenkeel::cli

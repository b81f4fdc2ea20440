// Models in the folders of Hugging Face's transformers: config.json, and model.safetensors or the shards that
// model.safetensors.index.json lists. Known are the model types gpt2, llama and qwen3.
//
// Nothing is guessed: a setting of config.json that would change what is computed and that a ModelConfig cannot say is
// a DataError that names it.
#pragma once

#include <filesystem>
#include <span>
#include <string>

#include "base/safetensors.h"
#include "model/model.h"

namespace evenkeel {

// The description of the model in a folder. `precision` follows the type that config.json names.
ModelConfig read_model_folder(const std::filesystem::path& folder);
// Its weights, in F32, F16 or BF16, for a model of that description. DataError: a tensor that is missing, or not as the
// model needs it.
void load_model_folder(const std::filesystem::path& folder, Model& model);

// A folder that transformers loads: config.json and model.safetensors in F32, written whole or not at all. The type is
// the one that can express the description. A bias that the type has and the model lacks is written as zeros.
// std::invalid_argument names what no type can express. parameters: (table.size()).
void save_model_folder(const std::filesystem::path& folder, const ModelConfig& config,
                       std::span<const float> parameters);

// The numbers of a stored tensor as FP32. DataError where it is not F32, F16 or BF16, or not so many. file: for messages.
void read_floats(const StoredTensor& tensor, const std::string& file, std::span<float> to);

}  // namespace evenkeel

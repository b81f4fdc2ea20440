#include "model/model_folder.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "base/json_text.h"
#include "base/sizes.h"
#include "base/whole_file.h"
#include "numerics/format.h"
#include "numerics/names.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

enum class Type { gpt2, llama, qwen3 };
constexpr std::string_view kTypeNames[] = {"gpt2", "llama", "qwen3"};

constexpr size_t kLargestJson = 1 << 24;  // bytes

Json read_json(const fs::path& file) {
  const std::string text = read_regular_file(file, kLargestJson);
  const Json json(try_parse_json(text));
  require_data(json.is_object(), "{}: expected a JSON object, found none that can be read", file.string());
  return json;
}

// --- config.json

// What config.json says, asked by key. A key that is missing or null has its default.
class Settings {
 public:
  explicit Settings(const fs::path& file) : file_(file.string()), json_(read_json(file)) {}

  int64_t count(const char* key, std::optional<int64_t> standard = {}) const {
    const Json* value = find(key);
    if (!value && standard) return *standard;
    require_data(value && value->is_number_integer() && value->get<int64_t>() >= 0,
                 "{}: {}: expected a whole number of 0 or more, found {}", file_, key, shown(value));
    return value->get<int64_t>();
  }
  float number(const char* key, double standard) const {
    const Json* value = find(key);
    if (!value) return static_cast<float>(standard);
    require_data(value->is_number(), "{}: {}: expected a number, found {}", file_, key, shown(value));
    return value->get<float>();
  }
  bool flag(const char* key, bool standard) const {
    const Json* value = find(key);
    if (!value) return standard;
    require_data(value->is_boolean(), "{}: {}: expected true or false, found {}", file_, key, shown(value));
    return value->get<bool>();
  }
  std::string text(const char* key, const char* standard) const {
    const Json* value = find(key);
    if (!value) return standard;
    require_data(value->is_string(), "{}: {}: expected text, found {}", file_, key, shown(value));
    return value->get<std::string>();
  }
  // A setting that can have one value alone here.
  template <class T>
  void expect(const char* key, const T& found, const std::vector<T>& possible) const {
    require_data(std::find(possible.begin(), possible.end(), found) != possible.end(),
                 "{}: {}: expected {}, found {}", file_, key, fmt::join(possible, " or "), found);
  }
  const Json* find(const char* key) const {
    const auto found = json_.find(key);
    return found == json_.end() || found->is_null() ? nullptr : &*found;
  }
  const std::string& file() const { return file_; }

 private:
  static std::string shown(const Json* value) { return value ? value->dump().substr(0, 80) : "nothing"; }
  std::string file_;
  Json json_;
};

Type type_of(const Settings& s) {
  const std::string found = s.text("model_type", "nothing");
  if (const auto type = value_named<Type>(found, kTypeNames)) return *type;
  throw DataError(fmt::format("{}: model_type: expected one of {}, found {}", s.file(),
                              fmt::join(kTypeNames, ", "), found));
}

ModelConfig gpt2_config(const Settings& s) {
  ModelConfig c;
  c.layers = s.count("n_layer", 12);
  c.heads = s.count("n_head", 12);
  c.width = s.count("n_embd", 768);
  c.context = s.count("n_positions", 1024);
  c.vocabulary = s.count("vocab_size", 50257);
  c.hidden = s.count("n_inner", 0);
  c.bias = c.norm_bias = true;
  c.tied_embeddings = s.flag("tie_word_embeddings", true);
  s.expect("layer_norm_epsilon", s.number("layer_norm_epsilon", c.norm_epsilon), {c.norm_epsilon});
  s.expect<std::string>("activation_function", s.text("activation_function", "gelu_new"),
                        {"gelu_new", "gelu_pytorch_tanh"});
  s.expect("scale_attn_weights", s.flag("scale_attn_weights", true), {true});
  s.expect("scale_attn_by_inverse_layer_idx", s.flag("scale_attn_by_inverse_layer_idx", false), {false});
  return c;
}

// The rotary base; older files have it by itself, newer ones with its kin. Scaled positions are not known here.
float rotary_base(const Settings& s) {
  double base = s.number("rope_theta", 10000);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const Json* kin = s.find(key);
    if (!kin) continue;
    const auto say = [&](const char* name) {
      return kin->is_object() && kin->contains(name) ? kin->at(name) : Json();
    };
    const Json kind = say("rope_type").is_null() ? say("type") : say("rope_type");
    require_data(kind.is_null() || kind == "default",
                 "{}: {}: expected rotary positions as they are, found {}", s.file(), key, kind.dump());
    if (const Json theta = say("rope_theta"); theta.is_number()) base = theta.get<double>();
    if (const Json part = say("partial_rotary_factor"); part.is_number())
      s.expect("partial_rotary_factor", part.get<double>(), {1.0});
  }
  s.expect("partial_rotary_factor", s.number("partial_rotary_factor", 1), {1.0f});
  return static_cast<float>(base);
}

ModelConfig llama_config(const Settings& s, Type type) {
  const bool qwen = type == Type::qwen3;
  ModelConfig c;
  c.norm = NormKind::rms_norm;
  c.positions = Positions::rotary;
  c.mlp = MlpKind::swiglu;
  c.layers = s.count("num_hidden_layers");
  c.heads = s.count("num_attention_heads");
  c.key_heads = s.count("num_key_value_heads", c.heads);
  c.width = s.count("hidden_size");
  c.head_features = s.count("head_dim", qwen ? 128 : 0);
  c.hidden = s.count("intermediate_size");
  c.context = s.count("max_position_embeddings");
  c.vocabulary = s.count("vocab_size");
  c.norm_epsilon = s.number("rms_norm_eps", 1e-6);
  c.rotary_base = rotary_base(s);
  c.qk_norm = qwen;
  c.tied_embeddings = s.flag("tie_word_embeddings", false);
  c.bias = s.flag("attention_bias", false);
  s.expect("mlp_bias", s.flag("mlp_bias", false), {c.bias});
  s.expect<std::string>("hidden_act", s.text("hidden_act", "silu"), {"silu", "swish"});
  s.expect("use_sliding_window", s.flag("use_sliding_window", false), {false});
  return c;
}

Json config_json(const ModelConfig& c, Type type) {
  Json j;
  j["model_type"] = kTypeNames[static_cast<size_t>(type)];
  j["vocab_size"] = c.vocabulary;
  j["tie_word_embeddings"] = c.tied_embeddings;
  j["torch_dtype"] = "float32";
  if (type == Type::gpt2) {
    j["architectures"] = {"GPT2LMHeadModel"};
    j["n_layer"] = c.layers, j["n_head"] = c.heads, j["n_embd"] = c.width, j["n_positions"] = c.context;
    j["n_inner"] = c.hidden_width();
    j["activation_function"] = "gelu_new";
    j["layer_norm_epsilon"] = c.norm_epsilon;
    return j;
  }
  j["architectures"] = {type == Type::llama ? "LlamaForCausalLM" : "Qwen3ForCausalLM"};
  j["num_hidden_layers"] = c.layers, j["num_attention_heads"] = c.heads;
  j["num_key_value_heads"] = c.key_head_count(), j["head_dim"] = c.head_size();
  j["hidden_size"] = c.width, j["intermediate_size"] = c.hidden_width();
  j["max_position_embeddings"] = c.context;
  j["rms_norm_eps"] = c.norm_epsilon;
  j["rope_theta"] = c.rotary_base;
  j["attention_bias"] = c.bias;
  if (type == Type::llama) j["mlp_bias"] = c.bias;
  j["hidden_act"] = "silu";
  return j;
}

// The type that can say a description.
Type type_for(const ModelConfig& c) {
  std::vector<std::string> lacks;
  const auto lack = [&](bool missing, std::string what) {
    if (missing) lacks.push_back(std::move(what));
  };
  lack(c.gated_attention, "gated_attention");
  lack(c.sinks, "sinks");
  lack(c.softcap > 0, "softcap");
  const bool llama = c.norm == NormKind::rms_norm;
  lack(c.positions != (llama ? Positions::rotary : Positions::learned),
       fmt::format("{} with {} positions", kNormNames[static_cast<size_t>(c.norm)],
                   kPositionNames[static_cast<size_t>(c.positions)]));
  lack(c.mlp != (llama ? MlpKind::swiglu : MlpKind::gelu),
       fmt::format("{} with {}", kNormNames[static_cast<size_t>(c.norm)],
                   kMlpNames[static_cast<size_t>(c.mlp)]));
  if (!llama) {
    lack(c.qk_norm, "qk_norm");
    lack(c.qkv_width() != 3 * c.width, "key heads or a head size of their own");
  } else {
    lack(c.qk_norm && c.bias, "qk_norm with biases");
  }
  require(lacks.empty(), "[model] expected a model of type {}, got one with {}", fmt::join(kTypeNames, ", "),
          fmt::join(lacks, ", "));
  return !llama ? Type::gpt2 : c.qk_norm ? Type::qwen3 : Type::llama;
}

// --- Tensors

// One of transformers' tensors as columns of one of ours.
struct Piece {
  std::string name;
  int64_t first, columns;  // of our (rows, columns); a vector is one row
  bool transposed;         // theirs is (columns, rows)
};

// "h.3.attn.c_attn.weight" in transformers' names for the types that keep linear layers as (out, in).
std::vector<Piece> llama_pieces(const ParameterTensor& t) {
  const int64_t columns = t.shape.back();
  if (t.name == "wte.weight") return {{"model.embed_tokens.weight", 0, columns, false}};
  if (t.name == "lm_head.weight") return {{"lm_head.weight", 0, columns, false}};
  if (t.name == "ln_f.weight") return {{"model.norm.weight", 0, columns, false}};
  const size_t dot = t.name.find('.', 2), last = t.name.rfind('.');
  const std::string layer = "model.layers." + t.name.substr(2, dot - 2) + ".",
                    inner = t.name.substr(dot + 1, last - dot - 1), kind = t.name.substr(last);
  static const std::map<std::string, std::string> kNames = {
      {"ln_1", "input_layernorm"},         {"ln_2", "post_attention_layernorm"},
      {"attn.q_norm", "self_attn.q_norm"}, {"attn.k_norm", "self_attn.k_norm"},
      {"attn.c_proj", "self_attn.o_proj"}, {"mlp.c_proj", "mlp.down_proj"}};
  const bool matrix = t.shape.size() == 2;
  if (const auto found = kNames.find(inner); found != kNames.end())
    return {{layer + found->second + kind, 0, columns, matrix}};
  const std::string folder = inner == "attn.c_attn" ? "self_attn." : "mlp.";
  const std::vector<std::string> parts = inner == "attn.c_attn" ? std::vector<std::string>{"q", "k", "v"}
                                                                : std::vector<std::string>{"gate", "up"};
  std::vector<Piece> pieces;
  for (const std::string& part : parts)
    pieces.push_back({layer + folder + part + "_proj" + kind, 0, 0, matrix});
  return pieces;
}

std::vector<Piece> pieces_of(const ModelConfig& c, Type type, const ParameterTensor& t) {
  if (type == Type::gpt2) return {{t.name, 0, t.shape.back(), false}};
  std::vector<Piece> pieces = llama_pieces(t);
  if (pieces.size() == 1) return pieces;
  // Side by side, for a weight and for its bias.
  const bool attention = pieces.size() == 3;
  int64_t first = 0;
  for (size_t n = 0; n < pieces.size(); ++n) {
    pieces[n].first = first;
    pieces[n].columns = !attention ? c.hidden_width() : n == 0 ? c.query_width() : c.key_width();
    first += pieces[n].columns;
  }
  return pieces;
}

std::vector<int64_t> shape_of(const Piece& piece, const ParameterTensor& t) {
  if (t.shape.size() == 1) return {piece.columns};
  if (piece.transposed) return {piece.columns, t.shape[0]};
  return {t.shape[0], piece.columns};
}

// ours (rows, stride) at its columns, theirs as it is kept. copy(ours, theirs) for every value.
template <class Copy>
void for_each_value(const Piece& piece, const ParameterTensor& t, Copy copy) {
  const int64_t rows = t.shape.size() == 1 ? 1 : t.shape[0], stride = t.shape.back();
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t n = 0; n < piece.columns; ++n)
      copy(at(t.offset + row * stride + piece.first + n),
           at(piece.transposed ? n * rows + row : row * piece.columns + n));
}

// The safetensors files of a folder, looked through by name.
class Shards {
 public:
  explicit Shards(const fs::path& folder) {
    const fs::path whole = folder / "model.safetensors", index = folder / "model.safetensors.index.json";
    std::error_code error;
    if (fs::exists(whole, error)) {
      files_.emplace_back(whole.string(), Safetensors(whole));
      return;
    }
    require_data(fs::exists(index, error),
                 "{}: expected model.safetensors or model.safetensors.index.json, found neither",
                 folder.string());
    const Json json = read_json(index);
    const auto map = json.find("weight_map");
    require_data(map != json.end() && map->is_object() && !map->empty(),
                 "{}: expected a weight_map with tensors, found none", index.string());
    std::set<std::string> names;
    for (const auto& [tensor, file] : map->items()) {
      require_data(
          file.is_string() && fs::path(file.get<std::string>()).filename() == file.get<std::string>(),
          "{}: {}: expected the name of a file in this folder, found {}", index.string(), tensor,
          file.dump());
      names.insert(file.get<std::string>());
    }
    for (const std::string& name : names)
      files_.emplace_back((folder / name).string(), Safetensors(folder / name));
  }

  // With or without the prefix under which a whole model keeps its body.
  std::pair<const StoredTensor*, const std::string*> find(const std::string& name) const {
    for (const std::string prefix : {"", "transformer."})
      for (const auto& [file, tensors] : files_)
        if (const StoredTensor* found = tensors.find(prefix + name)) return {found, &file};
    return {nullptr, nullptr};
  }

 private:
  std::vector<std::pair<std::string, Safetensors>> files_;
};

}  // namespace

void read_floats(const StoredTensor& tensor, const std::string& file, std::span<float> to) {
  if (tensor.type == element_type("F32")) return tensor.copy_to(to.data(), to.size());
  const bool half = tensor.type == element_type("F16");
  require_data(half || tensor.type == element_type("BF16"), "{}: {}: expected F32, F16 or BF16, found {}",
               file, tensor.name, tensor.type.name);
  std::vector<uint16_t> codes(to.size());
  tensor.copy_to(codes.data(), codes.size());
  for (size_t n = 0; n < codes.size(); ++n) to[n] = decode(half ? kFp16 : kBf16, codes[n]);
}

ModelConfig read_model_folder(const fs::path& folder) {
  const Settings settings(folder / "config.json");
  const Type type = type_of(settings);
  ModelConfig config = type == Type::gpt2 ? gpt2_config(settings) : llama_config(settings, type);
  const std::string kept = settings.text("torch_dtype", settings.text("dtype", "float32").c_str());
  config.precision = kept == "float32" ? LinearPrecision::fp32 : LinearPrecision::bf16;
  try {
    validate(config);
  } catch (const std::invalid_argument& error) {
    throw DataError(fmt::format("{}: {}", settings.file(), error.what()));
  }
  return config;
}

void load_model_folder(const fs::path& folder, Model& model) {
  const Type type = type_of(Settings(folder / "config.json"));
  const Shards shards(folder);
  std::vector<float> parameters(at(model.table().size())), theirs;
  for (const ParameterTensor& t : model.table().tensors())
    for (const Piece& piece : pieces_of(model.config(), type, t)) {
      const auto [stored, file] = shards.find(piece.name);
      require_data(stored, "{}: expected a tensor {}, found none", folder.string(), piece.name);
      const std::vector<int64_t> shape = shape_of(piece, t);
      require_data(std::equal(shape.begin(), shape.end(), stored->shape.begin(), stored->shape.end(),
                              [](int64_t a, uint64_t b) { return static_cast<uint64_t>(a) == b; }),
                   "{}: {}: expected the shape ({}), found ({})", *file, piece.name, fmt::join(shape, ", "),
                   fmt::join(stored->shape, ", "));
      theirs.resize(at(t.count() / t.shape.back() * piece.columns));
      read_floats(*stored, *file, theirs);
      for_each_value(piece, t, [&](size_t ours, size_t other) { parameters[ours] = theirs[other]; });
    }
  model.write_parameters(parameters);
}

void save_model_folder(const fs::path& folder, const ModelConfig& config, std::span<const float> parameters) {
  const Type type = type_for(config);
  const ParameterTable own(config);
  require(static_cast<int64_t>(parameters.size()) == own.size(), "[model] expected {} parameters, got {}",
          own.size(), parameters.size());
  // What the type has besides, as zeros.
  ModelConfig full = config;
  if (type == Type::gpt2) full.bias = full.norm_bias = true;
  const ParameterTable table(full);
  std::vector<TensorHeader> headers;
  for (const ParameterTensor& t : table.tensors())
    for (const Piece& piece : pieces_of(full, type, t)) {
      const std::vector<int64_t> shape = shape_of(piece, t);
      headers.push_back({piece.name, element_type("F32"), {shape.begin(), shape.end()}});
    }
  WholeFolderWriter writer(folder);
  SafetensorsWriter tensors(writer.folder() / "model.safetensors", headers, {{"format", "pt"}});
  for (const ParameterTensor& t : table.tensors()) {
    const ParameterTensor* const source = own.find(t.name);
    for (const Piece& piece : pieces_of(full, type, t)) {
      std::vector<float> theirs(at(t.count() / t.shape.back() * piece.columns));
      if (source)
        for_each_value(piece, *source, [&](size_t ours, size_t other) { theirs[other] = parameters[ours]; });
      tensors.append(piece.name, std::as_bytes(std::span(theirs)));
    }
  }
  tensors.commit();
  write_whole_file(writer.folder() / "config.json", config_json(config, type).dump(2) + "\n");
  writer.commit();
}

}  // namespace evenkeel

// What a model is made of, and where its parameters lie. Every architecture is such a description: nothing above
// src/model asks which one it is.
//
// One alphabet of sizes: C width, H heads of D features, L layers, V vocabulary, T tokens a sequence.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "attention/attention_problem.h"

namespace evenkeel {

// Of the linear layers: sums and master weights are FP32 in both.
//   fp32  nothing is rounded
//   bf16  operands of every product are rounded to BF16, forward and backward. So are the outputs that stay
//         within a block (q, k, v, the gate, the input of GELU, and the gradients of them, of O and of what
//         a LayerNorm gives), as in mixed-precision training. What is added to the residual stream and the
//         stream's own gradient are FP32. Logits are FP32 on the CPU; on the GPU they are BF16 as well, but
//         for those that logits() returns.
enum class LinearPrecision { fp32, bf16 };

enum class NormKind { layer_norm, rms_norm };
inline constexpr std::string_view kNormNames[] = {"layer_norm", "rms_norm"};

// How a token's place reaches attention.
//   learned        a vector for each place is added to the embedding
//   rotary         q and k of each head are turned by their place, features p and p + D / 2 together
//   rotary_pairs   the same, features 2 p and 2 p + 1 together
//   none           not at all: the causal mask alone tells places apart
//   alibi          each head's scores fall with the distance, by a slope of its own (alibi_slopes)
enum class Positions { learned, rotary, rotary_pairs, none, alibi };
inline constexpr std::string_view kPositionNames[] = {"learned", "rotary", "rotary_pairs", "none", "alibi"};

//   gelu     out(GELU(fc(x))), the tanh form
//   swiglu   out(silu(gate) up), with gate and up side by side in fc(x)
enum class MlpKind { gelu, swiglu };
inline constexpr std::string_view kMlpNames[] = {"gelu", "swiglu"};

// One block, and how many of them. Every field is independent of the others where validate() says nothing else.
struct ModelConfig {
  int64_t layers = 12, heads = 12, width = 768, context = 1024, vocabulary = 50257;
  int64_t key_heads = 0;  // G, a divisor of the heads: each is read by heads / G of them; 0: as many as heads
  int64_t head_features = 0;  // D; 0: width / heads
  int64_t hidden = 0;         // features within the MLP; 0: 4 width
  NormKind norm = NormKind::layer_norm;
  Positions positions = Positions::learned;
  MlpKind mlp = MlpKind::gelu;
  float rotary_base = 10000;    // pair p of D / 2 turns by base^(-2 p / D) a place
  float norm_epsilon = 1e-5f;   // of RMS norms; LayerNorm's is 1e-5
  bool bias = false;            // of linear layers
  bool norm_bias = false;       // of LayerNorms
  bool tied_embeddings = true;  // the output layer is wte
  bool qk_norm = false;         // q and k of each head over their root mean square, times a learnt gain (D)
  bool sinks = false;  // each head has one more score, learnt, that every row sees and that has no value
  bool gated_attention = false;  // O times sigmoid(x W), value by value; x is what q, k and v are made of
  float softcap = 0;             // scores become c tanh(S / c); 0 is off
  float qk_clip = 0;             // largest score that apply_qk_clip leaves to a head; 0 is off
  int64_t tile_keys = 64;        // of attention: keys between two roundings of pv and row_sum; 0: all
  LinearPrecision precision = LinearPrecision::bf16;

  int64_t key_head_count() const { return key_heads > 0 ? key_heads : heads; }             // G
  int64_t head_size() const { return head_features > 0 ? head_features : width / heads; }  // D
  int64_t query_width() const { return heads * head_size(); }                              // of q and O
  int64_t key_width() const { return key_head_count() * head_size(); }                     // of k, and of v
  int64_t qkv_width() const { return query_width() + 2 * key_width(); }                    // q, k, v
  int64_t hidden_width() const { return hidden > 0 ? hidden : 4 * width; }                 // of activations
  int64_t fc_width() const { return (mlp == MlpKind::swiglu ? 2 : 1) * hidden_width(); }   // of fc's output
  bool is_rotary() const { return positions == Positions::rotary || positions == Positions::rotary_pairs; }
  // q and k on their way to attention leave the packed qkv.
  bool has_own_qk() const { return qk_norm || is_rotary(); }
  // Of activations on a GPU; the CPU keeps them in FP32.
  TensorType tensor_type() const {
    return precision == LinearPrecision::bf16 ? TensorType::bf16 : TensorType::fp32;
  }
  int64_t padded_vocabulary() const;  // a multiple of 64: rows of wte and lm_head in the flat buffer
  friend bool operator==(const ModelConfig&, const ModelConfig&) = default;
};

//   micro         3 layers,  4 heads, width  128, context  128, bytes   fails in minutes on a CPU
//   nano          6 layers,  6 heads, width  384, context  512, 8192    fails in minutes on a GPU
//   gpt2         12 layers, 12 heads, width  768, context 1024, 50257   124 M parameters
//   gpt2-medium  24 layers, 16 heads, width 1024, context 1024, 50257   354 M parameters
//   llama-micro, llama-nano, llama-124m: the sizes of the first three with RMS norms, rotary positions, SwiGLU and
//                grouped queries (2, 2 and 4 key heads). The MLP is as wide as keeps the number of parameters.
// No linear layer has a bias. The presets micro and llama-micro are FP32. The LayerNorms of micro have a bias, as where it
// was first measured.
inline constexpr std::string_view kModelPresets[] = {"micro",       "nano",       "gpt2",      "gpt2-medium",
                                                     "llama-micro", "llama-nano", "llama-124m"};
inline constexpr std::string_view kDefaultPreset = "gpt2";  // what a ModelConfig is by itself
ModelConfig model_preset(std::string_view name);            // std::invalid_argument lists the known ones
void validate(const ModelConfig& config);  // std::invalid_argument: what was expected, what was found

// Of ALiBi, (heads): 2^(-8 n / p) for n = 1 to p, the largest power of two that is not above the heads; the rest takes every
// second one of 2^(-4 n / p).
// Empty where positions are others.
std::vector<float> alibi_slopes(const ModelConfig& config);

enum class ParameterInit { normal, residual, one, zero };

// One of the matrices that lie side by side in a tensor.
struct MatrixPart {
  std::string name;  // "q"; empty: the tensor is one matrix
  int64_t first, columns;
};

struct ParameterTensor {
  std::string name;               // h.0.attn.c_attn.weight: the same names for every description
  std::vector<int64_t> shape;     // (in, out) of linear layers, (V, C) of wte and lm_head; (C) of vectors
  int64_t offset;                 // of its first value in the flat buffer
  bool decay;                     // weight decay applies: to matrices, not to gains and biases
  bool muon;                      // a hidden matrix; embeddings, head and vectors are AdamW's
  std::vector<MatrixPart> parts;  // of a hidden matrix, left to right: q, k and v of c_attn; one, or several
  ParameterInit init;

  int64_t count() const;
};

// Where every tensor lies in the one flat FP32 buffer that parameters, gradients and optimiser states share.
// Tensors start at multiples of 64 floats; what lies between is zero and stays zero while gradients are finite.
// Behind wte and lm_head (V, C) that is whole rows, up to padded_vocabulary(): a product may run over them too
// (of V = 50257 rows a GPU's products are half as fast as of 50304).
class ParameterTable {
 public:
  explicit ParameterTable(const ModelConfig& config);
  const std::vector<ParameterTensor>& tensors() const { return tensors_; }
  const ParameterTensor* find(std::string_view name) const;  // nullptr: no such tensor
  int64_t size() const { return size_; }                     // floats of the buffer, gaps included
  int64_t parameter_count() const;                           // without gaps

 private:
  void add(std::string name, std::vector<int64_t> shape, ParameterInit init,
           std::vector<MatrixPart> parts = {});
  std::vector<ParameterTensor> tensors_;
  int64_t size_ = 0;
};

// In words, for people: "GPT-2, 12 layers, ...".
std::string describe(const ModelConfig& config);

// Forward and backward: 6 for every weight that meets a token in a product (2 forward, 4 backward; wpe, gains
// and biases meet none, a tied wte counts once), and 12 L H D T for scores and PV. The causal half is counted
// too, as usual.
double flops_per_token(const ModelConfig& config, int64_t T);

// GPT-2's: normal with deviation 0.02, matrices that write to the residual stream over sqrt(2 L); gains 1,
// biases 0. A tensor's numbers depend on the seed and its name alone. parameters: (table.size()).
void initialise(const ModelConfig& config, const ParameterTable& table, uint64_t seed,
                std::span<float> parameters);

}  // namespace evenkeel

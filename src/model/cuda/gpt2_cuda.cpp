// GPT-2 on a GPU, as gpt2_cpu.cpp defines it. Reads top to bottom: memory, the forward pass, the backward pass in
// reverse, what a call does around them. In the backward pass the product whose result a LayerNorm reads comes last
// before it.
//
// A call copies its batch up, runs one recorded graph, and waits once, for the loss. The first call of its kind
// (sizes, scale, facts, plan) is not recorded: there the products' algorithms are chosen. The second one records.
//
// Facts change no bit of a step. The any-plan kernels tell them by the way; the Hopper kernels tell none, so that for their
// layers the any-plan kernels compute attention once more, of the sequences that are asked for, on a stream beside (a
// thirty-second of the batch costs half a percent of a step of `nano`, and nothing waits for it). What is told then is
// what the plan's arithmetic leaves of the sums, not the order in which the Hopper kernels add; their log-sum-exps are
// their own.
//
// Besides products and attention, a step of `gpt2` at 64 x 1024 tokens in BF16 moves, with N C = 50 M values:
//   LayerNorm forward    25 x 6 N C bytes        7.5 GB
//   LayerNorm backward   25 x 16 N C            20.1 GB
//   cross-entropy        2 x 2 N V              13.2 GB
//   embedding            5 x 4 N C               1.0 GB
//   operands             6 P                     0.7 GB
// 43 GB in all, 11 ms at 4.0 TB/s. GELU goes along with the products before and behind it; alone it would be
// 24 GB more.
#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <optional>
#include <tuple>

#include "attention/attention_cuda.h"
#include "base/error.h"
#include "base/sizes.h"
#include "base/threads.h"
#include "gpu/cuda/clock.h"
#include "gpu/cuda/graph.h"
#include "gpu/cuda/pinned_memory.h"
#include "gpu/cuda/stream_mark.h"
#include "gpu/device_memory.h"
#include "model/cuda/device_facts.h"
#include "model/cuda/device_layers.h"
#include "model/device_product.h"
#include "model/gpt2.h"

namespace evenkeel {
namespace {

using device::BlockSums;
using device::TokenParts;
using device::TokenRun;

constexpr int64_t kLargestHead = 128;  // attention's
constexpr size_t kAlignment = Carver::kAlignment;

// Of one sum over rows: its parts by blocks, until the end of the step.
struct LayerSums {
  float *ln1_gain, *ln1_bias, *qkv_bias, *q_gain, *k_gain, *gate_bias, *proj_bias, *ln2_gain, *ln2_bias,
      *fc_bias, *out_bias;
};

// What a layer's forward pass keeps for its backward pass. `void*`: of the type of activations.
struct LayerMemory {
  float* x;                  // (N, C): the residual stream as it comes in
  void* ln1;                 // (N, C)
  float *mean1, *rstd1;      // (N)
  void* qkv;                 // (N, 3 C)
  void* qk;                  // (N, 2 C): qk_norm
  float* qk_rstd;            // (N, 2, H): qk_norm
  void* o;                   // (N, C)
  float* lse;                // (B, H, T)
  int32_t* ties;             // (B, H, T), on request
  float *residual, *delta;   // (B, H, T), on request
  void *gate, *gated;        // (N, C): gated_attention
  float* middle;             // (N, C): the residual stream behind attention
  void* ln2;                 // (N, C)
  float *mean2, *rstd2;      // (N)
  void *hidden, *activated;  // (N, 4 C): GELU's input and output
  LayerSums sums;
};

// All of a call's memory, for one B and T: pieces of one allocation that all sizes share.
struct Activations {
  std::vector<LayerMemory> layers;
  uint32_t* input;  // (1, N, N), the first in a piece of its own: step, tokens, targets
  int32_t *tokens, *targets;
  float* x;            // (N, C): the residual stream behind the last layer
  void* lnf;           // (N, C)
  float *mean, *rstd;  // (N)
  void* logits;        // (N, padded V)
  float* last_logits;  // (V)
  float* losses;       // (N)
  float* dx;           // (N, C): the gradient of the residual stream
  void* dx_operand;    // (N, C): the same in bf16; dx itself in fp32
  void* dnorm;         // (N, C): the gradient of what a LayerNorm gave
  float* wide;         // (N, 4 C) where GELU is not fused, (N, C) with a gate: gradients in FP32 on their way
  void *d_o, *dgate;   // (N, C)
  void* dqkv;          // (N, 3 C)
  void* dhidden;       // (N, 4 C)
  float *lnf_gain_sums, *lnf_bias_sums;
  int32_t* places;                 // (N): sorted by token
  TokenRun* runs;                  // (most_runs)
  TokenParts* token_parts;         // (most_parts)
  float* run_sums;                 // (most parts, C)
  int64_t qkv_stride, row_stride;  // from layer to layer, in elements: of qkv or qk, and of (B, H, T)
};

// Attention once more, for its facts: what it leaves besides them is read by nobody.
struct AsideMemory {
  CudaForward forward;
  CudaBackward backward;
  void* workspace;
};

// The first rows of what a layer's attention read and wrote, as they lie on the device, in host memory.
struct CapturedRows {
  void *ln1 = nullptr, *qkv = nullptr;  // (rows, C), (rows, 3 C)
  void* qk = nullptr;                   // (rows, 2 C): qk_norm
  void *o = nullptr, *d_o = nullptr;    // (rows, C)
  float* lse = nullptr;                 // (B, H, T)
};

// The kernels name a random number by its sequence's place in the call. Parts of a step draw others by a step number of
// their own (2^32 over the golden ratio apart). So here, other than on the CPU, the number of parts changes a stochastic
// plan's draws.
uint32_t random_step(const StepContext& context) {
  return context.step + static_cast<uint32_t>(context.first_sequence) * 0x9E3779B1u;
}

// What decides which work a call puts on the stream.
struct CallKind {
  int64_t B, T;
  bool backward;
  float loss_scale;
  bool score_facts = false, tie_facts = false, residual_facts = false;
  int64_t fact_sequences = 0;  // of ties and residuals: the first so many of B
  uint64_t plan_version = 0;

  bool has_facts() const { return score_facts || attention_has_facts(); }
  bool attention_has_facts() const { return tie_facts || residual_facts; }
  auto tie() const {
    return std::tie(B, T, backward, loss_scale, score_facts, tie_facts, residual_facts, fact_sequences,
                    plan_version);
  }
  bool operator<(const CallKind& other) const { return tie() < other.tie(); }
};

class Gpt2Cuda final : public Gpt2 {
 public:
  Gpt2Cuda(const Gpt2Config& config, uint64_t seed);
  ~Gpt2Cuda() override {
    cudaStreamSynchronize(stream_);
    cudaStreamSynchronize(aside_stream_);
  }

  float* parameters() override { return parameters_.as<float>(); }
  float* gradients() override { return gradients_.as<float>(); }
  void parameters_changed() override { operands_fresh_ = false; }
  void* stream() const override { return stream_; }
  void read_parameters(std::span<float> to) const override { read(parameters_, to); }
  void write_parameters(std::span<const float> from) override {
    write(from, parameters_);
    parameters_changed();
  }
  void read_gradients(std::span<float> to) const override { read(gradients_, to); }
  void write_gradients(std::span<const float> from) override { write(from, gradients_); }
  void zero_gradients() override {
    check_cuda(cudaMemsetAsync(gradients_.data(), 0, gradients_.bytes(), stream_), "clearing gradients");
  }
  std::shared_ptr<float> make_host_buffer() const override {
    const auto memory = std::make_shared<PinnedMemory>(parameters_.bytes());
    return {memory, memory->as<float>()};
  }

  double forward_backward(const Batch& batch, float loss_scale, const StepContext& context) override;
  double loss(const Batch& batch, const StepContext& context) override;
  std::vector<float> logits(std::span<const int32_t> tokens) override;
  int64_t apply_qk_clip() override;
  std::vector<PhaseTime> time_phases(const Batch& batch, const StepContext& context, int repeats);

 private:
  // --- Memory
  bool is_bf16() const { return config_.precision == LinearPrecision::bf16; }
  size_t element_bytes() const { return is_bf16() ? 2 : 4; }
  void read(const DeviceMemory& from, std::span<float> to) const;
  void write(std::span<const float> from, DeviceMemory& to);
  void copy_up(void* to, const void* from, size_t bytes) const {
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "copying to the device");
  }
  void copy_down(void* to, const void* from, size_t bytes) const {
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_), "copying from the device");
  }
  void wait() const { check_cuda(cudaStreamSynchronize(stream_), "running on the device"); }
  Activations carve(int64_t B, int64_t T, Carver& carver, std::vector<BlockSums>& sums);
  void start(const CallKind& kind);  // memory for it, and B_, T_, N_, a_ set
  void refresh_operands();
  const float* master(int64_t offset) const {
    return offset < 0 ? nullptr : parameters_.as<float>() + offset;
  }
  // The same as an operand, in the type of activations.
  const void* operand(int64_t offset) const {
    if (offset < 0 || !is_bf16()) return master(offset);
    return operands_.as<uint16_t>() + offset;
  }
  float* gradient(int64_t offset) const { return offset < 0 ? nullptr : gradients_.as<float>() + offset; }

  // --- Products: layers.h has their definition. `y_type` of what is not FP32 is that of activations.
  void multiply(const char* phase, const DeviceProduct& product);
  void linear_forward(const char* phase, const void* x, int64_t w, int64_t bias, int64_t in, int64_t out,
                      void* y, TensorType y_type, const float* residual);
  void linear_backward(const char* phase, const void* dy, int64_t w, int64_t in, int64_t out, void* dx,
                       TensorType dx_type, const void* base = nullptr);
  void weight_backward(const char* phase, const void* dy, const void* x, int64_t w, int64_t in, int64_t out);
  void bias_backward(const void* dy, int64_t out, float* sums);

  // --- A call
  DeviceTensor heads_of(void* data, int64_t first, int64_t row_stride) const;
  CudaAttention attention_problem(int64_t layer, const CallKind& kind, float keel_scale) const;
  CudaInputs attention_inputs(const LayerMemory& m) const;
  CudaForward attention_memory(int64_t layer, const LayerMemory& m, bool ties) const;
  void* attention_workspace() const { return attention_.as<char>() + at(config_.layers) * saved_bytes_; }
  // Are facts asked for that the kernels which train this layer do not tell?
  bool is_told_aside(int64_t layer, const CallKind& kind) const;
  CudaAttention aside_problem(int64_t layer, const CallKind& kind, float keel_scale) const;
  AsideMemory carve_aside(const CudaAttention& problem, Carver& carver) const;
  void tell_aside(int64_t layer, const CallKind& kind, float keel_scale);  // REQUIRES: its d_o is there
  void join_aside();  // nothing that follows on the stream comes before what is told aside
  void forward(const CallKind& kind);
  void layer_forward(int64_t l, float* out, const CallKind& kind);
  void classify(bool gradients, float gradient_scale);
  void backward(const CallKind& kind);
  void layer_backward(int64_t l, const CallKind& kind, float keel_scale);
  void write_facts(const CallKind& kind);
  // What this layer's attention read and wrote, on its way to the host; there once the call has been waited for.
  // REQUIRES: its d_o is there.
  void capture(int64_t layer, const std::vector<PrecisionPlan>& plans);
  void make_room_for_captures();
  void unpack_captures();                                    // from there into captures_
  int64_t captured_row_count(const LayerCapture& c) const {  // up to the last one that is wanted
    return (c.x.shape()[0] - 1) * T_ + c.x.shape()[2];
  }
  void enqueue(const CallKind& kind);
  void run(const CallKind& kind);
  void token_backward(const int32_t* tokens);
  void stage(const Batch& batch, uint32_t step);
  void phase(const char* name, double flops = 0, double bytes = 0) {
    if (clock_) clock_->begin(name, flops, bytes);
  }
  double stream_bytes() const { return 4.0 * static_cast<double>(N_ * config_.width); }  // of (N, C) in FP32
  double activation_bytes(int64_t columns) const {
    return static_cast<double>(at(N_ * columns) * element_bytes());
  }

  const TensorType type_;   // of activations
  const int64_t padded_V_;  // of logits and of all products with the output layer
  const bool fused_gelu_;
  DeviceStream owned_stream_, owned_aside_stream_;
  const cudaStream_t stream_, aside_stream_;
  StreamMark forked_, joined_;
  DeviceProducts products_;
  DeviceMemory parameters_, gradients_, operands_, arena_, attention_, facts_memory_;
  bool operands_fresh_ = false;

  // Of each B and T: where everything lies, and the table of sums over rows.
  struct Sized {
    Activations activations;
    DeviceMemory sums;  // BlockSums
    int64_t sum_count, most_columns;
  };
  std::map<std::pair<int64_t, int64_t>, Sized> sized_;
  struct Recorded {
    bool done_before = false;
    // Attention's memory: `saved` bytes for each layer, the workspace, from `aside` on what is computed aside.
    size_t saved = 0, aside = 0;
    Graph graph;
  };
  std::map<CallKind, Recorded> recorded_;
  PinnedMemory input_, runs_, output_, captured_;
  std::vector<int32_t> token_end_;  // (V)
  std::optional<PhaseClock> clock_;

  // Of the call at hand.
  int64_t B_ = 0, T_ = 0, N_ = 0;
  Sized* at_hand_ = nullptr;
  Activations* a_ = nullptr;
  size_t saved_bytes_ = 0, aside_offset_ = 0;
  bool captures_now_ = false, aside_runs_ = false;
  std::vector<CapturedRows> captured_rows_;  // (L), in captured_
};

constexpr int64_t kInputHeader = kAlignment / sizeof(int32_t);  // of input: the step, alone

// What a call tells: the loss, then from kAlignment on the facts.
struct OutputHeader {
  double loss;
};
size_t output_bytes(size_t heads) { return kAlignment + heads * sizeof(FactSums); }

Gpt2Cuda::Gpt2Cuda(const Gpt2Config& config, uint64_t seed)
    : Gpt2(config),
      type_((require_cuda_device(),
             config.precision == LinearPrecision::bf16 ? TensorType::bf16 : TensorType::fp32)),
      padded_V_(config.padded_vocabulary()),
      // Products with a GELU exist for BF16, with rows of whole 16 bytes.
      fused_gelu_(is_bf16() && 4 * config.width % 8 == 0),
      stream_(static_cast<cudaStream_t>(owned_stream_.get())),
      aside_stream_(static_cast<cudaStream_t>(owned_aside_stream_.get())),
      products_(stream_),
      parameters_(at(table_.size()) * sizeof(float)),
      gradients_(at(table_.size()) * sizeof(float)),
      facts_memory_(output_bytes(facts_.size())),
      output_(output_bytes(facts_.size())),
      token_end_(at(config.vocabulary)) {
  require(config_.head_size() <= kLargestHead, "[model] expected a head size up to {} on the GPU, got {}",
          kLargestHead, config_.head_size());
  const int64_t most = config_.width % 4 == 0 ? 4 * device::kLargestWidth : device::kLargestWidth;
  require(config_.width <= most, "[model] expected a width up to {} on the GPU, got {}", most, config_.width);
  require(config_.tile_keys == 64 || config_.tile_keys == 0,
          "[model] expected tile_keys of 64 on the GPU, or 0 for all keys in one tile, got {}",
          config_.tile_keys);

  std::vector<float> initial(at(table_.size()));
  initialise(config_, table_, seed, initial);
  write(initial, parameters_);
  zero_gradients();
  if (is_bf16()) operands_ = DeviceMemory(at(table_.size()) * sizeof(uint16_t));
  wait();
}

// --- Memory

void Gpt2Cuda::read(const DeviceMemory& from, std::span<float> to) const {
  require(to.size() * sizeof(float) == from.bytes(), "[model] expected {} values, got {}",
          from.bytes() / sizeof(float), to.size());
  copy_down(to.data(), from.data(), from.bytes());
  wait();
}

void Gpt2Cuda::write(std::span<const float> from, DeviceMemory& to) {
  require(from.size() * sizeof(float) == to.bytes(), "[model] expected {} values, got {}",
          to.bytes() / sizeof(float), from.size());
  copy_up(to.data(), from.data(), to.bytes());
  wait();
}

void Gpt2Cuda::refresh_operands() {
  if (is_bf16() && !operands_fresh_) {
    phase("operands", 0, 6.0 * static_cast<double>(table_.size()));
    device::round_to_bf16(parameters_.as<float>(), table_.size(), operands_.data(), stream_);
  }
  operands_fresh_ = true;
}

Activations Gpt2Cuda::carve(int64_t B, int64_t T, Carver& carver, std::vector<BlockSums>& sums) {
  const int64_t N = B * T, C = config_.width, H = config_.heads, L = config_.layers;
  const auto activation = [&](int64_t columns) {
    return carver.take_bytes(at(N * columns) * element_bytes());
  };
  const auto stream = [&](int64_t columns) { return carver.take<float>(N * columns); };
  const int64_t blocks = device::sum_blocks(N);
  const auto sum = [&](int64_t offset, int64_t columns) -> float* {
    if (offset < 0) return nullptr;
    float* parts = carver.take<float>(blocks * columns);
    sums.push_back({parts, gradient(offset), static_cast<int32_t>(blocks), static_cast<int32_t>(columns)});
    return parts;
  };
  Activations a{};
  a.input = carver.take<uint32_t>(kInputHeader + 2 * N);
  a.tokens = reinterpret_cast<int32_t*>(a.input) + kInputHeader;
  a.targets = a.tokens + N;
  // What all layers' facts are read from lies at even distances.
  const int64_t packed = (config_.qk_norm ? 2 : 3) * C;
  a.qkv_stride = round_up(N * packed, kAlignment);
  a.row_stride = round_up(N * H, kAlignment);
  auto* qkv = static_cast<char*>(carver.take_bytes(at(L * a.qkv_stride) * element_bytes()));
  auto* rows = carver.take<float>(4 * L * a.row_stride);
  for (int64_t l = 0; l < L; ++l) {
    const LayerOffsets& w = offsets_[at(l)];
    LayerMemory m{};
    void* for_attention = qkv + at(l * a.qkv_stride) * element_bytes();
    m.x = stream(C);
    m.ln1 = activation(C);
    m.mean1 = stream(1), m.rstd1 = stream(1);
    m.qkv = config_.qk_norm ? activation(3 * C) : for_attention;
    if (config_.qk_norm) {
      m.qk = for_attention;
      m.qk_rstd = stream(2 * H);
    }
    m.o = activation(C);
    m.lse = rows + l * a.row_stride;
    m.ties = reinterpret_cast<int32_t*>(rows + (L + l) * a.row_stride);
    m.residual = rows + (2 * L + l) * a.row_stride;
    m.delta = rows + (3 * L + l) * a.row_stride;
    if (config_.gated_attention) m.gate = activation(C), m.gated = activation(C);
    m.middle = stream(C);
    m.ln2 = activation(C);
    m.mean2 = stream(1), m.rstd2 = stream(1);
    m.hidden = activation(4 * C), m.activated = activation(4 * C);
    m.sums = {sum(w.ln1_gain, C),
              sum(w.ln1_bias, C),
              sum(w.qkv_bias, 3 * C),
              sum(w.q_gain, config_.head_size()),
              sum(w.k_gain, config_.head_size()),
              sum(w.gate_bias, C),
              sum(w.proj_bias, C),
              sum(w.ln2_gain, C),
              sum(w.ln2_bias, C),
              sum(w.fc_bias, 4 * C),
              sum(w.out_bias, C)};
    a.layers.push_back(m);
  }
  a.x = stream(C);
  a.lnf = activation(C);
  a.mean = stream(1), a.rstd = stream(1);
  a.lnf_gain_sums = sum(lnf_gain_, C), a.lnf_bias_sums = sum(lnf_bias_, C);
  a.logits = activation(padded_V_);
  a.last_logits = carver.take<float>(padded_V_);
  a.losses = stream(1);
  a.dx = stream(C);
  a.dx_operand = is_bf16() ? activation(C) : a.dx;
  a.dnorm = activation(C);
  a.wide = stream(!fused_gelu_ ? 4 * C : config_.gated_attention ? C : 0);
  a.d_o = activation(C);
  if (config_.gated_attention) a.dgate = activation(C);
  a.dqkv = activation(3 * C);
  a.dhidden = activation(4 * C);
  // A token of p places has p / kRunPlaces runs, rounded up; only one of more than kRunPlaces has parts.
  const int64_t most_parts = 2 * N / device::kRunPlaces + 1;
  a.places = carver.take<int32_t>(N);
  a.runs = carver.take<TokenRun>(std::min(N, config_.vocabulary) + N / device::kRunPlaces + 1);
  a.token_parts = carver.take<TokenParts>(N / device::kRunPlaces + 1);
  a.run_sums = carver.take<float>(most_parts * C);
  return a;
}

void Gpt2Cuda::start(const CallKind& kind) {
  B_ = kind.B, T_ = kind.T, N_ = B_ * T_;
  auto sized = sized_.find({B_, T_});
  if (sized == sized_.end()) {
    Carver count(nullptr);
    std::vector<BlockSums> sums;
    carve(B_, T_, count, sums);
    if (count.used() > arena_.bytes()) {
      wait();
      recorded_.clear();
      sized_.clear();
      arena_ = {};  // the old one goes before the new one comes
      arena_ = DeviceMemory(count.used());
    }
    Carver carver(arena_.data());
    sums.clear();
    Sized made;
    made.activations = carve(B_, T_, carver, sums);
    made.sums = DeviceMemory(sums.size() * sizeof(BlockSums));
    made.sum_count = static_cast<int64_t>(sums.size());
    made.most_columns = 0;
    for (const BlockSums& s : sums) made.most_columns = std::max<int64_t>(made.most_columns, s.columns);
    copy_up(made.sums.data(), sums.data(), made.sums.bytes());
    wait();
    sized = sized_.emplace(std::pair(B_, T_), std::move(made)).first;
    // The same piece of pinned memory serves all sizes.
    const size_t input = at(kInputHeader + 2 * N_) * sizeof(int32_t);
    const size_t runs = at(N_) * (sizeof(int32_t) + sizeof(TokenRun) + sizeof(TokenParts)) + 4 * kAlignment +
                        2 * at(N_) * sizeof(TokenRun);
    if (input_.bytes() < input || runs_.bytes() < runs) {
      recorded_.clear();
      input_ = PinnedMemory(std::max(input, input_.bytes()));
      runs_ = PinnedMemory(std::max(runs, runs_.bytes()));
    }
  }
  at_hand_ = &sized->second;
  a_ = &at_hand_->activations;
  auto found = recorded_.find(kind);
  if (found == recorded_.end()) {
    size_t saved = 0, workspace = 0, aside = 0;
    for (int64_t l = 0; l < config_.layers; ++l) {
      const bool is_aside = is_told_aside(l, kind);
      const CudaSizes sizes =
          cuda_attention_sizes(attention_problem(l, kind, 1), kind.attention_has_facts() && !is_aside);
      saved = std::max(saved, sizes.saved), workspace = std::max(workspace, sizes.workspace);
      if (!is_aside) continue;
      Carver count(nullptr);
      carve_aside(aside_problem(l, kind, 1), count);
      aside = std::max(aside, count.used());
    }
    saved = round_up(saved, kAlignment);
    const size_t before_aside = round_up(saved * at(config_.layers) + workspace, kAlignment),
                 bytes = before_aside + aside;
    if (bytes > attention_.bytes()) {
      wait();
      recorded_.clear();
      attention_ = {};
      attention_ = DeviceMemory(bytes);
    }
    // Of an older plan there will be no more calls.
    std::erase_if(recorded_, [&](const auto& entry) { return entry.first.plan_version != plan_version_; });
    found = recorded_.emplace(kind, Recorded{}).first;
    found->second.saved = saved;
    found->second.aside = before_aside;
  }
  saved_bytes_ = found->second.saved;
  aside_offset_ = found->second.aside;
}

// --- Products

void Gpt2Cuda::multiply(const char* name, const DeviceProduct& p) {
  if (clock_) {
    const auto bytes = [](int64_t rows, int64_t columns, TensorType type) {
      return static_cast<double>(rows * columns * (type == TensorType::bf16 ? 2 : 4));
    };
    phase(name,
          2.0 * static_cast<double>(p.rows) * static_cast<double>(p.columns) * static_cast<double>(p.depth),
          bytes(p.rows, p.depth, p.type) + bytes(p.depth, p.columns, p.type) +
              bytes(p.rows, p.columns, p.c_type) * (1 + (p.base != nullptr) + (p.end != ProductEnd::plain)));
  }
  products_.multiply(p);
}

void Gpt2Cuda::linear_forward(const char* name, const void* x, int64_t w, int64_t bias, int64_t in,
                              int64_t out, void* y, TensorType y_type, const float* residual) {
  DeviceProduct p{N_, out, in,    type_, DeviceMatrix::rows_of(x, in), DeviceMatrix::rows_of(operand(w), out),
                  y,  out, y_type};
  p.base = residual;
  // cuBLASLt wants the bias in the type of the result: in BF16 it is rounded, as weights are.
  p.bias = y_type == TensorType::fp32 ? master(bias) : operand(bias);
  multiply(name, p);
}

void Gpt2Cuda::linear_backward(const char* name, const void* dy, int64_t w, int64_t in, int64_t out, void* dx,
                               TensorType dx_type, const void* base) {
  DeviceProduct p{
      N_, in, out,    type_, DeviceMatrix::rows_of(dy, out), DeviceMatrix::transposed(operand(w), out),
      dx, in, dx_type};
  p.base = base;
  multiply(name, p);
}

void Gpt2Cuda::weight_backward(const char* name, const void* dy, const void* x, int64_t w, int64_t in,
                               int64_t out) {
  DeviceProduct p{in,
                  out,
                  N_,
                  type_,
                  DeviceMatrix::transposed(x, in),
                  DeviceMatrix::rows_of(dy, out),
                  gradient(w),
                  out,
                  TensorType::fp32};
  p.base = p.c;
  multiply(name, p);
}

void Gpt2Cuda::bias_backward(const void* dy, int64_t out, float* sums) {
  if (!sums) return;
  phase("bias gradients", 0, activation_bytes(out));
  device::column_sums(dy, N_, out, type_, sums, stream_);
}

// --- Attention

DeviceTensor Gpt2Cuda::heads_of(void* data, int64_t first, int64_t row_stride) const {
  return {static_cast<char*>(data) + at(first) * element_bytes(),
          {T_ * row_stride, config_.head_size(), row_stride, 1}};
}

CudaAttention Gpt2Cuda::attention_problem(int64_t layer, const CallKind& kind, float keel_scale) const {
  CudaAttention problem;
  problem.B = kind.B, problem.T = problem.N = kind.T;
  problem.H = problem.G = config_.heads;
  problem.D = config_.head_size();
  problem.type = type_;
  problem.plans = plans_of(layer);
  for (PrecisionPlan& plan : problem.plans) plan.keel *= keel_scale;
  problem.softcap = config_.softcap;
  problem.causal = true;
  problem.tile_keys = config_.tile_keys;
  problem.fact_sequences = kind.fact_sequences;
  problem.layer = static_cast<uint32_t>(layer);
  problem.device_step = a_->input;
  problem.aligned = config_.head_size() % 8 == 0;
  return problem;
}

CudaInputs Gpt2Cuda::attention_inputs(const LayerMemory& m) const {
  const int64_t C = config_.width;
  const DeviceTensor v = heads_of(m.qkv, 2 * C, 3 * C);
  if (config_.qk_norm) return {heads_of(m.qk, 0, 2 * C), heads_of(m.qk, C, 2 * C), v};
  return {heads_of(m.qkv, 0, 3 * C), heads_of(m.qkv, C, 3 * C), v};
}

CudaForward Gpt2Cuda::attention_memory(int64_t layer, const LayerMemory& m, bool ties) const {
  CudaForward out;
  out.o = heads_of(m.o, 0, config_.width);
  out.lse = m.lse;
  out.saved = attention_.as<char>() + at(layer) * saved_bytes_;
  if (ties) out.ties = m.ties;
  return out;
}

// --- Attention's facts, aside

bool Gpt2Cuda::is_told_aside(int64_t layer, const CallKind& kind) const {
  return kind.attention_has_facts() &&
         choose_kernel(cuda_device(), attention_problem(layer, kind, 1), /*with_facts=*/false).kernel ==
             AttentionKernel::hopper;
}

// The sequences that are asked for alone. They are the batch's first ones, so that their random numbers are the same.
CudaAttention Gpt2Cuda::aside_problem(int64_t layer, const CallKind& kind, float keel_scale) const {
  CudaAttention problem = attention_problem(layer, kind, keel_scale);
  problem.B = kind.fact_sequences;
  return problem;
}

AsideMemory Gpt2Cuda::carve_aside(const CudaAttention& problem, Carver& carver) const {
  const CudaSizes sizes = cuda_attention_sizes(problem, /*with_facts=*/true);
  const int64_t C = config_.width, rows = problem.B * problem.T;
  const auto heads = [&] { return heads_of(carver.take_bytes(at(rows * C) * element_bytes()), 0, C); };
  AsideMemory m{};
  m.forward.o = heads();
  m.forward.lse = carver.take<float>(rows * problem.H);
  m.forward.saved = carver.take_bytes(sizes.saved);
  m.backward.dq = heads();
  m.workspace = carver.take_bytes(sizes.workspace);
  return m;
}

void Gpt2Cuda::tell_aside(int64_t l, const CallKind& kind, float keel_scale) {
  const LayerMemory& m = a_->layers[at(l)];
  const CudaAttention problem = aside_problem(l, kind, keel_scale);
  Carver carver(attention_.as<char>() + aside_offset_);
  AsideMemory aside = carve_aside(problem, carver);
  forked_.set(stream_);
  forked_.wait_in(aside_stream_);
  aside_runs_ = true;
  if (kind.tie_facts) aside.forward.ties = m.ties;
  attention_forward_cuda(problem, attention_inputs(m), aside.forward, true, aside.workspace, aside_stream_);
  if (kind.residual_facts) {
    aside.backward.residual = m.residual;
    aside.backward.delta = m.delta;
    attention_backward_cuda(problem, attention_inputs(m), heads_of(a_->d_o, 0, config_.width), aside.forward,
                            aside.backward, true, aside.workspace, aside_stream_);
  }
  joined_.set(aside_stream_);
}

void Gpt2Cuda::join_aside() {
  if (std::exchange(aside_runs_, false)) joined_.wait_in(stream_);
}

// --- Forward

void Gpt2Cuda::forward(const CallKind& kind) {
  const int64_t C = config_.width;
  phase("embedding", 0, 2 * stream_bytes());
  device::embedding_forward(a_->tokens, master(wte_), master(wpe_), N_, T_, C, a_->layers[0].x, stream_);
  for (int64_t l = 0; l < config_.layers; ++l)
    layer_forward(l, l + 1 < config_.layers ? a_->layers[at(l + 1)].x : a_->x, kind);
  phase("layernorm forward", 0, stream_bytes() + activation_bytes(C));
  device::layernorm_forward(a_->x, master(lnf_gain_), master(lnf_bias_), N_, C, type_, a_->lnf, a_->mean,
                            a_->rstd, stream_);
}

void Gpt2Cuda::layer_forward(int64_t l, float* out, const CallKind& kind) {
  LayerMemory& m = a_->layers[at(l)];
  const LayerOffsets& w = offsets_[at(l)];
  const int64_t C = config_.width, H = config_.heads, D = config_.head_size();
  const bool with_facts = kind.attention_has_facts() && !is_told_aside(l, kind);
  phase("layernorm forward", 0, stream_bytes() + activation_bytes(C));
  device::layernorm_forward(m.x, master(w.ln1_gain), master(w.ln1_bias), N_, C, type_, m.ln1, m.mean1,
                            m.rstd1, stream_);
  linear_forward("qkv", m.ln1, w.qkv, w.qkv_bias, C, 3 * C, m.qkv, type_, nullptr);
  if (config_.qk_norm) {
    phase("qk_norm", 0, 2 * activation_bytes(2 * C));
    device::rms_norm_forward(m.qkv, master(w.q_gain), master(w.k_gain), N_, H, D, type_, m.qk, m.qk_rstd,
                             stream_);
  }
  phase("attention forward", 4.0 * static_cast<double>(N_) * static_cast<double>(T_ * C) / 2);
  attention_forward_cuda(attention_problem(l, kind, 1), attention_inputs(m),
                         attention_memory(l, m, with_facts && kind.tie_facts), with_facts,
                         attention_workspace(), stream_);
  const void* attended = m.o;
  if (config_.gated_attention) {
    linear_forward("gate", m.ln1, w.gate, w.gate_bias, C, C, m.gate, type_, nullptr);
    phase("gate values", 0, 3 * activation_bytes(C));
    device::gate_forward(m.o, m.gate, N_ * C, type_, m.gated, stream_);
    attended = m.gated;
  }
  linear_forward("proj", attended, w.proj, w.proj_bias, C, C, m.middle, TensorType::fp32, m.x);
  phase("layernorm forward", 0, stream_bytes() + activation_bytes(C));
  device::layernorm_forward(m.middle, master(w.ln2_gain), master(w.ln2_bias), N_, C, type_, m.ln2, m.mean2,
                            m.rstd2, stream_);
  if (fused_gelu_) {
    DeviceProduct p{N_,
                    4 * C,
                    C,
                    type_,
                    DeviceMatrix::rows_of(m.ln2, C),
                    DeviceMatrix::rows_of(operand(w.fc), 4 * C),
                    m.activated,
                    4 * C,
                    type_};
    p.bias = operand(w.fc_bias);
    p.end = ProductEnd::gelu;
    p.aux = m.hidden;
    multiply("fc, gelu", p);
  } else {
    linear_forward("fc", m.ln2, w.fc, w.fc_bias, C, 4 * C, m.hidden, type_, nullptr);
    phase("gelu forward", 0, 2 * activation_bytes(4 * C));
    device::gelu_forward(m.hidden, N_ * 4 * C, type_, m.activated, stream_);
  }
  linear_forward("out", m.activated, w.out, w.out_bias, 4 * C, C, out, TensorType::fp32, m.middle);
}

// Logits and losses; with gradients, dlogits in their place.
void Gpt2Cuda::classify(bool gradients, float gradient_scale) {
  const int64_t C = config_.width;
  multiply("logits", {N_, padded_V_, C, type_, DeviceMatrix::rows_of(a_->lnf, C),
                      DeviceMatrix::transposed(operand(head_), C), a_->logits, padded_V_, type_});
  phase("cross-entropy", 0, (gradients ? 2 : 1) * activation_bytes(config_.vocabulary));
  device::cross_entropy(a_->logits, a_->targets, N_, config_.vocabulary, padded_V_, type_, gradients,
                        gradient_scale, a_->losses, stream_);
  device::mean_loss(a_->losses, N_, facts_memory_.as<double>(), stream_);
}

// --- Backward

void Gpt2Cuda::backward(const CallKind& kind) {
  const int64_t C = config_.width;
  // The loss is a mean over tokens, and so is the z-loss of keel.
  const float gradient_scale = kind.loss_scale / static_cast<float>(N_);
  classify(/*gradients=*/true, gradient_scale);
  // Columns of dlogits from V on are zero, and so are the rows behind the gradient of the output layer.
  DeviceProduct head{padded_V_,
                     C,
                     N_,
                     type_,
                     DeviceMatrix::transposed(a_->logits, padded_V_),
                     DeviceMatrix::rows_of(a_->lnf, C),
                     gradient(head_),
                     C,
                     TensorType::fp32};
  head.base = head.c;
  multiply("logits, weight gradient", head);
  multiply("logits, input gradient", {N_, C, padded_V_, type_, DeviceMatrix::rows_of(a_->logits, padded_V_),
                                      DeviceMatrix::rows_of(operand(head_), C), a_->dnorm, C, type_});
  void* const dx_operand = is_bf16() ? a_->dx_operand : nullptr;
  phase("layernorm backward", 0, 2 * stream_bytes() + 2 * activation_bytes(C));
  device::layernorm_backward(a_->dnorm, type_, a_->x, master(lnf_gain_), a_->mean, a_->rstd, N_, C, nullptr,
                             a_->dx, dx_operand, a_->lnf_gain_sums, a_->lnf_bias_sums, stream_);
  for (int64_t l = config_.layers; l-- > 0;) layer_backward(l, kind, gradient_scale);
  phase("sums over rows");
  device::add_sums(at_hand_->sums.as<BlockSums>(), at_hand_->sum_count, at_hand_->most_columns, stream_);
  phase("embedding", 0, stream_bytes());
  device::position_backward(a_->dx, B_, T_, C, gradient(wpe_), stream_);
}

// dx comes in as the gradient of the layer's output and leaves as that of its input.
void Gpt2Cuda::layer_backward(int64_t l, const CallKind& kind, float keel_scale) {
  LayerMemory& m = a_->layers[at(l)];
  const LayerOffsets& w = offsets_[at(l)];
  const int64_t C = config_.width, H = config_.heads, D = config_.head_size();
  const bool aside = is_told_aside(l, kind), with_facts = kind.attention_has_facts() && !aside;
  void* const dx_operand = is_bf16() ? a_->dx_operand : nullptr;

  if (fused_gelu_) {
    DeviceProduct p{N_,
                    4 * C,
                    C,
                    type_,
                    DeviceMatrix::rows_of(a_->dx_operand, C),
                    DeviceMatrix::transposed(operand(w.out), C),
                    a_->dhidden,
                    4 * C,
                    type_};
    p.end = ProductEnd::gelu_slope;
    p.aux = m.hidden;
    multiply("out, input gradient, gelu", p);
  } else {
    linear_backward("out, input gradient", a_->dx_operand, w.out, 4 * C, C, a_->wide, TensorType::fp32);
    phase("gelu backward", 0, 4 * stream_bytes() + 2 * activation_bytes(4 * C));
    device::gelu_backward(a_->wide, m.hidden, N_ * 4 * C, type_, a_->dhidden, stream_);
  }
  weight_backward("out, weight gradient", a_->dx_operand, m.activated, w.out, 4 * C, C);
  bias_backward(a_->dx_operand, C, m.sums.out_bias);
  weight_backward("fc, weight gradient", a_->dhidden, m.ln2, w.fc, C, 4 * C);
  bias_backward(a_->dhidden, 4 * C, m.sums.fc_bias);
  linear_backward("fc, input gradient", a_->dhidden, w.fc, C, 4 * C, a_->dnorm, type_);
  phase("layernorm backward", 0, 3 * stream_bytes() + 2 * activation_bytes(C));
  device::layernorm_backward(a_->dnorm, type_, m.middle, master(w.ln2_gain), m.mean2, m.rstd2, N_, C, a_->dx,
                             a_->dx, dx_operand, m.sums.ln2_gain, m.sums.ln2_bias, stream_);

  join_aside();  // which reads the d_o of the layer before
  if (config_.gated_attention) {
    linear_backward("proj, input gradient", a_->dx_operand, w.proj, C, C, a_->wide, TensorType::fp32);
    weight_backward("proj, weight gradient", a_->dx_operand, m.gated, w.proj, C, C);
    phase("gate values", 0, stream_bytes() + 4 * activation_bytes(C));
    device::gate_backward(a_->wide, m.o, m.gate, N_ * C, type_, a_->d_o, a_->dgate, stream_);
  } else {
    linear_backward("proj, input gradient", a_->dx_operand, w.proj, C, C, a_->d_o, type_);
    weight_backward("proj, weight gradient", a_->dx_operand, m.o, w.proj, C, C);
  }
  bias_backward(a_->dx_operand, C, m.sums.proj_bias);
  CudaBackward out;
  out.dq = heads_of(a_->dqkv, 0, 3 * C);
  out.dk = heads_of(a_->dqkv, C, 3 * C);
  out.dv = heads_of(a_->dqkv, 2 * C, 3 * C);
  if (with_facts && kind.residual_facts) {
    out.residual = m.residual;
    out.delta = m.delta;
  }
  if (aside) tell_aside(l, kind, keel_scale);
  phase("attention backward", 10.0 * static_cast<double>(N_) * static_cast<double>(T_ * C) / 2);
  const CudaAttention problem = attention_problem(l, kind, keel_scale);
  if (captures_now_) capture(l, problem.plans);
  attention_backward_cuda(problem, attention_inputs(m), heads_of(a_->d_o, 0, C),
                          attention_memory(l, m, false), out, with_facts, attention_workspace(), stream_);
  if (config_.qk_norm) {
    phase("qk_norm", 0, 3 * activation_bytes(2 * C));
    device::rms_norm_backward(a_->dqkv, m.qkv, master(w.q_gain), master(w.k_gain), m.qk_rstd, N_, H, D, type_,
                              m.sums.q_gain, m.sums.k_gain, stream_);
  }
  weight_backward("qkv, weight gradient", a_->dqkv, m.ln1, w.qkv, C, 3 * C);
  bias_backward(a_->dqkv, 3 * C, m.sums.qkv_bias);
  linear_backward("qkv, input gradient", a_->dqkv, w.qkv, C, 3 * C, a_->dnorm, type_);
  if (config_.gated_attention) {
    weight_backward("gate, weight gradient", a_->dgate, m.ln1, w.gate, C, C);
    bias_backward(a_->dgate, C, m.sums.gate_bias);
    linear_backward("gate, input gradient", a_->dgate, w.gate, C, C, a_->dnorm, type_, a_->dnorm);
  }
  phase("layernorm backward", 0, 3 * stream_bytes() + 2 * activation_bytes(C));
  device::layernorm_backward(a_->dnorm, type_, m.x, master(w.ln1_gain), m.mean1, m.rstd1, N_, C, a_->dx,
                             a_->dx, l > 0 ? dx_operand : nullptr, m.sums.ln1_gain, m.sums.ln1_bias, stream_);
}

// --- Facts

void Gpt2Cuda::write_facts(const CallKind& kind) {
  if (!kind.has_facts()) return;
  join_aside();
  const LayerMemory& first = a_->layers[0];
  const int64_t C = config_.width, row_stride = (config_.qk_norm ? 2 : 3) * C;
  const CudaInputs in = attention_inputs(first);
  device::FactInputs facts{};
  facts.L = config_.layers, facts.B = B_, facts.H = config_.heads, facts.T = T_;
  facts.D = config_.head_size();
  facts.type = type_;
  facts.scale = 1 / std::sqrt(static_cast<float>(facts.D));
  facts.q = in.q.data;
  facts.k = in.k.data;
  facts.layer_stride = a_->qkv_stride;
  facts.row_stride = row_stride;
  facts.row_layer_stride = a_->row_stride;
  facts.lse = first.lse;
  facts.fact_sequences = kind.fact_sequences;
  if (kind.tie_facts) facts.ties = first.ties;
  if (kind.residual_facts) facts.residual = first.residual, facts.delta = first.delta;
  phase("facts", kind.score_facts ? static_cast<double>(config_.layers) * static_cast<double>(N_) *
                                        static_cast<double>(T_ * C)
                                  : 0);
  device::head_facts(facts, kind.score_facts,
                     reinterpret_cast<FactSums*>(facts_memory_.as<char>() + kAlignment), stream_);
}

// --- A call

void Gpt2Cuda::enqueue(const CallKind& kind) {
  aside_runs_ = false;
  phase("copies");
  copy_up(a_->input, input_.as<void>(), at(kInputHeader + 2 * N_) * sizeof(int32_t));
  forward(kind);
  if (kind.backward) {
    backward(kind);
    write_facts(kind);
  } else {
    classify(/*gradients=*/false, 0);
  }
  phase("copies");
  copy_down(output_.as<void>(), facts_memory_.data(),
            kind.has_facts() ? output_bytes(facts_.size()) : sizeof(OutputHeader));
}

void Gpt2Cuda::make_room_for_captures() {
  const int64_t C = config_.width;
  const auto lay_out = [&](void* memory) {
    Carver carver(memory);
    captured_rows_.clear();
    for (const LayerCapture& c : captures_) {
      CapturedRows& r = captured_rows_.emplace_back();
      if (c.x.values().empty()) continue;
      const auto take = [&](int64_t columns) {
        return carver.take_bytes(at(captured_row_count(c) * columns) * element_bytes());
      };
      r.ln1 = take(C);
      r.qkv = take(3 * C);
      if (config_.qk_norm) r.qk = take(2 * C);
      r.o = take(C);
      r.d_o = take(C);
      r.lse = carver.take<float>(c.lse.shape()[0] * config_.heads * T_);
    }
    return carver.used();
  };
  if (const size_t bytes = lay_out(nullptr); captured_.bytes() < bytes) captured_ = PinnedMemory(bytes);
  lay_out(captured_.as<void>());
}

void Gpt2Cuda::capture(int64_t layer, const std::vector<PrecisionPlan>& plans) {
  LayerCapture& c = captures_[at(layer)];
  if (c.x.values().empty()) return;
  c.plans = plans;
  const CapturedRows& to = captured_rows_[at(layer)];
  const LayerMemory& m = a_->layers[at(layer)];
  const int64_t rows = captured_row_count(c), C = config_.width;
  const auto copy = [&](void* target, const void* from, int64_t columns) {
    copy_down(target, from, at(rows * columns) * element_bytes());
  };
  copy(to.ln1, m.ln1, C);
  copy(to.qkv, m.qkv, 3 * C);
  if (config_.qk_norm) copy(to.qk, m.qk, 2 * C);
  copy(to.o, m.o, C);
  copy(to.d_o, a_->d_o, C);
  copy_down(to.lse, m.lse, at(c.lse.shape()[0] * config_.heads * T_) * sizeof(float));
}

void Gpt2Cuda::unpack_captures() {
  // Columns [first, first + H D) of rows of so many, by head, in FP32.
  const auto unpack = [&](Tensor<float>& to, const void* from, int64_t columns, int64_t first) {
    const View<float> all = to.view();
    const auto [B, H, T, D] = all.shape;
    for (int64_t b = 0; b < B; ++b)
      for (int64_t h = 0; h < H; ++h)
        for (int64_t t = 0; t < T; ++t) {
          const int64_t at_row = (b * T_ + t) * columns + first + h * D;
          if (is_bf16())
            std::transform(
                static_cast<const uint16_t*>(from) + at_row, static_cast<const uint16_t*>(from) + at_row + D,
                all.at(b, h, t),
                [](uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); });
          else
            std::copy_n(static_cast<const float*>(from) + at_row, D, all.at(b, h, t));
        }
  };
  parallel_for(config_.layers, [&](int64_t l, int) {
    LayerCapture& c = captures_[at(l)];
    if (c.x.values().empty()) return;
    const CapturedRows& from = captured_rows_[at(l)];
    const int64_t C = config_.width, qk_columns = (config_.qk_norm ? 2 : 3) * C;
    const void* const qk = config_.qk_norm ? from.qk : from.qkv;
    unpack(c.x, from.ln1, C, 0);
    unpack(c.q, qk, qk_columns, 0);
    unpack(c.k, qk, qk_columns, C);
    unpack(c.v, from.qkv, 3 * C, 2 * C);
    unpack(c.o, from.o, C, 0);
    unpack(c.d_o, from.d_o, C, 0);
    const auto [B, H, T, one] = c.lse.shape();
    for (int64_t n = 0; n < B * H; ++n) std::copy_n(from.lse + n * T_, T, c.lse.values().begin() + n * T);
  });
}

void Gpt2Cuda::run(const CallKind& kind) {
  Recorded& recorded = recorded_.at(kind);
  if (clock_ || captures_now_ || !recorded.done_before) {
    enqueue(kind);
    recorded.done_before = true;
    return;
  }
  if (!recorded.graph) recorded.graph = Graph::record(stream_, [&] { enqueue(kind); });
  recorded.graph.launch(stream_);
}

void Gpt2Cuda::stage(const Batch& batch, uint32_t step) {
  *input_.as<uint32_t>() = step;
  int32_t* tokens = input_.as<int32_t>() + kInputHeader;
  std::copy(batch.tokens.begin(), batch.tokens.end(), tokens);
  std::copy(batch.targets.begin(), batch.targets.end(), tokens + N_);
}

// The rows of dwte, by runs. Sorted here while the device is at work.
void Gpt2Cuda::token_backward(const int32_t* tokens) {
  const int64_t V = config_.vocabulary, kMost = device::kRunPlaces;
  Carver carver(runs_.as<void>());
  int32_t* places = carver.take<int32_t>(N_);
  TokenRun* runs = carver.take<TokenRun>(std::min(N_, V) + N_ / kMost + 1);
  TokenParts* parts = carver.take<TokenParts>(N_ / kMost + 1);
  // A counting sort: places in ascending order within a token.
  std::fill(token_end_.begin(), token_end_.end(), 0);
  for (int64_t n = 0; n < N_; ++n) ++token_end_[at(tokens[n])];
  int64_t run_count = 0, token_count = 0;
  int32_t first = 0, part = 0;
  for (int64_t token = 0; token < V; ++token) {
    const int32_t count = token_end_[at(token)];
    token_end_[at(token)] = first;
    if (count == 0) continue;
    const bool several = count > kMost;
    if (several)
      parts[token_count++] = {static_cast<int32_t>(token), part,
                              static_cast<int32_t>((count + kMost - 1) / kMost)};
    for (int32_t done = 0; done < count; done += static_cast<int32_t>(kMost))
      runs[run_count++] = {static_cast<int32_t>(token), first + done,
                           std::min<int32_t>(count - done, static_cast<int32_t>(kMost)),
                           several ? part++ : -1};
    first += count;
  }
  for (int64_t n = 0; n < N_; ++n) places[token_end_[at(tokens[n])]++] = static_cast<int32_t>(n);
  phase("copies");
  copy_up(a_->places, places, at(N_) * sizeof(int32_t));
  copy_up(a_->runs, runs, at(run_count) * sizeof(TokenRun));
  if (token_count > 0) copy_up(a_->token_parts, parts, at(token_count) * sizeof(TokenParts));
  phase("embedding", 0, stream_bytes());
  device::token_backward(a_->dx, a_->places, a_->runs, run_count, a_->token_parts, token_count, a_->run_sums,
                         config_.width, gradient(wte_), stream_);
}

double Gpt2Cuda::forward_backward(const Batch& batch, float loss_scale, const StepContext& context) {
  check_batch(batch, /*with_targets=*/true);
  CallKind kind{batch.B, batch.T, true, loss_scale};
  kind.score_facts = context.score_facts;
  kind.tie_facts = context.tie_facts;
  kind.residual_facts = context.residual_facts;
  if (kind.attention_has_facts())
    kind.fact_sequences = context.fact_sequences == 0 ? batch.B : std::min(batch.B, context.fact_sequences);
  kind.plan_version = plan_version_;
  start(kind);
  stage(batch, random_step(context));
  refresh_operands();
  captures_now_ = context.capture_sequences > 0;
  if (captures_now_) {
    start_captures(batch, context);
    make_room_for_captures();
  }
  run(kind);
  token_backward(batch.tokens.data());
  if (clock_) clock_->end();
  wait();
  if (std::exchange(captures_now_, false)) unpack_captures();
  const FactSums* sums = output_.as<FactSums>(kAlignment);
  for (size_t n = 0; n < facts_.size(); ++n) facts_[n] = facts_of(sums[n], context);
  return output_.as<OutputHeader>()->loss;
}

double Gpt2Cuda::loss(const Batch& batch, const StepContext& context) {
  check_batch(batch, /*with_targets=*/true);
  CallKind kind{batch.B, batch.T, false, 1};
  kind.plan_version = plan_version_;
  start(kind);
  stage(batch, random_step(context));
  refresh_operands();
  run(kind);
  wait();
  return output_.as<OutputHeader>()->loss;
}

// Lengths are rounded up, so that few shapes of products occur: what follows a token changes nothing before it.
std::vector<float> Gpt2Cuda::logits(std::span<const int32_t> tokens) {
  const int64_t count = static_cast<int64_t>(tokens.size()), C = config_.width, V = config_.vocabulary;
  check_batch({1, count, tokens, {}}, /*with_targets=*/false);
  int64_t T = 64;
  while (T < count) T *= 2;
  T = std::min(T, config_.context);
  std::vector<int32_t> padded(tokens.begin(), tokens.end());
  padded.resize(at(T));
  CallKind kind{1, T, false, 1};
  kind.plan_version = plan_version_;
  start(kind);
  stage({1, T, padded, {}}, 0);
  refresh_operands();
  copy_up(a_->input, input_.as<void>(), at(kInputHeader + N_) * sizeof(int32_t));
  forward(kind);
  // The row goes to a place of its own, so that its alignment does not depend on the length.
  check_cuda(
      cudaMemcpyAsync(a_->d_o, static_cast<const char*>(a_->lnf) + at((count - 1) * C) * element_bytes(),
                      at(C) * element_bytes(), cudaMemcpyDeviceToDevice, stream_),
      "copying a row");
  multiply("last logits",
           {1, V, C, type_, DeviceMatrix::rows_of(a_->d_o, C), DeviceMatrix::transposed(operand(head_), C),
            a_->last_logits, padded_V_, TensorType::fp32});
  std::vector<float> out(at(V));
  copy_down(out.data(), a_->last_logits, out.size() * sizeof(float));
  wait();
  return out;
}

int64_t Gpt2Cuda::apply_qk_clip() {
  const std::vector<float> factors = query_key_factors(config_, facts_);
  const int64_t clipped =
      static_cast<int64_t>(factors.size()) - std::count(factors.begin(), factors.end(), 1.0f);
  if (clipped == 0) return 0;
  const DeviceMemory on_device(factors.size() * sizeof(float));
  copy_up(on_device.data(), factors.data(), on_device.bytes());
  for (int64_t l = 0; l < config_.layers; ++l) {
    const LayerOffsets& w = offsets_[at(l)];
    device::scale_query_key(parameters() + w.qkv, w.qkv_bias < 0 ? nullptr : parameters() + w.qkv_bias,
                            on_device.as<float>() + l * config_.heads, config_.width, config_.heads, stream_);
  }
  wait();
  parameters_changed();
  return clipped;
}

std::vector<PhaseTime> Gpt2Cuda::time_phases(const Batch& batch, const StepContext& context, int repeats) {
  require(repeats >= 1, "[model] expected at least one repeat, got {}", repeats);
  forward_backward(batch, 1, context);  // chooses algorithms
  std::vector<PhaseTime> phases;
  for (int n = 0; n < repeats; ++n) {
    parameters_changed();  // as in a step
    clock_.emplace(stream_);
    try {
      forward_backward(batch, 1, context);
      clock_->add_to(phases);
    } catch (...) {
      clock_.reset();
      throw;
    }
    clock_.reset();
  }
  for (PhaseTime& phase : phases) {
    phase.seconds /= repeats;
    phase.flops /= repeats;
    phase.bytes /= repeats;
    phase.launches /= repeats;
  }
  return phases;
}

}  // namespace

std::unique_ptr<Gpt2> make_gpt2_cuda(const Gpt2Config& config, uint64_t seed) {
  return std::make_unique<Gpt2Cuda>(config, seed);
}

std::vector<PhaseTime> time_phases_cuda(Gpt2& model, const Batch& batch, const StepContext& context,
                                        int repeats) {
  auto* const own = dynamic_cast<Gpt2Cuda*>(&model);
  require(own != nullptr, "[model] expected a model on the GPU");
  return own->time_phases(batch, context, repeats);
}

}  // namespace evenkeel

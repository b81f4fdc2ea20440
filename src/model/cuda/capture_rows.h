// What attention read and wrote, on its way from the device to a LayerCapture. Internal to src/model.
#pragma once

#include <vector>

#include "attention/attention_problem.h"
#include "gpu/cuda/pinned_memory.h"
#include "gpu/cuda/work_stream.h"
#include "model/cuda/activations.h"
#include "model/model.h"

namespace evenkeel::device {

class CaptureRows {
 public:
  CaptureRows(const ModelConfig& config, TensorType type) : config_(config), type_(type) {}

  // Room for what is asked for (L): the captures whose tensors are not empty, of sequences of T tokens.
  void start(const std::vector<LayerCapture>& asked, int64_t T);
  // Queues the copies of a layer. There once the stream has been waited for. REQUIRES: it was asked for, and its
  // d_o is there.
  void copy(int64_t layer, const LayerCapture& asked, const LayerMemory& m, const void* d_o,
            const WorkStream& stream) const;
  // From there into the captures.
  void unpack(std::vector<LayerCapture>& captures) const;

 private:
  // The first rows of one layer, as they lie on the device.
  struct Rows {
    void *ln1 = nullptr, *qkv = nullptr;  // (rows, C), (rows, qkv width)
    void* qk = nullptr;                   // (rows, (H + G) D): where q and k are not read from qkv
    void *o = nullptr, *d_o = nullptr;    // (rows, H D)
    float* lse = nullptr;                 // (B, H, T)
  };
  size_t element_bytes() const { return type_ == TensorType::bf16 ? 2 : 4; }
  int64_t row_count(const LayerCapture& c) const {  // up to the last one that is wanted
    return (c.x.shape()[0] - 1) * T_ + c.x.shape()[2];
  }
  size_t lay_out(const std::vector<LayerCapture>& asked, void* memory);
  // Columns [first, first + H D) of rows of so many, by head, in FP32.
  void unpack(Tensor<float>& to, const void* from, int64_t columns, int64_t first) const;

  const ModelConfig& config_;
  const TensorType type_;
  int64_t T_ = 0;
  PinnedMemory memory_;
  std::vector<Rows> layers_;  // (L), in memory_
};

}  // namespace evenkeel::device

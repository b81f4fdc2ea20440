// Matrix products on a GPU, by NVIDIA's cuBLASLt, which is looked for when the first is made: nothing links to it.
// Plain C++, in every build; without CUDA, or where there is no such library, making a DeviceProducts throws
// DataError and says what was looked for.
//
// Sums are FP32 whatever the operands are. The same product has the same bits every time. No algorithm in use
// adds in an order that may change. The choice is made once for a shape, a GPU and a version of cuBLASLt, by time
// (quickest.h), on a GPU that has been busy for a while. It is then kept in a file of the user's cache folder (products.txt in $XDG_CACHE_HOME/evenkeel or
// ~/.cache/evenkeel). Where that file cannot be kept, nothing is timed: cuBLASLt's own first choice is used.
#pragma once

#include <cstdint>
#include <memory>

#include "attention/attention_problem.h"
#include "model/matrix_view.h"

namespace evenkeel {

using DeviceMatrix = MatrixView<void>;  // in device memory, of values that the product knows

// What happens to a sum before it is stored, in FP32. Where c_type is bf16, cuBLASLt may round the sum to it
// before a base or GELU' is applied. It does so on Hopper for some shapes: two roundings instead of one, both to
// nearest.
enum class ProductEnd {
  plain,
  gelu,        // aux = y, then C = GELU(y), both from the unrounded y (the tanh form)
  gelu_slope,  // C = y GELU'(aux)
};

// C = scale A B + base_scale base + bias.
struct DeviceProduct {
  int64_t rows, columns, depth;
  TensorType type;  // of a and b; products of fp32 are exact FP32 ones, never TF32
  DeviceMatrix a;   // (rows, depth)
  DeviceMatrix b;   // (depth, columns)
  void* c;          // (rows, columns), stride c_stride
  int64_t c_stride;
  TensorType c_type;
  // (rows, columns) of c_type, stride c_stride; c itself to add to it. With base_scale 0 it is not read, but the
  // algorithm is the one with which it would be added: the sums have the same order.
  const void* base = nullptr;
  const void* bias = nullptr;  // (columns) of c_type
  float scale = 1, base_scale = 1;
  ProductEnd end = ProductEnd::plain;
  void* aux = nullptr;  // (rows, columns) of c_type, stride c_stride
  // Several products of one shape, a, b, c and base so many elements apart (0: the same for all). Without
  // bias and aux.
  int64_t batch = 1, a_batch = 0, b_batch = 0, c_batch = 0;
};

// Products of one stream, one after another. Own one per stream: it holds the memory that they work in.
class DeviceProducts {
 public:
  explicit DeviceProducts(void* stream);  // a cudaStream_t, which outlives this
  ~DeviceProducts();
  DeviceProducts(const DeviceProducts&) = delete;
  DeviceProducts& operator=(const DeviceProducts&) = delete;

  // Queued; does not wait, except where the shape is new (then some algorithms are timed, c untouched
  // meanwhile). REQUIRES: while a graph is being captured, no shape is new. c overlaps neither a nor b.
  void multiply(const DeviceProduct& product);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// What choosing algorithms has cost in this process: shapes that were timed, and seconds.
struct ProductChoices {
  int count;
  double seconds;
};
ProductChoices product_choices();

}  // namespace evenkeel

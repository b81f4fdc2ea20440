// Matrix products on the GPU against sums in FP64 on the host: every transposition, type, end and base, odd sizes,
// batches; the same bits twice; choices that are kept. Tests named small_* are also run under compute-sanitizer.
#include "model/device_product.h"
#include "gpu/device_memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "numerics/random.h"
#include "numerics/rounding.h"

namespace evenkeel {
namespace {

size_t at(int64_t n) { return static_cast<size_t>(n); }
float to_bf16(double x) { return round_to(Rounding{kBf16}, static_cast<float>(x)); }

// Choices are kept in a folder of this process alone.
const std::filesystem::path kCache = [] {
  const auto folder =
      std::filesystem::temp_directory_path() / ("device_product_test." + std::to_string(getpid()));
  setenv("XDG_CACHE_HOME", folder.c_str(), 1);
  return folder;
}();

// Values on the host and the same in device memory, in one of the two types.
class Array {
 public:
  Array(int64_t count, TensorType type, uint32_t seed) : values(at(count)), type_(type) {
    RandomStream draw({1, 0, seed});
    for (float& v : values)
      v = type == TensorType::bf16 ? to_bf16(draw.normal()) : static_cast<float>(draw.normal());
    memory_ = DeviceMemory(at(count) * bytes());
    upload();
  }
  void* data() const { return memory_.data(); }
  void upload() {
    if (type_ == TensorType::fp32) return memory_.upload(values.data(), values.size() * 4);
    std::vector<uint16_t> halves;
    for (float v : values) halves.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(v) >> 16));
    memory_.upload(halves.data(), halves.size() * 2);
  }
  std::vector<float> download() const {
    if (type_ == TensorType::fp32) return memory_.download<float>();
    std::vector<float> result;
    for (uint16_t half : memory_.download<uint16_t>())
      result.push_back(std::bit_cast<float>(static_cast<uint32_t>(half) << 16));
    return result;
  }
  std::vector<float> values;

 private:
  size_t bytes() const { return type_ == TensorType::bf16 ? 2 : 4; }
  TensorType type_;
  DeviceMemory memory_;
};

double gelu(double x) { return 0.5 * x * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))); }
double gelu_slope(double x) {
  const double u = 0.7978845608028654 * (x + 0.044715 * x * x * x), t = std::tanh(u);
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x);
}

struct Case {
  int64_t rows, columns, depth;
  TensorType type = TensorType::bf16, c_type = TensorType::fp32;
  bool a_transposed = false, b_transposed = false;
  enum { none, beside, in_place } base = none;
  bool bias = false;
  ProductEnd end = ProductEnd::plain;
  float scale = 1, base_scale = 1;
  int64_t batch = 1;
};

void check(const Case& c) {
  SCOPED_TRACE(testing::Message() << c.rows << " x " << c.columns << " x " << c.depth << " type "
                                  << static_cast<int>(c.type) << " -> " << static_cast<int>(c.c_type)
                                  << " transposed " << c.a_transposed << c.b_transposed << " base " << c.base
                                  << " bias " << c.bias << " end " << static_cast<int>(c.end) << " batch "
                                  << c.batch);
  const DeviceStream stream;
  DeviceProducts products(stream.get());
  const Array a(c.batch * c.rows * c.depth, c.type, 1), b(c.batch * c.depth * c.columns, c.type, 2);
  const Array base(c.batch * c.rows * c.columns, c.c_type, 3), bias(c.columns, c.c_type, 4);
  const Array aux(c.rows * c.columns, c.c_type, 5);
  const auto run = [&](std::vector<float>& aux_after) {
    const Array out(c.batch * c.rows * c.columns, c.c_type, 3);  // what `base` is
    device_wait();
    DeviceProduct p{c.rows,
                    c.columns,
                    c.depth,
                    c.type,
                    c.a_transposed ? DeviceMatrix::transposed(a.data(), c.rows)
                                   : DeviceMatrix::rows_of(a.data(), c.depth),
                    c.b_transposed ? DeviceMatrix::transposed(b.data(), c.depth)
                                   : DeviceMatrix::rows_of(b.data(), c.columns),
                    out.data(),
                    c.columns,
                    c.c_type};
    if (c.base == Case::beside) p.base = base.data();
    if (c.base == Case::in_place) p.base = p.c;
    if (c.bias) p.bias = bias.data();
    p.end = c.end;
    if (c.end != ProductEnd::plain) p.aux = aux.data();
    p.scale = c.scale, p.base_scale = c.base_scale;
    p.batch = c.batch;
    p.a_batch = c.rows * c.depth, p.b_batch = c.depth * c.columns, p.c_batch = c.rows * c.columns;
    products.multiply(p);
    device_wait();
    aux_after = aux.download();
    return out.download();
  };
  std::vector<float> aux_first, aux_second;
  const std::vector<float> first = run(aux_first), second = run(aux_second);
  EXPECT_EQ(first, second) << "not the same bits";
  double worst = 0, worst_aux = 0;
  for (int64_t n = 0; n < c.batch; ++n)
    for (int64_t i = 0; i < c.rows; ++i)
      for (int64_t j = 0; j < c.columns; ++j) {
        double sum = 0, size = 0;
        for (int64_t k = 0; k < c.depth; ++k) {
          const int64_t in_a = c.a_transposed ? k * c.rows + i : i * c.depth + k;
          const int64_t in_b = c.b_transposed ? j * c.depth + k : k * c.columns + j;
          const double term = static_cast<double>(a.values[at(n * c.rows * c.depth + in_a)]) *
                              static_cast<double>(b.values[at(n * c.depth * c.columns + in_b)]);
          sum += term, size += std::fabs(term);
        }
        const size_t place = at((n * c.rows + i) * c.columns + j);
        double y = c.scale * sum, rounded_before = 0;
        if (c.base != Case::none) y += c.base_scale * static_cast<double>(base.values[place]);
        if (c.bias) y += static_cast<double>(bias.values[at(j)]);
        const double before_end = y;
        if (c.end == ProductEnd::gelu) y = gelu(y);
        if (c.base != Case::none) rounded_before = std::fabs(c.scale * sum);
        if (c.end == ProductEnd::gelu_slope) {
          y *= gelu_slope(static_cast<double>(aux.values[place]));
          rounded_before = std::fabs(y);
        }
        // FP32 sums lose at most depth units of the sum of sizes, and far fewer as a rule. The result's own
        // rounding comes on top, and another before a base or a slope is applied (device_product.h).
        const double unit = c.c_type == TensorType::bf16 ? 0x1p-8 : 0x1p-23;
        const double bound = unit * (std::fabs(y) + rounded_before) +
                             0x1p-20 * (size + std::fabs(before_end)) + 1e-5 * (c.end != ProductEnd::plain);
        worst = std::max(worst, std::fabs(static_cast<double>(first[place]) - y) / bound);
        if (c.end == ProductEnd::gelu)
          worst_aux = std::max(worst_aux, std::fabs(static_cast<double>(aux_first[place]) - before_end) /
                                              (std::fabs(before_end) * 0x1p-8 + 0x1p-20 * size));
      }
  EXPECT_LE(worst, 1) << "error over its bound";
  EXPECT_LE(worst_aux, 1) << "GELU's input: error over its bound";
}

using enum TensorType;

TEST(DeviceProduct, small_shapes_every_transposition) {
  for (const TensorType type : {bf16, fp32})
    for (const bool a : {false, true})
      for (const bool b : {false, true}) {
        check({.rows = 48, .columns = 32, .depth = 64, .type = type, .a_transposed = a, .b_transposed = b});
        check({.rows = 1, .columns = 40, .depth = 72, .type = type, .a_transposed = a, .b_transposed = b});
      }
}

TEST(DeviceProduct, small_base_bias_and_scale) {
  for (const TensorType type : {bf16, fp32}) {
    check({.rows = 40, .columns = 24, .depth = 32, .type = type, .base = Case::in_place});
    check({.rows = 40, .columns = 24, .depth = 32, .type = type, .base = Case::beside});
    check({.rows = 40, .columns = 24, .depth = 32, .type = type, .base = Case::beside, .bias = true});
    check({.rows = 40,
           .columns = 24,
           .depth = 32,
           .type = type,
           .base = Case::in_place,
           .scale = -2.5f,
           .base_scale = 0.75f});
  }
  check({.rows = 40, .columns = 24, .depth = 32, .c_type = bf16});
  check({.rows = 40, .columns = 24, .depth = 32, .c_type = bf16, .bias = true});
  check({.rows = 40,
         .columns = 24,
         .depth = 32,
         .c_type = bf16,
         .base = Case::in_place,
         .scale = 2,
         .base_scale = 3});
}

// A base that is not read: the same algorithm, and so the same order, as where it is added.
TEST(DeviceProduct, small_base_that_is_not_read) {
  check({.rows = 24,
         .columns = 40,
         .depth = 72,
         .a_transposed = true,
         .base = Case::in_place,
         .base_scale = 0});
}

TEST(DeviceProduct, small_gelu) {
  check({.rows = 40, .columns = 64, .depth = 32, .c_type = bf16, .end = ProductEnd::gelu});
  check({.rows = 40, .columns = 64, .depth = 32, .c_type = bf16, .bias = true, .end = ProductEnd::gelu});
  check({.rows = 40,
         .columns = 64,
         .depth = 32,
         .c_type = bf16,
         .b_transposed = true,
         .end = ProductEnd::gelu_slope});
}

TEST(DeviceProduct, small_batches) {
  check({.rows = 24, .columns = 24, .depth = 40, .c_type = bf16, .b_transposed = true, .batch = 3});
  check({.rows = 24,
         .columns = 40,
         .depth = 24,
         .c_type = bf16,
         .base = Case::in_place,
         .scale = 2,
         .batch = 3});
  check({.rows = 24, .columns = 40, .depth = 24, .type = fp32, .batch = 3});
}

// Deep sums are split over multiprocessors; odd sizes; the shapes of weight gradients.
TEST(DeviceProduct, deep_and_odd) {
  check({.rows = 64, .columns = 96, .depth = 20000, .a_transposed = true, .base = Case::in_place});
  check({.rows = 101, .columns = 64, .depth = 4099, .a_transposed = true, .base = Case::in_place});
  for (const TensorType type : {bf16, fp32}) {
    check({.rows = 37, .columns = 51, .depth = 17, .type = type});
    check(
        {.rows = 37, .columns = 51, .depth = 17, .type = type, .a_transposed = true, .base = Case::in_place});
    check({.rows = 37, .columns = 51, .depth = 17, .type = type, .b_transposed = true});
  }
}

TEST(DeviceProduct, choices_are_kept) {
  check({.rows = 256, .columns = 256, .depth = 512});
  std::ifstream file(kCache / "evenkeel" / "products.txt");
  ASSERT_TRUE(file.good());
  int lines = 0, ours = 0;
  for (std::string line; std::getline(file, line); ++lines)
    ours += line.find("| 256x256x512 bf16") != std::string::npos;
  EXPECT_EQ(ours, 1) << "of " << lines;
}

TEST(DeviceProduct, small_bad_requests_are_refused) {
  const DeviceStream stream;
  DeviceProducts products(stream.get());
  const DeviceMemory memory(4096);
  const DeviceMatrix m = DeviceMatrix::rows_of(memory.data(), 8);
  EXPECT_THROW(products.multiply({0, 8, 8, bf16, m, m, memory.data(), 8, fp32}), std::invalid_argument);
  EXPECT_THROW(products.multiply({8, 8, 8, bf16, {memory.data(), 8, 2}, m, memory.data(), 8, fp32}),
               std::invalid_argument);
  EXPECT_THROW(products.multiply({8, 8, 8, bf16, m, {nullptr, 8, 1}, memory.data(), 8, fp32}),
               std::invalid_argument);
  EXPECT_THROW(products.multiply({8, 8, 8, bf16, m, m, memory.data(), 7, fp32}), std::invalid_argument);
  DeviceProduct gelu{8, 8, 8, bf16, m, m, memory.data(), 8, bf16};
  gelu.end = ProductEnd::gelu;
  EXPECT_THROW(products.multiply(gelu), std::invalid_argument);
}

}  // namespace
}  // namespace evenkeel

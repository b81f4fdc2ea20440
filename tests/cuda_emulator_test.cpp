// The emulator of CUDA's threads: instructions against their definitions, and the faults that it is there to find, planted.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "gpu/cuda/copy_engine.cuh"
#include "gpu/cuda/mma.cuh"
#include "gpu/cuda/warp.cuh"
#include "numerics/random.h"

namespace evenkeel {
namespace {

using namespace gpu;
using cuda_emulator::KernelFault;
using cuda_emulator::Launch;
using cuda_emulator::Order;
constexpr Order kOrders[] = {Order::ascending, Order::descending, Order::random};
constexpr uint32_t kSeeds = 100;  // of random orders that look for a planted race

std::vector<float> numbers(size_t count, uint32_t stream) {
  RandomStream draw({1, 0, stream});
  std::vector<float> values(count);
  for (float& x : values) x = bf16_value(bf16_bits(static_cast<float>(draw.normal())));
  return values;
}
std::vector<uint16_t> stored(const std::vector<float>& values, bool fp16) {
  std::vector<uint16_t> bits;
  for (float x : values) bits.push_back(static_cast<uint16_t>(fp16 ? fp16_bits(x) : bf16_bits(x)));
  return bits;
}

// What may be wrong with the kernel below.
enum class Fault { none, no_wait, no_barrier, small_memory };

// c (64 x 16) = a (64 x kD) b (16 x kD)^T, or with b^T stored by rows: four warps, 16 rows each.
template <int kD, bool kFp16, bool kTransposed>
void product_kernel(const uint16_t* a, const uint16_t* b, float* c, Fault fault) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const uint32_t left = shared_address(dynamic_shared()), right = left + 64 * kD * 2;
  constexpr int kRightRows = kTransposed ? kD : 16, kRightColumns = kTransposed ? 64 : kD;
  // The warp that copies a row is never the one that reads it.
  for (int n = thread; n < 64 * kD / 8; n += 128) {
    const int row = (n / (kD / 8) + 16) % 64, piece = n % (kD / 8);
    copy_16_async(left + tile_offset<kD>(row, piece), a + row * kD + piece * 8, true);
  }
  for (int n = thread; n < kRightRows * kRightColumns / 8; n += 128) {
    const int row = n / (kRightColumns / 8), piece = n % (kRightColumns / 8);
    copy_16_async(right + tile_offset<kRightColumns>(row, piece), b + row * kRightColumns + piece * 8, true);
  }
  commit_copies();
  if (fault != Fault::no_wait) wait_for_copies<0>();
  if (fault != Fault::no_barrier) __syncthreads();
  float sum[2][4] = {};
  for (int k = 0; k < kD / 16; ++k) {
    uint32_t x[4], y[4];
    load_left<kD>(x, left, warp * 16, k, lane);
    if (kTransposed)
      load_right_columns<64>(y, right, 16 * k, 0, lane);
    else
      load_right_rows<kD>(y, right, 0, k, lane);
    for (int n = 0; n < 2; ++n) (kFp16 ? multiply_add_fp16 : multiply_add)(sum[n], x, y[2 * n], y[2 * n + 1]);
  }
  for (int n = 0; n < 2; ++n)
    for (int i = 0; i < 4; ++i)
      c[(warp * 16 + lane / 4 + i / 2 * 8) * 16 + 8 * n + lane % 4 * 2 + i % 2] = sum[n][i];
}

template <int kD, bool kFp16, bool kTransposed>
std::vector<float> run_product(Order order, Fault fault = Fault::none) {
  const auto a = stored(numbers(64 * kD, 0), kFp16);
  auto b = stored(numbers(16 * kD, 1), kFp16);
  if (kTransposed) {  // the first 16 of 64 columns are used
    std::vector<uint16_t> wide(64 * kD);
    for (int j = 0; j < 16; ++j)
      for (int k = 0; k < kD; ++k) wide[k * 64 + j] = b[j * kD + k];
    b = wide;
  }
  std::vector<float> c(64 * 16);
  const size_t bytes = 64 * kD * 2 + (kTransposed ? 64 * kD * 2 : 16 * kD * 2);
  cuda_emulator::run({.blocks = 1,
                      .threads = 128,
                      .shared_bytes = fault == Fault::small_memory ? bytes - 16 : bytes,
                      .order = order},
                     [&] { product_kernel<kD, kFp16, kTransposed>(a.data(), b.data(), c.data(), fault); });
  return c;
}

template <int kD, bool kFp16, bool kTransposed>
void expect_product() {
  const std::vector<float> a = numbers(64 * kD, 0), b = numbers(16 * kD, 1);
  for (Order order : kOrders) {
    const int64_t conflicts = cuda_emulator::machine().matrix_conflicts;
    const std::vector<float> c = run_product<kD, kFp16, kTransposed>(order);
    for (int i = 0; i < 64; ++i)
      for (int j = 0; j < 16; ++j) {
        double exact = 0, size = 0;
        for (int k = 0; k < kD; ++k) {
          const double x = double{a[i * kD + k]} * double{b[j * kD + k]};
          exact += x, size += std::fabs(x);
        }
        ASSERT_NEAR(c[i * 16 + j], exact, size * 0x1p-24 * kD / 16) << i << ", " << j;
      }
    EXPECT_EQ(cuda_emulator::machine().matrix_conflicts, conflicts);
  }
}

TEST(CudaEmulator, products_of_matrices_in_shared_memory) {
  expect_product<32, false, false>();
  expect_product<64, false, false>();
  expect_product<128, false, false>();
  expect_product<64, true, false>();  // values of bf16 near 1 are values of fp16, too
  expect_product<64, false, true>();
  expect_product<64, true, true>();
}

TEST(CudaEmulator, a_copy_that_nobody_waited_for_is_not_there) {
  for (Order order : kOrders) {
    const std::vector<float> c = run_product<64, false, false>(order, Fault::no_wait);
    for (float x : c) EXPECT_TRUE(std::isnan(x));
  }
}

TEST(CudaEmulator, a_missing_barrier_shows_in_some_order) {
  bool found = false;
  for (Order order : kOrders)
    for (float x : run_product<64, false, false>(order, Fault::no_barrier)) found |= std::isnan(x);
  EXPECT_TRUE(found);
}

// The kernel's fault, in words.
template <class Kernel>
std::string fault_of(const Launch& launch, Kernel kernel) {
  try {
    cuda_emulator::run(launch, kernel);
  } catch (const KernelFault& fault) {
    return fault.what();
  }
  return "none";
}
void expect_fault(const char* word, const std::string& fault) {
  EXPECT_NE(fault.find(word), std::string::npos) << fault;
}

TEST(CudaEmulator, accesses_outside_shared_memory_are_faults) {
  EXPECT_THROW((run_product<64, false, false>(Order::ascending, Fault::small_memory)), KernelFault);
#if !defined(__SANITIZE_ADDRESS__)  // which stops the program at such a write
  expect_fault("wrote outside",
               fault_of({.threads = 32, .shared_bytes = 64}, [] { dynamic_shared()[64 + threadIdx.x] = 0; }));
#endif
  expect_fault("none",
               fault_of({.threads = 32, .shared_bytes = 64}, [] { dynamic_shared()[threadIdx.x] = 0; }));
}

TEST(CudaEmulator, threads_that_part_are_faults) {
  expect_fault("never come", fault_of({.threads = 64}, [] {
                 if (threadIdx.x < 40) __syncthreads();
               }));
  expect_fault("other lanes", fault_of({.threads = 32}, [] {
                 if (threadIdx.x < 5)
                   __syncwarp();
                 else
                   __any_sync(~0u, true);
               }));
  expect_fault("leaves out lanes", fault_of({.threads = 32}, [] { __shfl_sync(1u, 0.0f, 0); }));
  expect_fault("not aligned", fault_of({.threads = 32, .shared_bytes = 64}, [] {
                 uint32_t r[4];
                 load_matrices(r, 8);
               }));
  // And after a fault the machine works.
  expect_fault("none", fault_of({.threads = 64}, [] { __syncthreads(); }));
}

TEST(CudaEmulator, lanes_exchange_values) {
  for (Order order : kOrders) {
    std::vector<float> sum(64), largest(64), first(64);
    std::vector<int> any(64);
    cuda_emulator::run({.threads = 64, .order = order}, [&] {
      const unsigned n = threadIdx.x;
      const float x = static_cast<float>(n);
      sum[n] = quad_sum(x), largest[n] = warp_max(x), first[n] = __shfl_sync(~0u, x, 0);
      any[n] = __any_sync(~0u, n == 40);
    });
    for (unsigned n = 0; n < 64; ++n) {
      EXPECT_EQ(sum[n], 4 * (n / 4 * 4) + 6);
      EXPECT_EQ(largest[n], n / 32 * 32 + 31);
      EXPECT_EQ(first[n], n / 32 * 32);
      EXPECT_EQ(any[n], n >= 32);
    }
  }
}

TEST(CudaEmulator, blocks_wait_for_each_other_where_they_run_at_once) {
  int turn = 0;
  std::vector<int> order;
  const auto kernel = [&] {  // the last block goes first
    while (threadIdx.x == 0 && load_acquire(&turn) < 3 - static_cast<int>(blockIdx.x)) let_others_run();
    __syncthreads();
    if (threadIdx.x == 0) order.push_back(static_cast<int>(blockIdx.x)), add_release(&turn, 1);
  };
  cuda_emulator::run({.blocks = 4, .threads = 64, .blocks_at_once = 4}, kernel);
  EXPECT_EQ(order, (std::vector<int>{3, 2, 1, 0}));
  turn = 0;
  expect_fault("never come", fault_of({.blocks = 4, .threads = 64, .blocks_at_once = 3}, kernel));
}

// --- Races that need a warp or a block to be late: the fixed orders run through them

bool all_are(const std::vector<float>& values, float expected) {
  return std::all_of(values.begin(), values.end(), [&](float x) { return x == expected; });
}
// In how many random orders the kernel has another result, or a fault.
template <class Run>
int wrong_orders(Run run, float expected) {
  int wrong = 0;
  for (uint32_t seed = 1; seed <= kSeeds; ++seed) try {
      wrong += !all_are(run({.order = Order::random, .seed = seed}), expected);
    } catch (const KernelFault&) {
      ++wrong;
    }
  return wrong;
}

// One thread loads numbers for a warp, which adds one to them and hands them back through the same barrier. So the barrier has
// two phases a round. A thread that does not wait for the first may take it for the one before the first, which has the
// parity of the second: it goes on at once, and reads what has not arrived. (Hopper's backward pass had this fault.)
std::vector<float> run_hand_back(Launch launch, bool waits_for_its_load) {
  constexpr int kRounds = 6;
  struct Shared {
    float numbers[32];
    uint64_t full, given, looking, taken;
  };
  alignas(16) static float ones[32];
  std::fill(std::begin(ones), std::end(ones), 1.0f);
  std::vector<float> out(kRounds * 32);
  launch.threads = 64;
  launch.shared_bytes = sizeof(Shared);
  cuda_emulator::run(launch, [&] {
    auto& sm = *reinterpret_cast<Shared*>(dynamic_shared());
    if (threadIdx.x == 0)
      for (uint64_t* barrier : {&sm.full, &sm.given, &sm.looking, &sm.taken}) barrier_init(barrier, 1);
    __syncthreads();
    for (uint32_t round = 0; round < kRounds; ++round)
      if (threadIdx.x == 0) {
        barrier_expect_bytes(&sm.full, sizeof ones);
        load_bytes(sm.numbers, ones, sizeof ones, &sm.full);
        if (waits_for_its_load) barrier_wait(&sm.full, 0);
        barrier_arrive(&sm.given);
        barrier_wait(&sm.looking, round % 2);
        barrier_wait(&sm.full, 1);
        std::copy_n(sm.numbers, 32, out.data() + round * 32);
        barrier_arrive(&sm.taken);
      } else if (threadIdx.x >= 32) {
        barrier_wait(&sm.given, round % 2);
        if (threadIdx.x == 32) barrier_arrive(&sm.looking);
        __syncwarp();
        barrier_wait(&sm.full, 0);
        sm.numbers[threadIdx.x - 32] += 1;
        __syncwarp();
        if (threadIdx.x == 32) barrier_arrive(&sm.full);
        barrier_wait(&sm.taken, round % 2);
      }
  });
  return out;
}
TEST(CudaEmulator, random_orders_find_a_wait_for_the_wrong_phase) {
  const auto right = [](const Launch& launch) { return run_hand_back(launch, true); };
  const auto wrong = [](const Launch& launch) { return run_hand_back(launch, false); };
  for (Order order : {Order::ascending, Order::descending}) {
    EXPECT_TRUE(all_are(right({.order = order}), 2));
    EXPECT_TRUE(all_are(wrong({.order = order}), 2))
        << "then the race is no example of what random orders are for";
  }
  EXPECT_EQ(wrong_orders(right, 2), 0);
  EXPECT_GT(wrong_orders(wrong, 2), 0);
}

// Two blocks store to the same memory, block 1 when its turn has come. A store is on its way until it is waited for.
std::vector<float> run_turns(Launch launch, bool waits_for_its_store) {
  alignas(16) static float target[32];
  std::fill(std::begin(target), std::end(target), 0.0f);
  int turn = 0;
  launch.blocks = launch.blocks_at_once = 2;
  launch.shared_bytes = sizeof target;
  cuda_emulator::run(launch, [&] {
    auto* const part = reinterpret_cast<float*>(dynamic_shared());
    part[threadIdx.x] = static_cast<float>(blockIdx.x + 1);
    __syncwarp();
    if (threadIdx.x != 0) return;
    while (load_acquire(&turn) < static_cast<int>(blockIdx.x)) let_others_run();
    store_bytes(target, part, sizeof target);
    store_commit();
    store_wait_read<0>();
    if (waits_for_its_store) store_wait<0>();
    add_release(&turn, 1);
  });
  return {std::begin(target), std::end(target)};
}
TEST(CudaEmulator, random_orders_find_a_turn_that_is_passed_on_too_early) {
  const auto right = [](const Launch& launch) { return run_turns(launch, true); };
  const auto wrong = [](const Launch& launch) { return run_turns(launch, false); };
  for (Order order : {Order::ascending, Order::descending}) EXPECT_TRUE(all_are(wrong({.order = order}), 2));
  EXPECT_EQ(wrong_orders(right, 2), 0);
  EXPECT_GT(wrong_orders(wrong, 2), 0);
}

TEST(CudaEmulator, a_seed_is_an_order) {
  const auto order_of = [](uint32_t seed) {
    std::vector<unsigned> warps;
    cuda_emulator::run({.threads = 256, .order = Order::random, .seed = seed}, [&] {
      for (int n = 0; n < 4; ++n) {
        if (threadIdx.x % 32 == 0) warps.push_back(threadIdx.x / 32);
        __syncwarp();
      }
    });
    return warps;
  };
  EXPECT_EQ(order_of(1), order_of(1));
  EXPECT_NE(order_of(1), order_of(2));
  expect_fault("never come", fault_of({.threads = 64, .order = Order::random}, [] {
                 while (threadIdx.x == 0) let_others_run();
               }));
}

TEST(CudaEmulator, rows_that_meet_in_a_bank_are_counted) {
  auto& machine = cuda_emulator::machine();
  const int64_t before = machine.matrix_conflicts, loads = machine.matrix_loads;
  cuda_emulator::run({.threads = 32, .shared_bytes = 32 * 128}, [] {
    uint32_t r[4];
    load_matrices(r, shared_address(dynamic_shared()) + threadIdx.x * 128);
  });
  EXPECT_EQ(machine.matrix_conflicts - before, 4 * 7);
  EXPECT_EQ(machine.matrix_loads - loads, 4);
}

TEST(CudaEmulator, numbers_of_16_bits) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const bool fp16_nan = (bits & 0x7c00) == 0x7c00 && (bits & 0x3ff) != 0,
               bf16_nan = (bits & 0x7f80) == 0x7f80 && (bits & 0x7f) != 0;
    ASSERT_TRUE(fp16_nan || fp16_bits(fp16_value(bits)) == bits) << bits;
    ASSERT_TRUE(bf16_nan || bf16_bits(bf16_value(bits)) == bits) << bits;
  }
  EXPECT_EQ(pack_fp16(1.0f, -2.0f), 0xc0003c00u);
  EXPECT_EQ(pack_bf16(1.0f, -2.0f), 0xc0003f80u);
  EXPECT_EQ(fp16_bits(1 + 0x1p-11f), 0x3c00u);  // half-way: to even
  EXPECT_EQ(fp16_bits(1 + 0x1p-11f + 0x1p-20f), 0x3c01u);
  EXPECT_EQ(fp16_bits(65520), 0x7c00u);
  EXPECT_EQ(__byte_perm(0x33221100, 0x77665544, 0x7632), 0x77663322u);
  EXPECT_EQ(exp2_approx(-200), 0);
  EXPECT_EQ(exp2_approx(-INFINITY), 0);
  EXPECT_EQ(max_or_nan(-2, 3), 3);
  EXPECT_TRUE(std::isnan(max_or_nan(NAN, 3)) && std::isnan(max_or_nan(3, NAN)));
}

}  // namespace
}  // namespace evenkeel

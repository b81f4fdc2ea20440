// Runs CUDA kernels on the CPU, so that they can be tested without a GPU. A kernel's header is compiled as C++ with this
// folder before src in the include path. So gpu/cuda/instructions.cuh and cuda_runtime.h of this folder stand in for
// those of the device. All threads of a block run, each as a fiber with a stack of its own, one at a time, in one order:
// the same bits every time.
//
// Two orders are fixed: a warp runs until it has to wait, and who waits asks again when nobody else can go on. So warps are
// never far apart. In the third one they are: which warp goes on is drawn at every point where one can be switched, some
// warps are held back for a while, and copies take longer than they must. The same seed gives the same order.
//
// It finds threads that wait at different places (as an error). It finds reads of shared memory that was not written or has
// not arrived (as NaN: memory starts as 0xff, and a copy's target is 0xff until the thread waits for it). It finds warps
// that rely on being first or on being quick (run with several orders, and compare), accesses outside shared memory, and matrices read with bank
// conflicts (counted). It does not find races between the accesses of one warp's lanes, or the weak order of a GPU's memory.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace evenkeel::cuda_emulator {

// Which warp goes on where several can, and which of its lanes first.
enum class Order { ascending, descending, random };

struct Launch {
  int blocks = 1, threads = 32;
  size_t shared_bytes = 0;
  Order order = Order::ascending;
  int blocks_at_once = 1;  // that can wait for each other
  uint32_t seed = 0;       // of Order::random
};

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

class KernelFault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A stack and where it stopped.
class Fiber {
 public:
  static constexpr size_t kStackBytes = 256 << 10;
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber() {
    if (stack_) munmap(stack_, kStackBytes);
  }

  // The next switch to this fiber calls `entry`, which must not return.
  void start(void (*entry)()) {
    if (!stack_) {
      void* const memory =
          mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory == MAP_FAILED) throw std::runtime_error("no memory for the stack of an emulated thread");
      stack_ = static_cast<char*>(memory);
    }
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(stack_, kStackBytes);
    fake_stack_ = nullptr;
#endif
#if defined(__x86_64__)
    // As a call would leave it: the return address, and above it an aligned stack; below it six saved registers.
    auto** const top = reinterpret_cast<void**>(stack_ + kStackBytes);
    top[-1] = nullptr;
    top[-2] = reinterpret_cast<void*>(entry);
    std::memset(top - 8, 0, 6 * sizeof(void*));
    stopped_ = top - 8;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_;
    context_.uc_stack.ss_size = kStackBytes;
    makecontext(&context_, entry, 0);
#endif
  }

  void switch_to(Fiber& other) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&fake_stack_, other.stack_ ? other.stack_ : other.bottom_,
                                   other.stack_ ? kStackBytes : other.size_);
#endif
#if defined(__x86_64__)
    exchange(&stopped_, other.stopped_);
#else
    swapcontext(&context_, &other.context_);
#endif
    arrived();
  }
  // To be called first in `entry`, with the fiber that it was started from.
  void arrived([[maybe_unused]] Fiber* first = nullptr) {
#if defined(__SANITIZE_ADDRESS__)
    const void* bottom = nullptr;
    size_t size = 0;
    __sanitizer_finish_switch_fiber(fake_stack_, &bottom, &size);
    if (first && !first->stack_ && !first->bottom_) first->bottom_ = bottom, first->size_ = size;
#endif
  }

 private:
#if defined(__x86_64__)
  __attribute__((naked, noinline)) static void exchange(void* /*save: void***/, void* /*to*/) {
    asm("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
        "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
        "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret");
  }
  void* stopped_ = nullptr;
#else
  ucontext_t context_{};
#endif
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack_ = nullptr;
  const void* bottom_ = nullptr;  // of the stack that is not ours
  size_t size_ = 0;
#endif
  char* stack_ = nullptr;
};

class Machine {
 public:
  static constexpr int kWarp = 32;
  static constexpr uint8_t kUnwritten = 0xff, kGuard = 0xa5;
  static constexpr size_t kGuardBytes = 4096;

  Index thread_index, block_index, grid;
  int64_t blocks_started = 0;                      // of all launches
  int64_t matrix_loads = 0, matrix_conflicts = 0;  // of ldmatrix: 8 rows at a time; rows that met in a bank
  int64_t boxes_loaded = 0;                        // by the copy engine

  // Every thread of every block calls `kernel`. Throws KernelFault.
  void run(const Launch& launch, const std::function<void()>& kernel) {
    if (launch.threads % kWarp != 0) throw KernelFault("expected whole warps");
    launch_ = launch;
    kernel_ = &kernel;
    fault_.clear();
    random_ = launch.seed;
    hold_for_ = 0;
    copies_are_late_ = false;
    grid = {static_cast<unsigned>(launch.blocks), 1, 1};
    blocks_.resize(static_cast<size_t>(std::min(launch.blocks_at_once, launch.blocks)));
    next_block_ = 0;
    for (Block& block : blocks_) start_block(block);
    while (true) {
      Thread* const next = find_ready();
      if (!next) break;
      current_ = next;
      set_place();
      main_.switch_to(next->fiber);
      if (!fault_.empty()) break;
    }
    for (Block& block : blocks_) {
      if (fault_.empty() && block.alive > 0) fault_ = "threads wait for others that never come";
      check_guards(block);
      release_guards(block);
    }
    if (!fault_.empty()) throw KernelFault(fault_);
  }

  // --- What the instructions are made of

  uint8_t* shared_memory() const { return current_->block->shared; }
  // `bytes` at this address of shared memory; a fault where they are not inside or not aligned.
  uint8_t* shared_at(uint32_t address, size_t bytes) {
    if (address + bytes > launch_.shared_bytes) fail("an access outside shared memory");
    if (address % bytes != 0) fail("an access to shared memory that is not aligned");
    return shared_memory() + address;
  }

  // All lanes of the warp meet. `operand` is the lane's own; the last lane to arrive calls all(operands of 32 lanes).
  template <class Operand, class All>
  void meet(const char* what, Operand& operand, All all) {
    Warp& warp = *current_->warp;
    if (warp.arrived > 0 && warp.what != what) fail(what, warp.what);
    warp.what = what;
    warp.operand[current_->lane] = &operand;
    if (++warp.arrived == kWarp) {
      warp.arrived = 0;
      all(reinterpret_cast<Operand**>(warp.operand));
      warp.ready = ~0u;
      if (is_random()) idle_ = 0;
      return;
    }
    stop();
  }
  void warp_barrier() {
    char nothing = 0;
    meet("__syncwarp", nothing, [](char**) {});
  }
  void block_barrier() {
    Block& block = *current_->block;
    if (++block.arrived == launch_.threads) {
      block.arrived = 0;
      for (Warp& warp : block.warps) warp.ready = ~0u;
      return;
    }
    stop();
  }
  // Other blocks may go on; this thread too, later.
  void let_others_run() {
    current_->warp->paused |= 1u << current_->lane;
    stop();
  }
  // Where a GPU may switch to another warp, though this one could go on. Instructions by which warps and blocks wait for each
  // other, and copies, call it.
  void may_switch() {
    if (is_random() && draw(4) == 0) let_others_run();
  }
  // Does a copy that somebody waits for need longer? All lanes of a warp that is switched to get the same answer.
  bool copy_is_late() const { return copies_are_late_; }

  template <class T, class From>
  T shuffle(uint32_t lanes, T value, From from) {
    if (lanes != ~0u) fail("a shuffle that leaves out lanes");
    struct Operand {
      T value, result;
      int from;
    } operand{value, value, from(current_->lane)};
    meet("a shuffle", operand, [](Operand** all) {
      for (int lane = 0; lane < kWarp; ++lane) all[lane]->result = all[all[lane]->from]->value;
    });
    return operand.result;
  }
  uint32_t vote(uint32_t lanes, bool value) {
    if (lanes != ~0u) fail("a vote that leaves out lanes");
    struct Operand {
      bool value;
      uint32_t result;
    } operand{value, 0};
    meet("a vote", operand, [](Operand** all) {
      uint32_t bits = 0;
      for (int lane = 0; lane < kWarp; ++lane) bits |= static_cast<uint32_t>(all[lane]->value) << lane;
      for (int lane = 0; lane < kWarp; ++lane) all[lane]->result = bits;
    });
    return operand.result;
  }

  // The target is unreadable until the thread waits for the copy's group. source null: zeros.
  void copy_later(uint8_t* target, const void* source, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(source) % bytes != 0) fail("a copy from memory that is not aligned");
    std::memset(target, kUnwritten, bytes);
    current_->copies.push_back({target, source, bytes, current_->group});
  }
  void commit_copies() { ++current_->group; }
  void wait_for_copies(int pending) {
    std::vector<Copy>& copies = current_->copies;
    size_t done = 0;
    for (; done < copies.size() && copies[done].group < current_->group - pending; ++done) {
      const Copy& copy = copies[done];
      if (copy.source)
        std::memcpy(copy.target, copy.source, copy.bytes);
      else
        std::memset(copy.target, 0, copy.bytes);
    }
    copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(done));
  }

  // A store of the copy engine. read(bytes) takes them from shared memory when the thread waits for that. write(bytes) puts
  // them where they belong when it waits for that, or when the thread ends.
  struct Store {
    std::function<std::vector<uint8_t>()> read;
    std::function<void(const std::vector<uint8_t>&)> write;
    int group = 0;
    bool is_read = false;
    std::vector<uint8_t> bytes = {};
  };
  void store_later(Store store) {
    store.group = current_->store_group;
    current_->stores.push_back(std::move(store));
  }
  void commit_stores() { ++current_->store_group; }
  void wait_for_stores(int pending, bool until_written) {
    std::vector<Store>& stores = current_->stores;
    size_t done = 0;
    for (; done < stores.size() && stores[done].group < current_->store_group - pending; ++done) {
      Store& store = stores[done];
      if (!store.is_read) store.bytes = store.read();
      store.is_read = true;
      if (until_written) store.write(store.bytes);
    }
    if (until_written) stores.erase(stores.begin(), stores.begin() + static_cast<std::ptrdiff_t>(done));
  }

  // A barrier of the block, by its number.
  struct NamedBarrier {
    int arrived = 0, generation = 0;
  };
  NamedBarrier& named_barrier(int id) { return current_->block->named[static_cast<size_t>(id)]; }

  // What instructions keep of the thread that runs: new in every block.
  template <class T>
  T& of_thread() {
    struct Kept {
      int64_t block = -1;
      T value;
    };
    static std::deque<Kept> all;  // references stay good when it grows
    constexpr size_t kMostThreads = 1024;
    const size_t n = static_cast<size_t>(current_->block - blocks_.data()) * kMostThreads + current_->index;
    if (all.size() <= n) all.resize(n + 1);
    if (all[n].block != current_->block->serial) all[n] = {current_->block->serial, T{}};
    return all[n].value;
  }

  // Leaves the thread where it is for good: nothing on its stack is destroyed, so nothing there may own memory.
  [[noreturn]] void fail(const char* what, const char* more = "") {
    describe_fault(what, more);
    current_->fiber.switch_to(main_);
    __builtin_unreachable();
  }

 private:
  struct Copy {
    uint8_t* target;
    const void* source;
    size_t bytes;
    int group;
  };
  struct Block;
  struct Warp {
    uint32_t ready = 0, paused = 0;  // lanes that can go on; that will when nobody else can
    bool held = false;               // Order::random: others go first, for now
    int arrived = 0;                 // of `meet`
    const char* what = "";
    void* operand[kWarp];
  };
  struct Thread {
    Fiber fiber;
    Block* block = nullptr;
    Warp* warp = nullptr;
    int lane = 0;
    unsigned index = 0;
    std::vector<Copy> copies;
    std::vector<Store> stores;
    int group = 0, store_group = 0;
  };
  struct Block {
    unsigned index = 0;
    int64_t serial = 0;  // of all launches
    int alive = 0, arrived = 0;
    std::array<NamedBarrier, 16> named;
    std::vector<Warp> warps;
    std::vector<std::unique_ptr<Thread>> threads;
    std::unique_ptr<uint8_t[]> memory;
    uint8_t* shared = nullptr;
  };

  void start_block(Block& block) {
    if (next_block_ == launch_.blocks) return;
    block.index = static_cast<unsigned>(next_block_++);
    block.serial = ++blocks_started;
    block.alive = launch_.threads;
    block.arrived = 0;
    block.named.fill({});
    idle_ = 0;
    constexpr size_t kAlignment = 1024;
    block.memory = std::make_unique<uint8_t[]>(launch_.shared_bytes + 2 * kGuardBytes + kAlignment);
    const auto start = reinterpret_cast<uintptr_t>(block.memory.get()) + kGuardBytes;
    block.shared = block.memory.get() + kGuardBytes + (kAlignment - start % kAlignment) % kAlignment;
    std::memset(block.shared - kGuardBytes, kGuard, kGuardBytes);
    std::memset(block.shared, kUnwritten, launch_.shared_bytes);
    std::memset(block.shared + launch_.shared_bytes, kGuard, kGuardBytes);
#if defined(__SANITIZE_ADDRESS__)
    ASAN_POISON_MEMORY_REGION(block.shared - kGuardBytes, kGuardBytes);
    ASAN_POISON_MEMORY_REGION(block.shared + launch_.shared_bytes, kGuardBytes);
#endif
    const auto threads = static_cast<size_t>(launch_.threads);
    block.warps.assign(threads / kWarp, Warp{});
    while (block.threads.size() < threads) block.threads.push_back(std::make_unique<Thread>());
    for (size_t n = 0; n < threads; ++n) {
      Thread& thread = *block.threads[n];
      thread.block = &block;
      thread.warp = &block.warps[n / kWarp];
      thread.lane = static_cast<int>(n % kWarp);
      thread.index = static_cast<unsigned>(n);
      thread.copies.clear();
      thread.stores.clear();
      thread.group = thread.store_group = 0;
      thread.fiber.start(enter);
    }
    for (Warp& warp : block.warps) warp.ready = ~0u;
  }

  static void enter();

  __attribute__((noinline)) void describe_fault(const char* what, const char* more) {
    fault_ = "thread " + std::to_string(thread_index.x) + " of block " + std::to_string(block_index.x) +
             ": " + what;
    if (*more) fault_ += std::string(" where other lanes of the warp are at ") + more;
  }

  void finish_thread() {
    Block& block = *current_->block;
    current_->warp->ready &= ~(1u << current_->lane);
    for (Store& store : current_->stores)
      if (store.is_read) store.write(store.bytes);
    current_->stores.clear();
    if (--block.alive == 0) {
      check_guards(block);
      release_guards(block);
      finished_ = &block;
    }
    current_->fiber.switch_to(main_);
    __builtin_unreachable();
  }

  void release_guards([[maybe_unused]] Block& block) {
#if defined(__SANITIZE_ADDRESS__)
    if (block.shared)
      ASAN_UNPOISON_MEMORY_REGION(block.shared - kGuardBytes, launch_.shared_bytes + 2 * kGuardBytes);
#endif
  }
  __attribute__((no_sanitize("address"))) void check_guards(const Block& block) {
    if (!block.shared) return;
    for (size_t n = 0; n < kGuardBytes; ++n)
      if (block.shared[launch_.shared_bytes + n] != kGuard ||
          block.shared[-1 - static_cast<std::ptrdiff_t>(n)] != kGuard) {
        if (fault_.empty())
          fault_ = "block " + std::to_string(block.index) + " wrote outside its shared memory";
        return;
      }
  }

  // This thread cannot go on: another one, of the same warp if there is one (Order::random: usually).
  void stop() {
    Thread& self = *current_;
    self.warp->ready &= ~(1u << self.lane);
    Thread* next = nullptr;
    if (!is_random() || draw(kWarp) != 0)
      next = ready_in(*self.block, static_cast<size_t>(self.warp - self.block->warps.data()));
    if (!next) next = find_ready();
    if (next == &self) return;
    if (next) {
      current_ = next;
      set_place();
    }
    self.fiber.switch_to(next ? next->fiber : main_);
    current_ = &self;
    set_place();
  }

  Thread* ready_in(Block& block, size_t warp) {
    const uint32_t ready = block.warps[warp].ready;
    if (ready == 0) return nullptr;
    int lane = launch_.order == Order::ascending ? __builtin_ctz(ready) : kWarp - 1 - __builtin_clz(ready);
    if (is_random()) {
      const int first = static_cast<int>(draw(kWarp));
      lane = (first + __builtin_ctz(std::rotr(ready, first))) % kWarp;
    }
    return block.threads[warp * kWarp + static_cast<size_t>(lane)].get();
  }
  Thread* find_ready() {
    if (finished_) {
      Block& block = *finished_;
      finished_ = nullptr;
      start_block(block);
    }
    if (is_random()) return draw_ready();
    if (Thread* const thread = first_ready()) return thread;
    if (++idle_ > kMostIdle) return nullptr;
    for (Block& block : blocks_)
      for (Warp& warp : block.warps) {
        warp.ready |= warp.paused;
        warp.paused = 0;
      }
    return first_ready();
  }
  Thread* first_ready() {
    for (Block& block : blocks_) {
      if (block.alive == 0) continue;
      for (size_t n = 0; n < block.warps.size(); ++n)
        if (Thread* const thread =
                ready_in(block, launch_.order == Order::ascending ? n : block.warps.size() - 1 - n))
          return thread;
    }
    return nullptr;
  }

  bool is_random() const { return launch_.order == Order::random; }
  uint32_t draw(uint32_t below) {  // SplitMix64
    uint64_t x = random_ += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return static_cast<uint32_t>((x ^ x >> 31) % below);
  }
  // A warp of those that can go on or look again; one that is held back only where there is no other. Some warps, few or many, are
  // held back for so many draws or until the others only wait, then some others: a GPU's warps can be far apart, and a draw
  // alone leaves them close.
  Thread* draw_ready() {
    if (++idle_ > kMostIdle * 4) return nullptr;
    if (hold_for_-- <= 0 || idle_ % kWaitsInHold == 0) {
      constexpr uint32_t kLongestHold = 14, kFewest = 5;  // as powers of two
      hold_for_ = 1 << draw(kLongestHold);
      const uint32_t one_in = 1u << draw(kFewest);
      for (Block& block : blocks_)
        for (Warp& warp : block.warps) warp.held = one_in > 1 && draw(one_in) == 0;
    }
    Thread* drawn = nullptr;
    uint32_t met = 0;
    bool drawn_held = true;
    for (Block& block : blocks_) {
      if (block.alive == 0) continue;
      for (size_t n = 0; n < block.warps.size(); ++n) {
        const Warp& warp = block.warps[n];
        if ((warp.ready | warp.paused) == 0 || (warp.held && !drawn_held)) continue;
        if (drawn_held && !warp.held) met = 0, drawn_held = false;
        if (draw(++met) == 0) drawn = block.threads[n * kWarp].get();
      }
    }
    if (!drawn) return nullptr;
    copies_are_late_ = draw(4) == 0;
    Warp& warp = *drawn->warp;
    warp.ready |= warp.paused;
    warp.paused = 0;
    return ready_in(*drawn->block, static_cast<size_t>(drawn->warp - drawn->block->warps.data()));
  }

  void set_place() {
    thread_index = {current_->index, 0, 0};
    block_index = {current_->block->index, 0, 0};
  }

  Launch launch_;
  const std::function<void()>* kernel_ = nullptr;
  std::vector<Block> blocks_;
  int next_block_ = 0;
  static constexpr int kMostIdle = 1 << 16, kWaitsInHold = 512;
  // How often only pausing threads were left since a block began. Order::random: how many draws since a warp's lanes met.
  int idle_ = 0;
  uint64_t random_ = 0;
  int hold_for_ = 0;
  bool copies_are_late_ = false;
  Block* finished_ = nullptr;
  Thread* current_ = nullptr;
  Fiber main_;
  std::string fault_;
};

inline Machine& machine() {
  static Machine one;
  return one;
}

inline void Machine::enter() {
  Machine& m = machine();
  m.current_->fiber.arrived(&m.main_);
  (*m.kernel_)();
  m.finish_thread();
}

inline void run(const Launch& launch, const std::function<void()>& kernel) { machine().run(launch, kernel); }

}  // namespace evenkeel::cuda_emulator

// A team of threads that walks through the operations of a step together.
//
// One OpenMP region spans a step, and the threads meet at barriers of our own in it: they spin for
// some microseconds (an operation is that short) and then give their core away. Between steps
// they wait as OMP_WAIT_POLICY says. The OpenMP runtime is torch's: a second one would bring a
// second pool of threads.
#pragma once

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

namespace shoal {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// What the threads of one step share. Threads take tasks as they come, so that one that loses its
// core for a while holds up only the task in its hands.
class Team {
 public:
  explicit Team(int64_t num_operations)
      : next_task_(new std::atomic<int64_t>[num_operations]) {
    for (int64_t i = 0; i < num_operations; i++) next_task_[i].store(0, std::memory_order_relaxed);
  }

  // Calls body(task) for each of the tasks that falls to this thread. Each operation of a step
  // has a number of its own.
  template <class Body>
  void share(int64_t operation, int64_t num_tasks, int64_t grain, Body body) {
    auto& next = next_task_[operation];
    for (;;) {
      const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= num_tasks) return;
      const int64_t end = std::min(begin + grain, num_tasks);
      for (int64_t task = begin; task < end; task++) body(task);
    }
  }

  void barrier(int num_threads) {
    if (num_threads == 1) return;
    const int64_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++) {
      if (spins < kSpins)
        relax();
      else
        sched_yield();
    }
  }

 private:
  static constexpr int kSpins = 2000;
  std::unique_ptr<std::atomic<int64_t>[]> next_task_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int64_t> round_{0};
};

}  // namespace shoal

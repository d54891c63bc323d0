// A team of threads that walks through the operations of a step together.
//
// One OpenMP region spans a step. A thread goes on to the next operation when all tasks of the one
// before are done, whoever did them: threads wait for work, not for each other. So one that has
// lost its core to another process holds up only the task in its hands, and the step goes on at
// the speed of the rest. They wait spinning for some microseconds (an operation is that short) and
// then give their core away; between steps they wait as OMP_WAIT_POLICY says. The OpenMP runtime
// is torch's: a second one would bring a second pool of threads.
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

// What the threads of one step share.
class Team {
 public:
  explicit Team(int64_t num_operations) : progress_(new Progress[num_operations]) {}

  // Calls body(task) for each of the tasks that falls to this thread, and returns when all of them
  // are done. Each operation of a step has a number of its own; all threads pass the same sizes.
  template <class Body>
  void share(int64_t operation, int64_t num_tasks, int64_t grain, Body body) {
    Progress& progress = progress_[operation];
    for (;;) {
      const int64_t begin = progress.taken.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= num_tasks) break;
      const int64_t end = std::min(begin + grain, num_tasks);
      for (int64_t task = begin; task < end; task++) body(task);
      progress.done.fetch_add(end - begin, std::memory_order_release);
    }
    for (int spins = 0; progress.done.load(std::memory_order_acquire) < num_tasks; spins++) {
      if (spins < kSpins)
        relax();
      else
        sched_yield();
    }
  }

 private:
  static constexpr int kSpins = 2000;
  struct alignas(64) Progress {
    std::atomic<int64_t> taken{0};
    std::atomic<int64_t> done{0};
  };
  std::unique_ptr<Progress[]> progress_;
};

}  // namespace shoal

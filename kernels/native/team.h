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
#include <type_traits>

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
  Team() = default;
  Team(int64_t num_operations, int64_t num_threads) { begin(num_operations, num_threads); }

  // Before each step, by one thread.
  void begin(int64_t num_operations, int64_t num_threads) {
    const int64_t size = num_operations * (num_threads + 1);
    if (size > size_) progress_.reset(new Progress[size]);
    if (size > size_) size_ = size;
    for (int64_t i = 0; i < size; i++) progress_[i].count.store(0, std::memory_order_relaxed);
    num_threads_ = num_threads;
  }

  int64_t num_threads() const { return num_threads_; }

  // Of `num_tasks` those from here up to the next thread's begin are the thread's own.
  int64_t first_task(int64_t thread, int64_t num_tasks) const {
    return num_tasks * thread / num_threads_;
  }

  // Calls body(task), or body(task, next), for each of the tasks that falls to this thread, and
  // returns when all of them are done. A thread goes through its own tasks in order, which are
  // neighbours, and then helps the others. `next` is the task that it comes to afterwards, or -1.
  // Each operation of a step has a number of its own; all threads pass the same sizes.
  template <class Body>
  void share(int64_t operation, int64_t num_tasks, int64_t grain, Body body) {
    Progress* taken = &progress_[operation * (num_threads_ + 1)];
    Progress& done = taken[num_threads_];
    const int64_t me = omp_get_thread_num();
    int64_t num_done = 0;
    for (int64_t i = 0; i < num_threads_; i++) {
      const int64_t whose = (me + i) % num_threads_;
      const int64_t first = first_task(whose, num_tasks), end = first_task(whose + 1, num_tasks);
      while (first + taken[whose].count.load(std::memory_order_relaxed) < end) {
        const int64_t from =
            first + taken[whose].count.fetch_add(grain, std::memory_order_relaxed);
        const int64_t to = std::min(from + grain, end);
        for (int64_t task = from; task < to; task++) {
          if constexpr (std::is_invocable_v<Body, int64_t>)
            body(task);
          else
            body(task, task + 1 < end ? task + 1 : -1);
        }
        num_done += std::max<int64_t>(0, to - from);
      }
    }
    if (num_done) done.count.fetch_add(num_done, std::memory_order_release);
    for (int spins = 0; done.count.load(std::memory_order_acquire) < num_tasks; spins++) {
      if (spins < kSpins)
        relax();
      else
        sched_yield();
    }
  }

 private:
  static constexpr int kSpins = 2000;
  struct alignas(64) Progress {
    std::atomic<int64_t> count{0};
  };
  std::unique_ptr<Progress[]> progress_;  // by operation: what is taken of each thread's, and done
  int64_t size_ = 0, num_threads_ = 1;
};

}  // namespace shoal

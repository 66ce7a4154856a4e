// Phases of tasks, one after another, with one hand-off to ONNX Runtime's pool for all of them.
//
// A hand-off takes some microseconds, as long as a small product; here the threads stay and meet between phases. Nobody
// waits for a thread, only for tasks: who comes late finds the work done, and one thread alone does it all.
#pragma once

#include <atomic>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "op.h"

namespace elsi {

class Team {
 public:
  // Runs body(member) on the pool's threads, any number of times each. Every run must ask for the same phases in the same
  // order, and may write nothing outside them. Tasks must not throw.
  template <class Body>
  static void run(const Pool& pool, const Body& body) {
    Team team;
    auto join = [&](size_t) {
      if (team.over_.load(std::memory_order_relaxed)) return;
      const size_t here = team.joined_.fetch_add(1, std::memory_order_relaxed) + 1;
      for (size_t seen = threads_seen(); here > seen;) threads().compare_exchange_weak(seen, here);
      Member member(team);
      body(member);
      team.over_.store(true, std::memory_order_relaxed);
    };
    pool.run(kMostThreads, join);
  }

  class Member {
   public:
    explicit Member(Team& team) : team_(team) {}
    // Takes part in work(0..tasks-1); returns when all of them are done, whoever did them.
    template <class Work>
    void phase(size_t tasks, const Work& work) {
      Phase& phase = team_.phases_[at_++];
      size_t mine = 0;
      for (size_t task; (task = phase.next.fetch_add(1, std::memory_order_relaxed)) < tasks; ++mine) work(task);
      if (mine > 0) phase.done.fetch_add(mine, std::memory_order_release);
      for (unsigned spins = 0; phase.done.load(std::memory_order_acquire) < tasks; ++spins) rest(spins);
    }

   private:
    static void rest(unsigned spins) {
      if (spins >= kSpins) {  // the thread that has the task may be waiting for this one's core
        std::this_thread::yield();
        return;
      }
#if defined(__x86_64__)
      _mm_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
    Team& team_;
    size_t at_ = 0;
  };

  static constexpr size_t kMostPhases = 12;

  // The most threads that any team of this process had: how finely work should be cut.
  static size_t threads_seen() { return threads().load(std::memory_order_relaxed); }

 private:
  static constexpr size_t kMostThreads = 64;
  static constexpr unsigned kSpins = 2000;
  struct Phase {
    alignas(64) std::atomic<size_t> next{0};
    alignas(64) std::atomic<size_t> done{0};
  };
  static std::atomic<size_t>& threads() {
    static std::atomic<size_t> seen{1};
    return seen;
  }
  Phase phases_[kMostPhases];
  std::atomic<size_t> joined_{0};
  std::atomic<bool> over_{false};
};

}  // namespace elsi

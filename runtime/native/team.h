// Phases of tasks, one after another, with one hand-off to ONNX Runtime's pool for all of them.
//
// A hand-off takes some microseconds, as long as a small product; here the threads stay and meet between phases. Nobody
// waits for a thread, only for tasks: who comes late finds the work done, and one thread alone does it all. Tasks lie in
// lanes, one for each thread, which takes those of its own first: weights are then read in long runs.
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
      const size_t before = team.joined_.fetch_add(1, std::memory_order_relaxed);
      for (size_t seen = threads_seen(); before + 1 > seen;) threads().compare_exchange_weak(seen, before + 1);
      Member member(team, before);
      body(member);
      team.over_.store(true, std::memory_order_relaxed);
    };
    pool.run(kMostThreads, join);
  }

  class Member {
   public:
    Member(Team& team, size_t index) : team_(team), lane_(index % team.lanes_) {}
    // Takes part in work(0..tasks-1); returns when all of them are done, whoever did them.
    template <class Work>
    void phase(size_t tasks, const Work& work) {
      Phase& phase = team_.phases_[at_++];
      size_t mine = 0;
      for (size_t turn = 0; turn < team_.lanes_; ++turn) {
        const size_t lane = (lane_ + turn) % team_.lanes_;
        const size_t first = lane * tasks / team_.lanes_, end = (lane + 1) * tasks / team_.lanes_;
        for (size_t i; first + (i = phase.next[lane].value.fetch_add(1, std::memory_order_relaxed)) < end; ++mine)
          work(first + i);
      }
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
    size_t lane_, at_ = 0;
  };

  static constexpr size_t kMostPhases = 12;

  // The most threads that any team of this process had: how finely work should be cut.
  static size_t threads_seen() { return threads().load(std::memory_order_relaxed); }

 private:
  static constexpr size_t kMostThreads = 64;
  static constexpr unsigned kSpins = 2000;
  static constexpr size_t kMostLanes = 8;
  struct alignas(64) Counter {
    std::atomic<size_t> value{0};
  };
  struct Phase {
    Counter next[kMostLanes];
    alignas(64) std::atomic<size_t> done{0};
  };
  static std::atomic<size_t>& threads() {
    static std::atomic<size_t> seen{1};
    return seen;
  }
  Phase phases_[kMostPhases];
  const size_t lanes_ = threads_seen() < kMostLanes ? threads_seen() : kMostLanes;
  std::atomic<size_t> joined_{0};
  std::atomic<bool> over_{false};
};

}  // namespace elsi

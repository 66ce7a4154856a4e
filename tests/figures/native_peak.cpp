// The machine's limits for the native kernels: memory bandwidth, and vpdpbusd from registers alone. One JSON line.
//     g++ -O2 -march=native -pthread native_peak.cpp -o native_peak && ./native_peak THREADS
#include <immintrin.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <thread>
#include <vector>

// Of this thread alone: what other processes take of the machine's time does not count.
static double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Least time over `tries` that the slowest thread took.
static double best_of(int tries, int threads, const std::function<void(int)>& work) {
  double best = 1e9;
  for (int i = 0; i < tries; ++i) {
    std::vector<double> took(static_cast<size_t>(threads));
    std::vector<std::thread> pool;
    for (int t = 0; t < threads; ++t)
      pool.emplace_back([&, t] {
        const double start = cpu_seconds();
        work(t);
        took[static_cast<size_t>(t)] = cpu_seconds() - start;
      });
    for (auto& thread : pool) thread.join();
    best = std::min(best, *std::max_element(took.begin(), took.end()));
  }
  return best;
}

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  const size_t bytes = 128u << 20;  // a thread; far beyond the caches
  std::vector<char*> from, to;
  for (int t = 0; t < threads; ++t) {
    from.push_back(static_cast<char*>(std::aligned_alloc(64, bytes)));
    to.push_back(static_cast<char*>(std::aligned_alloc(64, bytes)));
    std::memset(from[t], 1, bytes);
    std::memset(to[t], 2, bytes);
  }
  const double copy = best_of(9, threads, [&](int t) { std::memcpy(to[t], from[t], bytes); });
  static volatile int sink;
  const double read = best_of(9, threads, [&](int t) {
    __m512i sums[4] = {};
    for (size_t i = 0; i < bytes; i += 256)
      for (int j = 0; j < 4; ++j) {
        sums[j] = _mm512_add_epi32(sums[j], _mm512_load_si512(from[t] + i + 64 * j));
        _mm_prefetch(from[t] + i + 64 * j + 2048, _MM_HINT_T0);
      }
    sink = _mm512_reduce_add_epi32(
        _mm512_add_epi32(_mm512_add_epi32(sums[0], sums[1]), _mm512_add_epi32(sums[2], sums[3])));
  });
  const size_t loops = 5000000;
  const double dots = best_of(9, threads, [&](int) {
    __m512i sums[12];
    const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(1);
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) sums[j] = _mm512_setzero_si512();
    for (size_t i = 0; i < loops; ++i) {
#pragma GCC unroll 12
      for (int j = 0; j < 12; ++j) {
        sums[j] = _mm512_dpbusd_epi32(sums[j], a, b);
        asm volatile("" : "+v"(sums[j]));  // or the loop is folded away
      }
    }
#pragma GCC unroll 12
    for (int j = 1; j < 12; ++j) sums[0] = _mm512_add_epi32(sums[0], sums[j]);
    sink = _mm512_reduce_add_epi32(sums[0]);
  });
  std::printf("{\"threads\": %d, \"copy_gb_s\": %.2f, \"read_gb_s\": %.2f, \"vpdpbusd_gmac_s\": %.1f}\n", threads,
              2.0 * bytes * threads / copy / 1e9, 1.0 * bytes * threads / read / 1e9,
              64.0 * 12 * loops * threads / dots / 1e9);
}

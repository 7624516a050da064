// Errors on purpose, in the library that a sanitizer watches: each must be reported, or "no finding" would mean
// nothing.
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "cpu/parallel.h"

#define ATTN_ERROR extern "C" __attribute__((visibility("default"), noinline))

ATTN_ERROR int read_past_the_end(int count) {
  const int* numbers = new int[count]();
  const int beyond = numbers[count];
  delete[] numbers;
  return beyond;
}

ATTN_ERROR int signed_overflow(int number) { return number + 1; }

ATTN_ERROR int front_of_empty_vector() { return std::vector<int>().front(); }

ATTN_ERROR double number_never_written() {
  double number;
  asm volatile("" : "+m"(number));  // or the compiler, which sees that nothing writes it, may return anything
  return number;
}

// Two threads of one parallel region, no lock.
ATTN_ERROR int64_t race_in_a_region() {
  int64_t tasks_done = 0;
  attn::run_tasks(8, 1e9, 0, {}, [&](int64_t, char*) {
    ++tasks_done;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // or one thread does all
  });
  return tasks_done;
}

// Writes for a while.
ATTN_ERROR void count(volatile int64_t* number, int64_t times) {
  for (int64_t i = 0; i < times; ++i) *number = *number + 1;
}

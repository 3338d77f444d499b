// Threads for the kernels under test.
#pragma once

#include <cstddef>
#include <thread>
#include <vector>

namespace kvconv::test {

// Runs the tasks on three threads of its own, several per thread.
inline void run_on_threads(void*, void (*task)(void*, std::size_t), void* data, std::size_t count) {
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 3; ++t) {
    threads.emplace_back([=] {
      for (std::size_t i = t; i < count; i += 3) task(data, i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace kvconv::test

// A libcuda.so.1 for machines without a GPU: device memory is host memory, and a launch is compared
// with what the image says of its kernel, noted, and handed to a function of the test's, which may
// compute what the kernel would have. Loaded before the op library looks for the driver.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// One launch. Arguments are the bytes that the driver would read, one behind the other as the
// image lays them out.
struct KvconvShimLaunch {
  const char* function;
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void* stream;
  const unsigned char* arguments;
  std::size_t argument_bytes;
  const unsigned* offsets;  // of each argument
  const unsigned* sizes;
  std::size_t num_arguments;
};

// The GPU that the shim pretends to have; 8.0 with 108 multiprocessors and 163 KB at first.
void kvconv_shim_set_device(int compute_capability, int num_multiprocessors, int shared_bytes);

// Lets the next calls of that driver function fail with a result; 0 ends it.
void kvconv_shim_fail(const char* function, int result);

// Called at every launch, in order; null for none.
void kvconv_shim_on_launch(void (*callback)(const struct KvconvShimLaunch*, void*), void* data);

// What was wrong with the launches so far, a line each; empty where nothing was. The text is valid
// until the next launch.
const char* kvconv_shim_complaints();

// Counters since the process began.
int kvconv_shim_num_launches();
int kvconv_shim_num_loaded();    // modules loaded and not unloaded
int kvconv_shim_num_retained();  // primary contexts likewise
long long kvconv_shim_copied_bytes();
}

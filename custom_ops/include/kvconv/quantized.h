// A matrix of weights quantised in blocks along its rows, as MatMulNBits and GatherBlockQuantized
// read it where ONNX Runtime mapped it, and the kernels over it. Knows nothing of ONNX Runtime.
//
// Letters: M rows of activations, N rows of weights (outputs), K columns (inputs).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvconv/kernel.h"

namespace kvconv {

// Weight [n, k] is (q[n, k] - zero_point[n, block]) * scale[n, block]. Rows come in groups of
// kGroupRows, the last one padded with rows that are never used, and a row is words of 32 bits: its
// blocks in order, `block_size` weights each, the last one padded. The words of a group lie side by
// side, and so do its scales: a vector is read from one place, and its lanes are rows.
//
// 8 bits: byte b of word w is weight 4 * w + b. 4 bits: byte b of word w has weight 8 * w + b in
// its low half and weight 8 * w + 4 + b in its high half.
struct QuantizedMatrix {
  static constexpr std::int64_t kGroupRows = 16;

  std::int64_t rows = 0;         // N
  std::int64_t columns = 0;      // K
  int bits = 4;                  // or 8
  std::int64_t block_size = 32;  // a power of two from 16 to 256
  DataType scale_type = DataType::kFloat32;

  const std::uint8_t* data = nullptr;  // [num_groups, row_words, kGroupRows, 4]
  const void* scales = nullptr;        // [num_groups, num_blocks, kGroupRows]
  const void* zero_points = nullptr;   // as scales; null = middle()

  std::int64_t num_groups() const { return (rows + kGroupRows - 1) / kGroupRows; }
  std::int64_t num_blocks() const { return (columns + block_size - 1) / block_size; }
  std::int64_t row_words() const { return num_blocks() * block_size * bits / 32; }
  int middle() const { return 1 << (bits - 1); }

  // Where a row's first word is in `data`; the next one is 4 * kGroupRows bytes on.
  std::int64_t word_offset(std::int64_t row) const {
    return (row / kGroupRows * row_words() * kGroupRows + row % kGroupRows) * 4;
  }
  // Where a row's first scale is, in elements; the next block's is kGroupRows on.
  std::int64_t scale_offset(std::int64_t row) const {
    return row / kGroupRows * num_blocks() * kGroupRows + row % kGroupRows;
  }
};

// What activations are rounded to, if anything: multiples of a scale per piece of 32 columns (16 at
// block size 16) that makes the piece's largest magnitude 127, or 127 * 256 with 16 bits.
enum class Rounding : std::uint8_t { kNone, kInt16, kInt8 };

// One run of MatMulNBits on the CPU: output = a x weights^T + bias. All checked by the op's face.
struct MatMulParams {
  QuantizedMatrix weights;
  std::int64_t num_rows = 0;                      // M
  DataType activation_type = DataType::kFloat32;  // a, bias and output; float32 or float16
  Rounding rounding = Rounding::kInt8;            // of the activations
  const void* a = nullptr;                        // [M, K]
  const void* bias = nullptr;                     // [N]; may be null
  void* output = nullptr;                         // [M, N]
};

// A build of the matrix product for one instruction set. A row of the result depends on its own
// row of `a` alone, bit by bit: not on M, nor on the number of threads.
struct MatMulKernel {
  const char* name;
  std::size_t (*workspace_bytes)(const MatMulParams& params, std::int64_t num_workers);
  // workspace: 64-byte aligned, workspace_bytes long, contents ignored and overwritten.
  void (*run)(const MatMulParams& params, void* workspace, const ParallelFor& parallel_for);
};

// The builds that this machine can run, best first; never empty, the last one is portable.
const std::vector<MatMulKernel>& matmul_kernels();

// The plain product that every fast one is tested against: one thread, double precision, rounding
// the activations where the run asks for it.
void matmul_reference(const MatMulParams& params);

// Writes rows `indices` of the weights as float32: output [count, K]. Every index is in [0, N).
void gather_rows(const QuantizedMatrix& weights, const std::int64_t* indices, std::int64_t count,
                 float* output, const ParallelFor& parallel_for);

}  // namespace kvconv

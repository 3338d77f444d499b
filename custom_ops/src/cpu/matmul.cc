// The matrix product over quantised weights. Compiled once per instruction set (KVCONV_USE_...);
// kernels.cc picks one.
//
// The weights are read as they are stored, once per run: a task unpacks panels of rows, 16 to 32
// at a time, into memory that stays in the processor's cache, lanes being rows, and multiplies each
// with every row of the activations. Those are rounded to int8 once per run, in pieces with a scale
// each; a piece's products are summed exactly, then scaled. The same code serves one row and
// thousands, so a row's result does not depend on the others. Letters: see kvconv/quantized.h.
//
// Nothing here may call a shared inline function (no standard containers or algorithms): the
// linker could pick this file's copy, compiled for newer processors, for everybody.
#include "kvconv/float16.h"
#include "kvconv/quantized.h"

#if defined(KVCONV_USE_AVX512)
#include "vec_avx512.h"
// After the vectors that it computes with.
#include "int8_avx512.h"
#elif defined(KVCONV_USE_AVX2)
#include "vec_avx2.h"
// After the vectors that it computes with.
#include "int8_avx2.h"
#else
#include "vec_generic.h"
// After the vectors that it computes with.
#include "int8_generic.h"
#endif

#include "vec_math.h"
// After the vectors that they compute with.
#include "matmul_panel.h"
#include "matmul_tile.h"

namespace kvconv {
namespace {

constexpr std::int64_t kChunkRows = 512;           // rows of activations per unpacked panel
constexpr std::int64_t kRowsPerTask = 16;          // rounded to int8
constexpr std::int64_t kSerialElements = 1 << 15;  // rounding fewer needs no threads
constexpr std::int64_t kSerialProducts = 1 << 16;  // nor do so few products
constexpr std::int64_t kWantedTasks = 8;           // per worker
constexpr std::int64_t kMaxPanelsPerTask = 16;

// Lays the memory of a run out and returns the number of bytes it takes.
std::int64_t lay_out(const MatMulParams& p, std::int64_t num_workers, char* memory, Activations* a,
                     Panel* first_panel, std::int64_t* panel_bytes) {
  const Pieces pieces = pieces_of(p.weights);
  std::int64_t used = 0;
  const auto take = [&](std::int64_t count, std::int64_t size) {
    char* start = memory == nullptr ? nullptr : memory + used;
    used += round_up(count * size, 64);
    return start;
  };
  const std::int64_t num_pieces = p.num_rows * pieces.count;
  const std::int64_t padded = pieces.count * pieces.columns;
  const bool has_zeros = p.weights.zero_points != nullptr;
  *a = {};
  if (p.quantizes_activations) {
    a->bytes = reinterpret_cast<std::int8_t*>(take(num_pieces, pieces.columns));
    a->scales = reinterpret_cast<float*>(take(num_pieces, 4));
    a->starts = reinterpret_cast<std::int32_t*>(take(num_pieces, 4));
    if (has_zeros) a->sums = reinterpret_cast<float*>(take(num_pieces, 4));
  } else {
    a->floats = p.activation_type == DataType::kFloat32
                    ? static_cast<const float*>(p.a)
                    : reinterpret_cast<const float*>(take(p.num_rows * p.weights.columns, 4));
  }
  const std::int64_t start = used;
  *first_panel = {};
  if (p.quantizes_activations) {
    first_panel->words = reinterpret_cast<std::uint8_t*>(take(padded * pieces.planes, kPanelRows));
  } else {
    first_panel->weights = reinterpret_cast<float*>(take(padded, kPanelRows * 4));
  }
  first_panel->scales = reinterpret_cast<float*>(take(pieces.count, kPanelRows * 4));
  if (has_zeros) first_panel->zeros = reinterpret_cast<float*>(take(pieces.count, kPanelRows * 4));
  *panel_bytes = used - start;
  return start + num_workers * *panel_bytes;
}

template <typename T>
T* moved(T* pointer, std::int64_t bytes) {
  if (pointer == nullptr) return nullptr;
  return reinterpret_cast<T*>(reinterpret_cast<char*>(pointer) + bytes);
}

Panel panel_of(const Panel& first, std::int64_t worker, std::int64_t panel_bytes) {
  const std::int64_t offset = worker * panel_bytes;
  return {moved(first.words, offset), moved(first.weights, offset), moved(first.scales, offset),
          moved(first.zeros, offset)};
}

// Adds the bias and writes one row of a tile: `count` elements from column `column` on.
void write_row(const MatMulParams& p, std::int64_t row, std::int64_t column, std::int64_t count,
               const Vec* sums) {
  const std::int64_t element_bytes = bytes_of(p.activation_type);
  float values[kPanelRows];
  if (p.bias != nullptr) {
    for (std::int64_t i = count; i < kPanelRows; ++i) values[i] = 0.0F;
    widen(static_cast<const char*>(p.bias) + column * element_bytes, p.activation_type, values,
          count);
    store(values, add(sums[0], load(values)));
    store(values + kLanes, add(sums[1], load(values + kLanes)));
  } else {
    store(values, sums[0]);
    store(values + kLanes, sums[1]);
  }
  char* target = static_cast<char*>(p.output) + (row * p.weights.rows + column) * element_bytes;
  narrow(values, target, p.activation_type, count);
}

template <int rows>
void multiply_and_write(const MatMulParams& p, const Pieces& pieces, const Activations& a,
                        std::int64_t row, std::int64_t column, const Panel& panel) {
  const Tile<rows> tile = multiply<rows>(p, pieces, a, row, panel);
  const std::int64_t count = min_of(kPanelRows, p.weights.rows - column);
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) write_row(p, row + r, column, count, tile.sums[r]);
}

// A tile of `count` rows, at most `rows`.
template <int rows>
void multiply_some(std::int64_t count, const MatMulParams& p, const Pieces& pieces,
                   const Activations& a, std::int64_t row, std::int64_t column,
                   const Panel& panel) {
  if constexpr (rows > 0) {
    if (count == rows) {
      multiply_and_write<rows>(p, pieces, a, row, column, panel);
    } else {
      multiply_some<rows - 1>(count, p, pieces, a, row, column, panel);
    }
  }
}

std::size_t workspace_bytes(const MatMulParams& p, std::int64_t num_workers) {
  Activations a;
  Panel panel;
  std::int64_t panel_bytes;
  return static_cast<std::size_t>(lay_out(p, num_workers, nullptr, &a, &panel, &panel_bytes));
}

void run(const MatMulParams& p, void* workspace, const ParallelFor& parallel_for) {
  const Pieces pieces = pieces_of(p.weights);
  Activations a;
  Panel first_panel;
  std::int64_t panel_bytes;
  lay_out(p, parallel_for.num_workers, static_cast<char*>(workspace), &a, &first_panel,
          &panel_bytes);
  const ParallelFor serial;

  // 1. The activations.
  const bool is_small = p.num_rows * p.weights.columns < kSerialElements;
  const std::int64_t element_bytes = bytes_of(p.activation_type);
  for_each_task(is_small ? serial : parallel_for, (p.num_rows + kRowsPerTask - 1) / kRowsPerTask,
                [&](std::int64_t, std::int64_t task) {
                  const std::int64_t end = min_of(p.num_rows, (task + 1) * kRowsPerTask);
                  for (std::int64_t row = task * kRowsPerTask; row < end; ++row) {
                    if (p.quantizes_activations) {
                      quantize_row(p, pieces, row, a);
                    } else if (a.floats != p.a) {
                      const std::int64_t offset = row * p.weights.columns;
                      widen(static_cast<const char*>(p.a) + offset * element_bytes,
                            p.activation_type, const_cast<float*>(a.floats) + offset,
                            p.weights.columns);
                    }
                  }
                });

  // 2. The panels, each against a chunk of rows.
  const std::int64_t num_panels = (p.weights.rows + kPanelRows - 1) / kPanelRows;
  const std::int64_t num_chunks = (p.num_rows + kChunkRows - 1) / kChunkRows;
  const bool is_serial = p.num_rows * p.weights.rows * p.weights.columns < kSerialProducts;
  const std::int64_t per_task =
      max_of(1, min_of(kMaxPanelsPerTask,
                       num_panels * num_chunks / (kWantedTasks * parallel_for.num_workers)));
  const std::int64_t tasks_per_chunk = (num_panels + per_task - 1) / per_task;
  for_each_task(is_serial ? serial : parallel_for, num_chunks * tasks_per_chunk,
                [&](std::int64_t worker, std::int64_t task) {
                  const Panel panel = panel_of(first_panel, worker, panel_bytes);
                  const std::int64_t first_row = task / tasks_per_chunk * kChunkRows;
                  const std::int64_t end_row = min_of(p.num_rows, first_row + kChunkRows);
                  const std::int64_t begin = task % tasks_per_chunk * per_task;
                  for (std::int64_t i = begin; i < min_of(num_panels, begin + per_task); ++i) {
                    unpack_panel(p, pieces, i * kPanelRows, panel);
                    for (std::int64_t row = first_row; row < end_row;) {
                      const std::int64_t num_tiles = (end_row - row + kTileRows - 1) / kTileRows;
                      const std::int64_t count = (end_row - row + num_tiles - 1) / num_tiles;
                      multiply_some<kTileRows>(count, p, pieces, a, row, i * kPanelRows, panel);
                      row += count;
                    }
                  }
                });
}

}  // namespace

#if defined(KVCONV_USE_VNNI)
extern const MatMulKernel kMatMulVnni = {"avx512vnni", workspace_bytes, run};
#elif defined(KVCONV_USE_AVX512)
extern const MatMulKernel kMatMulAvx512 = {"avx512", workspace_bytes, run};
#elif defined(KVCONV_USE_AVX2)
extern const MatMulKernel kMatMulAvx2 = {"avx2", workspace_bytes, run};
#else
extern const MatMulKernel kMatMulPortable = {"portable", workspace_bytes, run};
#endif

}  // namespace kvconv

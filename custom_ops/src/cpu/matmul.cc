// The matrix product over quantised weights. Compiled once per instruction set (KVCONV_USE_...);
// kernels.cc picks one.
//
// The weights are read as they are stored, once per run: a task unpacks panels of rows, 8 to 32 at
// a time, into memory that stays in the processor's cache, lanes being rows, and multiplies each
// with every row of the activations; for a few rows it does so word by word instead. Activations
// are rounded to int8 once per run, in pieces with a scale each; a piece's products are summed
// exactly, then scaled, piece after piece. All paths sum in that same order, so a row's result has
// the same bits however many rows there are. Letters: see kvconv/quantized.h.
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
#if defined(KVCONV_USE_AMX)
#include "matmul_amx.h"
#endif

namespace kvconv {
namespace {

constexpr std::int64_t kChunkRows = 512;           // rows of activations per unpacked panel
constexpr std::int64_t kRowsPerTask = 16;          // rounded to int8
constexpr std::int64_t kSerialElements = 1 << 15;  // rounding fewer needs no threads
constexpr std::int64_t kSerialProducts = 1 << 16;  // nor do so few products
constexpr std::int64_t kWantedTasks = 8;           // per worker
constexpr std::int64_t kMaxPanelsPerTask = 16;
constexpr int kMaxFewRows = 4;
#if defined(KVCONV_USE_AMX)
constexpr std::int64_t kMinAmxRows = 12;  // fewer leave too much of a tile empty
#endif

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
  const std::int64_t num_pieces = round_up(p.num_rows, 16) * pieces.count;  // whole AMX tiles
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
  first_panel->zeros = reinterpret_cast<float*>(take(pieces.count, kPanelRows * 4));
  *panel_bytes = used - start;
  return start + num_workers * *panel_bytes;
}

#if defined(KVCONV_USE_AMX)
// Whether a run takes AMX tiles.
bool uses_amx(const MatMulParams& p, const Pieces& pieces) {
  return p.quantizes_activations && p.num_rows >= kMinAmxRows && pieces.columns == 32;
}
#endif

// Whether a run has so few rows that a panel of the weights is not worth being written.
bool uses_words(const MatMulParams& p, const Pieces& pieces) {
  return p.quantizes_activations && p.num_rows <= kMaxFewRows && pieces.columns == 32 &&
         words_per_piece(p.weights) <= kLanes;
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

// A tile of `count` rows, at most `rows`, by the panel whose first row is `column`.
template <int rows>
void multiply_some(std::int64_t count, const MatMulParams& p, const Pieces& pieces,
                   const Activations& a, std::int64_t row, std::int64_t column,
                   const Panel& panel) {
  if constexpr (rows > 0) {
    if (count < rows) {
      multiply_some<rows - 1>(count, p, pieces, a, row, column, panel);
      return;
    }
    const Tile<rows> tile = multiply<rows>(p, pieces, a, row, panel);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) write_row(p, row + r, column, tile.sums[r]);
  }
}

// A few rows, at most `rows`, by weights that are used as they are read.
template <int rows>
void multiply_few(const MatMulParams& p, const Pieces& pieces, const Activations& a,
                  std::int64_t column, const Panel& panel) {
  if constexpr (rows > 0) {
    if (p.num_rows < rows) {
      multiply_few<rows - 1>(p, pieces, a, column, panel);
      return;
    }
    Tile<rows> tile;
    for (std::int64_t half = 0; half < 2; ++half) {
      multiply_half<rows>(p, pieces, a, column + half * kLanes, half, panel, &tile);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) write_row(p, r, column, tile.sums[r]);
  }
}

// Rows [first, end) of the activations by the panel whose first row is `column`.
void multiply_panel(const MatMulParams& p, const Pieces& pieces, const Activations& a,
                    std::int64_t first, std::int64_t end, std::int64_t column, const Panel& panel) {
  if (uses_words(p, pieces)) {
    multiply_few<kMaxFewRows>(p, pieces, a, column, panel);
    return;
  }
#if defined(KVCONV_USE_AMX)
  if (uses_amx(p, pieces)) {
    unpack_panel(p, pieces, column, true, panel);
    multiply_and_write_amx(p, pieces, a, first, end, column, panel);
    return;
  }
#endif
  unpack_panel(p, pieces, column, false, panel);
  for (std::int64_t row = first; row < end;) {
    const std::int64_t num_tiles = (end - row + kTileRows - 1) / kTileRows;
    const std::int64_t count = (end - row + num_tiles - 1) / num_tiles;
    multiply_some<kTileRows>(count, p, pieces, a, row, column, panel);
    row += count;
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
  const auto run_task = [&](std::int64_t worker, std::int64_t task) {
    const Panel panel = panel_of(first_panel, worker, panel_bytes);
    const std::int64_t first_row = task / tasks_per_chunk * kChunkRows;
    const std::int64_t end_row = min_of(p.num_rows, first_row + kChunkRows);
    const std::int64_t begin = task % tasks_per_chunk * per_task;
    const std::int64_t end = min_of(num_panels, begin + per_task);
    for (std::int64_t i = begin; i < end; ++i) {
      multiply_panel(p, pieces, a, first_row, end_row, i * kPanelRows, panel);
    }
  };
  for_each_task(is_serial ? serial : parallel_for, num_chunks * tasks_per_chunk, run_task);
}

}  // namespace

#if defined(KVCONV_USE_AMX)
extern const MatMulKernel kMatMulAmx = {"amx", workspace_bytes, run};
#elif defined(KVCONV_USE_VNNI)
extern const MatMulKernel kMatMulVnni = {"avx512vnni", workspace_bytes, run};
#elif defined(KVCONV_USE_AVX512)
extern const MatMulKernel kMatMulAvx512 = {"avx512", workspace_bytes, run};
#elif defined(KVCONV_USE_AVX2)
extern const MatMulKernel kMatMulAvx2 = {"avx2", workspace_bytes, run};
#else
extern const MatMulKernel kMatMulPortable = {"portable", workspace_bytes, run};
#endif

}  // namespace kvconv

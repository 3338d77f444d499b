// The matrix product over quantised weights. Compiled once per instruction set (KVCONV_USE_...);
// kernels.cc picks one.
//
// The weights are read as they are stored, once per run: a task unpacks panels of rows, 8 to 32 at
// a time, into memory that stays in the processor's cache, lanes being rows, and multiplies each
// with every row of the activations; for a few rows it uses them as it reads them. Activations
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
// After the activations that it spreads.
#include "matmul_few.h"
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
constexpr std::int64_t kFewTasksPerWorker = 1;
constexpr std::int64_t kMinTaskProducts = 1 << 16;
#if defined(KVCONV_USE_AMX)
constexpr std::int64_t kMinAmxRows = 12;  // fewer leave too much of a tile empty
#endif

// Whether a run has so few rows that a panel of the weights is not worth being written.
bool takes_few(const MatMulParams& p) {
  return p.quantizes_activations && p.num_rows <= kMaxFewRows;
}

template <typename T>
T* moved(T* pointer, std::int64_t bytes) {
  if (pointer == nullptr) return nullptr;
  return reinterpret_cast<T*>(reinterpret_cast<char*>(pointer) + bytes);
}

// The memory of a run: the activations, and each worker's panel or, for a few rows, scales.
struct Layout {
  Activations a = {};
  FewRows few = {};
  Panel first_panel = {};
  FourScales first_scales = {};
  std::int64_t worker_bytes = 0;  // from one worker's memory to the next one's
  std::int64_t bytes = 0;         // in all

  Layout(const MatMulParams& p, std::int64_t num_workers, char* memory) {
    const Pieces pieces = pieces_of(p.weights);
    const auto take = [&](std::int64_t count, std::int64_t size) {
      char* start = memory == nullptr ? nullptr : memory + bytes;
      bytes += round_up(count * size, 64);
      return start;
    };
    const auto take_floats = [&](std::int64_t count) {
      return reinterpret_cast<float*>(take(count, 4));
    };
    const std::int64_t num_pieces = round_up(p.num_rows, 16) * pieces.count;  // whole AMX tiles
    if (p.quantizes_activations) {
      a.bytes = reinterpret_cast<std::int8_t*>(take(num_pieces, pieces.columns));
      a.scales = take_floats(num_pieces);
      a.starts = reinterpret_cast<std::int32_t*>(take(num_pieces, 4));
      if (p.weights.zero_points != nullptr) a.sums = take_floats(num_pieces);
    } else {
      a.floats = p.activation_type == DataType::kFloat32
                     ? static_cast<const float*>(p.a)
                     : take_floats(p.num_rows * p.weights.columns);
    }
    std::int64_t start = bytes;
    if (takes_few(p)) {
      few = few_rows_of(pieces);
      const std::int64_t vectors = few.num_vectors * p.num_rows;
      few.words = reinterpret_cast<std::int8_t*>(take(vectors * kSpanWords, kVectorBytes));
      few.starts = reinterpret_cast<std::int32_t*>(take(vectors * few.halves, kVectorBytes));
      start = bytes;
      first_scales.scales = take_floats(few.num_vectors * few.halves * kLanes);
      first_scales.zeros = take_floats(few.num_vectors * few.halves * kLanes);
    } else {
      const std::int64_t padded = pieces.count * pieces.columns;
      if (p.quantizes_activations) {
        first_panel.words =
            reinterpret_cast<std::uint8_t*>(take(padded * pieces.planes, kPanelRows));
      } else {
        first_panel.weights = take_floats(padded * kPanelRows);
      }
      first_panel.scales = take_floats(pieces.count * kPanelRows);
      first_panel.zeros = take_floats(pieces.count * kPanelRows);
    }
    worker_bytes = bytes - start;
    bytes = start + num_workers * worker_bytes;
  }

  Panel panel_of(std::int64_t worker) const {
    const std::int64_t offset = worker * worker_bytes;
    return {moved(first_panel.words, offset), moved(first_panel.weights, offset),
            moved(first_panel.scales, offset), moved(first_panel.zeros, offset)};
  }
  FourScales scales_of(std::int64_t worker) const {
    const std::int64_t offset = worker * worker_bytes;
    return {moved(first_scales.scales, offset), moved(first_scales.zeros, offset)};
  }
};

#if defined(KVCONV_USE_AMX)
// Whether a run takes AMX tiles.
bool uses_amx(const MatMulParams& p, const Pieces& pieces) {
  return p.quantizes_activations && p.num_rows >= kMinAmxRows && pieces.columns == 32;
}
#endif

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

// Rows [first, end) of the activations by the panel whose first row is `column`.
void multiply_panel(const MatMulParams& p, const Pieces& pieces, const Activations& a,
                    std::int64_t first, std::int64_t end, std::int64_t column, const Panel& panel) {
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

// Rounds or widens the activations.
void prepare_activations(const MatMulParams& p, const Pieces& pieces, const Layout& layout,
                         const ParallelFor& parallel_for) {
  const Activations& a = layout.a;
  if (!p.quantizes_activations && a.floats == p.a) return;
  const std::int64_t element_bytes = bytes_of(p.activation_type);
  const bool is_small = p.num_rows * p.weights.columns < kSerialElements;
  for_each_task(
      is_small ? ParallelFor() : parallel_for, (p.num_rows + kRowsPerTask - 1) / kRowsPerTask,
      [&](std::int64_t, std::int64_t task) {
        const std::int64_t end = min_of(p.num_rows, (task + 1) * kRowsPerTask);
        for (std::int64_t row = task * kRowsPerTask; row < end; ++row) {
          if (p.quantizes_activations) {
            quantize_row(p, pieces, row, a);
          } else {
            const std::int64_t offset = row * p.weights.columns;
            widen(static_cast<const char*>(p.a) + offset * element_bytes, p.activation_type,
                  const_cast<float*>(a.floats) + offset, p.weights.columns);
          }
        }
      });
}

// A few rows by all of the weights, in as many stretches of them as there are workers.
void run_few(const MatMulParams& p, const Pieces& pieces, const Layout& layout,
             const ParallelFor& parallel_for) {
  for (std::int64_t row = 0; row < p.num_rows; ++row) {
    spread_row(p, pieces, layout.a, row, layout.few);
  }
  const std::int64_t num_fours = (p.weights.rows + 3) / 4;
  const std::int64_t num_products = p.num_rows * p.weights.rows * p.weights.columns;
  const std::int64_t wanted =
      min_of(num_products / kMinTaskProducts, kFewTasksPerWorker * parallel_for.num_workers);
  const std::int64_t num_tasks = max_of(1, min_of(num_fours, wanted));
  for_each_task(parallel_for, num_tasks, [&](std::int64_t worker, std::int64_t task) {
    const std::int64_t begin = num_fours * task / num_tasks * 4;
    const std::int64_t end = min_of(num_fours * (task + 1) / num_tasks * 4, p.weights.rows);
    multiply_few(p, pieces, layout.a, layout.few, begin, end, layout.scales_of(worker));
  });
}

// Panels of the weights, each by a chunk of rows.
void run_panels(const MatMulParams& p, const Pieces& pieces, const Layout& layout,
                const ParallelFor& parallel_for) {
  const std::int64_t num_panels = (p.weights.rows + kPanelRows - 1) / kPanelRows;
  const std::int64_t num_chunks = (p.num_rows + kChunkRows - 1) / kChunkRows;
  const bool is_serial = p.num_rows * p.weights.rows * p.weights.columns < kSerialProducts;
  const std::int64_t per_task =
      max_of(1, min_of(kMaxPanelsPerTask,
                       num_panels * num_chunks / (kWantedTasks * parallel_for.num_workers)));
  const std::int64_t tasks_per_chunk = (num_panels + per_task - 1) / per_task;
  const auto run_task = [&](std::int64_t worker, std::int64_t task) {
    const Panel panel = layout.panel_of(worker);
    const std::int64_t first_row = task / tasks_per_chunk * kChunkRows;
    const std::int64_t end_row = min_of(p.num_rows, first_row + kChunkRows);
    const std::int64_t begin = task % tasks_per_chunk * per_task;
    const std::int64_t end = min_of(num_panels, begin + per_task);
    for (std::int64_t i = begin; i < end; ++i) {
      multiply_panel(p, pieces, layout.a, first_row, end_row, i * kPanelRows, panel);
    }
  };
  for_each_task(is_serial ? ParallelFor() : parallel_for, num_chunks * tasks_per_chunk, run_task);
}

std::size_t workspace_bytes(const MatMulParams& p, std::int64_t num_workers) {
  return static_cast<std::size_t>(Layout(p, num_workers, nullptr).bytes);
}

void run(const MatMulParams& p, void* workspace, const ParallelFor& parallel_for) {
  const Pieces pieces = pieces_of(p.weights);
  const Layout layout(p, parallel_for.num_workers, static_cast<char*>(workspace));
  prepare_activations(p, pieces, layout, parallel_for);
  if (takes_few(p)) {
    run_few(p, pieces, layout, parallel_for);
  } else {
    run_panels(p, pieces, layout, parallel_for);
  }
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

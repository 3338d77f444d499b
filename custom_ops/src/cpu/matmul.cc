// The matrix product over quantised weights. Compiled once per instruction set (KVCONV_USE_...);
// kernels.cc picks one.
//
// The weights are read as they are stored, once per 512 rows of activations: a task takes panels of
// 8 to 32 rows, lanes being rows, and multiplies each with all those activations. For a few of them
// it unpacks the weights as it uses them, for more into memory that stays in the processor's cache.
// Activations are rounded to integers once per run, in pieces with a scale each; a piece's products
// are summed exactly, then scaled, piece after piece. All paths sum in that same order, so a row's
// result has the same bits however many rows there are. Letters: see kvconv/quantized.h.
//
// Nothing here may call a shared inline function (no standard containers or algorithms): the
// linker could pick this file's copy, compiled for newer processors, for everybody.
#include "kvconv/float16.h"
#include "kvconv/quantized.h"
#include "matmul_tile.h"
#include "matmul_weights.h"
#if defined(KVCONV_USE_AMX)
#include "matmul_amx.h"
#endif

namespace kvconv {
namespace {

constexpr std::int64_t kMaxFewRows = 8;             // of activations; more are worth a panel
constexpr std::int64_t kChunkRows = 512;            // of activations per unpacked panel
constexpr std::int64_t kRowsPerTask = 16;           // rounded to integers
constexpr std::int64_t kSerialElements = 1 << 15;   // rounding fewer needs no threads
constexpr std::int64_t kMinTaskProducts = 1 << 16;  // fewer are not worth a thread
constexpr std::int64_t kWantedTasks = 8;            // per worker, with panels
constexpr std::int64_t kMaxPanelsPerTask = 16;
#if defined(KVCONV_USE_AMX)
constexpr std::int64_t kMinAmxRows = 12;  // fewer leave too much of a tile empty
#endif

// Whether a run has so few rows that a panel of the weights is not worth being written.
bool takes_few(const MatMulParams& p) {
  return p.rounding != Rounding::kNone && p.num_rows <= kMaxFewRows;
}

template <typename T>
T* moved(T* pointer, std::int64_t bytes) {
  if (pointer == nullptr) return nullptr;
  return reinterpret_cast<T*>(reinterpret_cast<char*>(pointer) + bytes);
}

// The memory of a run: the activations, and each worker's panel.
struct Layout {
  Activations a = {};
  Panel first_panel = {};
  std::int64_t worker_bytes = 0;  // from one worker's memory to the next one's
  std::int64_t bytes = 0;         // in all

  Layout(const MatMulParams& p, const Pieces& pieces, std::int64_t num_workers, char* memory) {
    const auto take = [&](std::int64_t count, std::int64_t size) {
      char* start = memory == nullptr ? nullptr : memory + bytes;
      bytes += round_up(count * size, 64);
      return start;
    };
    const auto take_floats = [&](std::int64_t count) {
      return reinterpret_cast<float*>(take(count, 4));
    };
    const bool is_float = p.rounding == Rounding::kNone;
    const bool has_zeros = p.weights.zero_points != nullptr;
    const std::int64_t padded = pieces.count * pieces.columns;
    if (!is_float) {
      const std::int64_t num_pieces = round_up(p.num_rows, 16) * pieces.count;  // whole AMX tiles
      a.bytes = reinterpret_cast<std::int8_t*>(take(num_pieces * pieces.terms, pieces.columns));
      a.starts = reinterpret_cast<std::int32_t*>(take(num_pieces * pieces.terms, 4));
      a.scales = take_floats(num_pieces);
      if (has_zeros) a.sums = take_floats(num_pieces);
    } else if (p.activation_type == DataType::kFloat32) {
      a.floats = static_cast<const float*>(p.a);
    } else {
      a.floats = take_floats(p.num_rows * p.weights.columns);
    }
    if (takes_few(p)) return;
    const std::int64_t start = bytes;
    if (is_float) {
      first_panel.weights = take_floats(padded * kPanelRows);
    } else {
      first_panel.words = reinterpret_cast<std::uint8_t*>(take(padded * pieces.planes, kPanelRows));
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
};

#if defined(KVCONV_USE_AMX)
// Whether a run takes AMX tiles.
bool uses_amx(const MatMulParams& p, const Pieces& pieces) {
  return p.rounding != Rounding::kNone && p.num_rows >= kMinAmxRows && pieces.columns == 32;
}
#endif

// Writes a tile of `count` rows, at most `rows`, to the panel whose first row is `column`;
// multiply(rows, row) computes it.
template <int rows, typename Multiply>
void write_tile(const MatMulParams& p, std::int64_t count, std::int64_t row, std::int64_t column,
                const Multiply& multiply) {
  if constexpr (rows > 1) {
    if (count < rows) {
      write_tile<rows - 1>(p, count, row, column, multiply);
      return;
    }
  }
  const Tile<rows> tile = multiply(Constant<rows>(), row);
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) write_row(p, row + r, column, tile.sums[r]);
}

// The same for rows [first, end), in tiles of about equal sizes.
template <int max_rows, typename Multiply>
void write_tiles(const MatMulParams& p, std::int64_t first, std::int64_t end, std::int64_t column,
                 const Multiply& multiply) {
  for (std::int64_t row = first; row < end;) {
    const std::int64_t num_tiles = ceil_div(end - row, max_rows);
    const std::int64_t count = ceil_div(end - row, num_tiles);
    write_tile<max_rows>(p, count, row, column, multiply);
    row += count;
  }
}

template <int max_rows, typename Weights>
void write_integer_tiles(const MatMulParams& p, const Pieces& pieces, const Activations& a,
                         std::int64_t first, std::int64_t end, std::int64_t column,
                         const Weights& weights) {
  write_tiles<max_rows>(p, first, end, column, [&](auto rows, std::int64_t row) {
    return multiply_integers<decltype(rows)::value>(p, pieces, a, row, weights);
  });
}

// All activations by the panel of the weights whose first row is `column`, as they are stored.
void multiply_stored(const MatMulParams& p, const Pieces& pieces, const Activations& a,
                     std::int64_t column) {
  // The weights are read from memory: more rows than a register block pay, but not in plain code.
  constexpr int kMaxRows = kTileRows == 2 ? 2 : 4;
  static_assert(kMaxFewRows % kMaxRows == 0);
  if (p.weights.bits == 4) {
    const StoredWeights<4> weights(p, pieces, column);
    write_integer_tiles<kMaxRows>(p, pieces, a, 0, p.num_rows, column, weights);
  } else {
    const StoredWeights<8> weights(p, pieces, column);
    write_integer_tiles<kMaxRows>(p, pieces, a, 0, p.num_rows, column, weights);
  }
}

// Rows [first, end) of the activations by the panel of the weights whose first row is `column`.
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
  if (p.rounding == Rounding::kNone) {
    write_tiles<kTileRows>(p, first, end, column, [&](auto rows, std::int64_t row) {
      return multiply_floats<decltype(rows)::value>(pieces, p.weights.columns, a, row, panel);
    });
  } else if (pieces.planes == 2) {
    const PanelWeights<kSplitsBytes ? 2 : 1> weights(panel);
    write_integer_tiles<kTileRows>(p, pieces, a, first, end, column, weights);
  } else {
    const PanelWeights<1> weights(panel);
    write_integer_tiles<kTileRows>(p, pieces, a, first, end, column, weights);
  }
}

// Rounds or widens the activations.
void prepare_activations(const MatMulParams& p, const Pieces& pieces, const Layout& layout,
                         const ParallelFor& parallel_for) {
  const Activations& a = layout.a;
  if (a.floats != nullptr && a.floats == p.a) return;
  const std::int64_t element_bytes = bytes_of(p.activation_type);
  const bool is_small = p.num_rows * p.weights.columns < kSerialElements;
  for_each_task(is_small ? ParallelFor() : parallel_for, ceil_div(p.num_rows, kRowsPerTask),
                [&](std::int64_t, std::int64_t task) {
                  const std::int64_t end = min_of(p.num_rows, (task + 1) * kRowsPerTask);
                  for (std::int64_t row = task * kRowsPerTask; row < end; ++row) {
                    if (p.rounding != Rounding::kNone) {
                      quantize_row(p, pieces, row, a);
                    } else {
                      const std::int64_t offset = row * p.weights.columns;
                      widen(static_cast<const char*>(p.a) + offset * element_bytes,
                            p.activation_type, const_cast<float*>(a.floats) + offset,
                            p.weights.columns);
                    }
                  }
                });
}

// A few rows by all of the weights, in as many stretches of them as there are workers.
void run_few(const MatMulParams& p, const Pieces& pieces, const Layout& layout,
             const ParallelFor& parallel_for) {
  const std::int64_t num_panels = ceil_div(p.weights.rows, kPanelRows);
  const std::int64_t num_products = p.num_rows * p.weights.rows * p.weights.columns;
  const std::int64_t wanted = min_of(num_products / kMinTaskProducts, parallel_for.num_workers);
  const std::int64_t num_tasks = max_of(1, min_of(num_panels, wanted));
  for_each_task(parallel_for, num_tasks, [&](std::int64_t, std::int64_t task) {
    const std::int64_t end = num_panels * (task + 1) / num_tasks;
    for (std::int64_t i = num_panels * task / num_tasks; i < end; ++i) {
      multiply_stored(p, pieces, layout.a, i * kPanelRows);
    }
  });
}

// Panels of the weights, each by a chunk of rows.
void run_panels(const MatMulParams& p, const Pieces& pieces, const Layout& layout,
                const ParallelFor& parallel_for) {
  const std::int64_t num_panels = ceil_div(p.weights.rows, kPanelRows);
  const std::int64_t num_chunks = ceil_div(p.num_rows, kChunkRows);
  const bool is_serial = p.num_rows * p.weights.rows * p.weights.columns < kMinTaskProducts;
  const std::int64_t per_task =
      max_of(1, min_of(kMaxPanelsPerTask,
                       num_panels * num_chunks / (kWantedTasks * parallel_for.num_workers)));
  const std::int64_t tasks_per_chunk = ceil_div(num_panels, per_task);
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
  return static_cast<std::size_t>(Layout(p, Pieces(p), num_workers, nullptr).bytes);
}

void run(const MatMulParams& p, void* workspace, const ParallelFor& parallel_for) {
  const Pieces pieces(p);
  const Layout layout(p, pieces, parallel_for.num_workers, static_cast<char*>(workspace));
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
#elif defined(KVCONV_USE_AVX512) && defined(KVCONV_USE_VNNI)
extern const MatMulKernel kMatMulAvx512Vnni = {"avx512vnni", workspace_bytes, run};
#elif defined(KVCONV_USE_AVX512)
extern const MatMulKernel kMatMulAvx512 = {"avx512", workspace_bytes, run};
#elif defined(KVCONV_USE_VNNI)
extern const MatMulKernel kMatMulAvxVnni = {"avxvnni", workspace_bytes, run};
#elif defined(KVCONV_USE_AVX2)
extern const MatMulKernel kMatMulAvx2 = {"avx2", workspace_bytes, run};
#else
extern const MatMulKernel kMatMulPortable = {"portable", workspace_bytes, run};
#endif

}  // namespace kvconv

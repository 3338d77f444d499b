#include "sampling.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "error.h"

namespace kvconv::runtime {
namespace {

constexpr std::size_t kDrawBlock = 256;

// Tokens that may still be drawn, ascending by id.
struct Candidates {
  std::vector<std::int32_t> ids;
  std::vector<float> logits;
};

// Returns the place of the largest number, the first of equals; of a NaN where there is one.
std::size_t place_of_largest(std::span<const float> numbers) {
  constexpr std::size_t kLanes = 16, kBlock = 64 * kLanes;
  float best = -std::numeric_limits<float>::infinity();
  std::size_t best_start = 0;
  for (std::size_t start = 0; start < numbers.size(); start += kBlock) {
    const auto block = numbers.subspan(start, std::min(kBlock, numbers.size() - start));
    // Lanes side by side, so that the compiler takes vectors.
    std::array<float, kLanes> largest;
    largest.fill(-std::numeric_limits<float>::infinity());
    std::array<int, kLanes> is_nan{};
    const auto take = [&](std::size_t lane, float number) {
      largest[lane] = number > largest[lane] ? number : largest[lane];
      is_nan[lane] |= number != number;
    };
    const std::size_t whole = block.size() / kLanes * kLanes;
    for (std::size_t i = 0; i < whole; i += kLanes) {
      for (std::size_t lane = 0; lane < kLanes; ++lane) take(lane, block[i + lane]);
    }
    for (std::size_t i = whole; i < block.size(); ++i) take(0, block[i]);
    if (std::any_of(is_nan.begin(), is_nan.end(), [](int found) { return found != 0; })) {
      const auto is_number = [](float number) { return number == number; };
      return start + static_cast<std::size_t>(
                         std::find_if_not(block.begin(), block.end(), is_number) - block.begin());
    }
    const float block_best = *std::max_element(largest.begin(), largest.end());
    if (block_best > best) {
      best = block_best;
      best_start = start;
    }
  }
  const auto found =
      std::find(numbers.begin() + static_cast<std::ptrdiff_t>(best_start), numbers.end(), best);
  return static_cast<std::size_t>(found - numbers.begin());
}

// Keeps the candidates of which `keep` says so, by place.
template <typename Keep>
void filter(Candidates& candidates, Keep keep) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < candidates.ids.size(); ++i) {
    if (!keep(i)) continue;
    candidates.ids[kept] = candidates.ids[i];
    candidates.logits[kept] = candidates.logits[i];
    ++kept;
  }
  candidates.ids.resize(kept);
  candidates.logits.resize(kept);
}

// Returns probabilities in parts of the largest.
std::vector<double> weights_of(const std::vector<float>& logits) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  std::vector<double> weights(logits.size());
  std::transform(logits.begin(), logits.end(), weights.begin(),
                 [&](float logit) { return std::exp(static_cast<double>(logit) - largest); });
  return weights;
}

void keep_top_k(Candidates& candidates, std::size_t top_k) {
  if (top_k >= candidates.logits.size()) return;
  std::vector<float> sorted = candidates.logits;
  const auto last = sorted.begin() + static_cast<std::ptrdiff_t>(top_k) - 1;
  std::nth_element(sorted.begin(), last, sorted.end(), std::greater<>());
  const float least = *last;
  filter(candidates, [&](std::size_t i) { return candidates.logits[i] >= least; });
}

void keep_top_p(Candidates& candidates, double top_p) {
  const std::vector<double> weights = weights_of(candidates.logits);
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  const double cut = (1 - top_p) * total;
  // All tokens below an equal share of the cut add up to less than it: they need no sorting.
  const double least = std::min(cut / static_cast<double>(weights.size()), 1.0);
  std::vector<std::size_t> ascending;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] >= least) ascending.push_back(i);
  }
  std::stable_sort(ascending.begin(), ascending.end(), [&](std::size_t left, std::size_t right) {
    return weights[left] < weights[right];
  });
  double all = 0;
  for (const std::size_t place : ascending) all += weights[place];
  std::vector<bool> is_kept(weights.size());
  double sum = 0;
  for (const std::size_t place : ascending) {
    sum += weights[place];
    is_kept[place] = total - all + sum > cut;
  }
  is_kept[ascending.back()] = true;
  filter(candidates, [&](std::size_t i) { return is_kept[i]; });
}

void keep_min_p(Candidates& candidates, double min_p) {
  const std::vector<double> weights = weights_of(candidates.logits);
  filter(candidates, [&](std::size_t i) { return weights[i] >= min_p; });
}

struct Place {
  std::size_t index;
  double rest;  // how far in, < 1
};

// Returns where the running sum first exceeds `uniform` of the whole.
Place place(std::span<const double> weights, double uniform) {
  const double threshold = uniform * std::accumulate(weights.begin(), weights.end(), 0.0);
  double sum = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const double before = sum;
    sum += weights[i];
    if (sum > threshold) return {i, (threshold - before) / (sum - before)};
  }
  return {weights.size() - 1, 0};  // threshold < the whole sum, so that this is not reached
}

// A block of tokens first, then one of its tokens, each as likely as its weight.
std::size_t draw(const std::vector<double>& weights, double uniform) {
  std::vector<double> blocks;
  for (std::size_t start = 0; start < weights.size(); start += kDrawBlock) {
    const auto begin = weights.begin() + static_cast<std::ptrdiff_t>(start);
    const auto size = static_cast<std::ptrdiff_t>(std::min(kDrawBlock, weights.size() - start));
    blocks.push_back(std::accumulate(begin, begin + size, 0.0));
  }
  const Place block = place(blocks, uniform);
  const std::size_t start = block.index * kDrawBlock;
  const std::span<const double> inside(weights.data() + start,
                                       std::min(kDrawBlock, weights.size() - start));
  return start + place(inside, block.rest).index;
}

void penalise(std::vector<float>& logits, std::span<const std::int32_t> seen, float penalty) {
  std::vector<std::int32_t> distinct(seen.begin(), seen.end());
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  for (const std::int32_t id : distinct) {
    float& logit = logits[static_cast<std::size_t>(id)];
    logit = logit < 0 ? logit * penalty : logit / penalty;
  }
}

}  // namespace

double Random::next() {
  state_ += 0x9E3779B97F4A7C15;
  std::uint64_t mixed = state_;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
  mixed ^= mixed >> 31;
  return static_cast<double>(mixed >> 11) * 0x1p-53;
}

std::uint64_t fresh_seed() {
  std::random_device device;
  return std::uint64_t{device()} << 32 | device();
}

void check_sampling(const kvconv_sampling& sampling) {
  const auto check = [](const char* name, double value, bool is_valid, const char* interval) {
    if (!is_valid) fail(KVCONV_INVALID_ARGUMENT, name, " is ", value, "; it must be in ", interval);
  };
  const double temperature = sampling.temperature, penalty = sampling.repetition_penalty;
  check("temperature", temperature, temperature == 0 || (temperature >= 1e-3 && temperature <= 1e3),
        "0, or in [0.001, 1000]");
  check("top_k", sampling.top_k, sampling.top_k >= 0, "[0, inf)");
  check("top_p", sampling.top_p, sampling.top_p >= 0 && sampling.top_p <= 1, "[0, 1]");
  check("min_p", sampling.min_p, sampling.min_p >= 0 && sampling.min_p <= 1, "[0, 1]");
  check("repetition_penalty", penalty, penalty >= 1e-3 && penalty <= 1e3, "[0.001, 1000]");
}

std::int32_t choose_token(const kvconv_sampling& sampling, std::span<const std::int32_t> seen,
                          std::span<const float> logits, Random& random) {
  std::vector<float> changed;
  const bool has_penalty = sampling.repetition_penalty != 1;
  const bool has_temperature = sampling.temperature != 0 && sampling.temperature != 1;
  if (has_penalty || has_temperature) {
    changed.assign(logits.begin(), logits.end());
    if (has_penalty) penalise(changed, seen, static_cast<float>(sampling.repetition_penalty));
    if (has_temperature) {
      for (float& logit : changed) logit /= static_cast<float>(sampling.temperature);
    }
    logits = changed;
  }
  const std::size_t best = place_of_largest(logits);
  if (!std::isfinite(logits[best])) {
    fail(KVCONV_FAILED, "The model's logits hold ", logits[best],
         ". Run `kvconv verify` on the bundle, or export it with --dtype float32.");
  }
  if (sampling.temperature == 0) return static_cast<std::int32_t>(best);
  Candidates candidates{std::vector<std::int32_t>(logits.size()), {logits.begin(), logits.end()}};
  std::iota(candidates.ids.begin(), candidates.ids.end(), 0);
  if (sampling.top_k > 0) keep_top_k(candidates, static_cast<std::size_t>(sampling.top_k));
  if (sampling.top_p < 1) keep_top_p(candidates, sampling.top_p);
  if (sampling.min_p > 0) keep_min_p(candidates, sampling.min_p);
  return candidates.ids[draw(weights_of(candidates.logits), random.next())];
}

}  // namespace kvconv::runtime

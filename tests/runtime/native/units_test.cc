// The reader of JSON under damage, SHA-256 and random numbers against published values, sampling on
// hard logits.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "error.h"
#include "json.h"
#include "sampling.h"
#include "sha256.h"

namespace kvconv::runtime {
namespace {

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

bool is_refused(const std::string& document) {
  try {
    parse_json(document);
    return false;
  } catch (const std::runtime_error&) {
    return true;
  }
}

constexpr const char* kDocument =
    R"({"a": [1, -2.5e3, true, null, "x\"\\\n\u00e9\ud83d\ude00"], "b": {"c": {}, "d": []}, "e": 12345678901234567890})";

void json_is_read_and_refused() {
  const Json json = parse_json(kDocument);
  const auto& object = *json.get<Json::Object>();
  const auto& array = *object.at("a").get<Json::Array>();
  expect(*array[0].get<std::int64_t>() == 1 && *array[1].get<double>() == -2500, "numbers");
  expect(*array[4].get<std::string>() == "x\"\\\n\xC3\xA9\xF0\x9F\x98\x80", "escapes");
  expect(*object.at("e").get<double>() == 12345678901234567890.0, "a number beyond int64");
  expect(std::isnan(*parse_json("NaN").get<double>()), "NaN, as Python writes it");
  for (const char* document : {"",
                               "{",
                               "[1,]",
                               "{\"a\":1,}",
                               "{\"a\" 1}",
                               "{\"a\":1,\"a\":2}",
                               "01",
                               "-",
                               "1.",
                               "1e",
                               "tru",
                               "\"",
                               "\"\\x\"",
                               "\"\\u12\"",
                               "\"\\ud800\"",
                               "\"\\udc00\"",
                               "\"\n\"",
                               "1 2",
                               "\"\xC0\x80\"",
                               "\"\xED\xA0\x80\"",
                               "\xFF",
                               "'a'",
                               "{a:1}"}) {
    expect(is_refused(document), document);
  }
  expect(is_refused(std::string(100000, '[')), "endless nesting");
  expect(find_member(kDocument, "b") == "{\"c\": {}, \"d\": []}" &&
             find_member(kDocument, "c").empty(),
         "a member");
  expect(find_member(kDocument, "e") == "12345678901234567890", "the last member");
}

// Damaged documents are read or refused, and the sanitizers see nothing.
void json_survives_damage() {
  std::mt19937 random(1);
  const std::string whole = kDocument;
  int refused = 0;
  constexpr int kRounds = 20000;
  for (int round = 0; round < kRounds; ++round) {
    std::string damaged = whole;
    for (unsigned change = 0; change <= random() % 3; ++change) {
      const std::size_t at = random() % damaged.size();
      switch (random() % 3) {
        case 0:
          damaged[at] = static_cast<char>(random());
          break;
        case 1:
          damaged.erase(at, 1 + random() % 5);
          break;
        default:
          damaged.insert(at, damaged.substr(random() % damaged.size(), random() % 9));
      }
      if (damaged.empty()) break;
    }
    refused += is_refused(damaged);
    try {
      (void)find_member(damaged, "b").size();
    } catch (const std::runtime_error&) {
    }
    std::string bytes;
    for (unsigned i = 0; i < random() % 12; ++i) bytes.push_back(static_cast<char>(random() % 128));
    expect(*parse_json(quote_json(bytes)).get<std::string>() == bytes, "a quoted string is itself");
  }
  expect(refused > kRounds / 2 && refused < kRounds, "damage is mostly refused");
}

std::string sha256(const std::string& bytes, std::size_t piece) {
  Sha256 hash;
  for (std::size_t i = 0; i < bytes.size(); i += piece)
    hash.update(std::string_view(bytes).substr(i, piece));
  return hash.digest();
}

void sha256_has_published_values() {  // FIPS 180-4's examples
  for (const std::size_t piece :
       {std::size_t{1}, std::size_t{63}, std::size_t{64}, std::size_t{1000}}) {
    expect(sha256("", piece) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
           "sha256 of none");
    expect(
        sha256("abc", piece) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        "sha256 abc");
    expect(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", piece) ==
               "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1",
           "sha256 of two blocks");
    expect(sha256(std::string(1000000, 'a'), piece) ==
               "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0",
           "sha256 of a million");
  }
}

void random_numbers_are_split_mix_64() {
  Random zero(0), other(1234567);
  expect(zero.next() == static_cast<double>(0xE220A8397B1DCDAF >> 11) * 0x1p-53, "seed 0");
  expect(other.next() == static_cast<double>(6457827717110365317ull >> 11) * 0x1p-53,
         "seed 1234567, first");
  expect(other.next() == static_cast<double>(3203168211198807973ull >> 11) * 0x1p-53,
         "seed 1234567, second");
}

void sampling_takes_hard_logits() {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Random random(1);
  kvconv_sampling sampling = KVCONV_SAMPLING_INIT;
  const std::vector<std::int32_t> seen = {2, 2, 0};
  std::vector<float> logits(1000, -kInfinity);
  logits[777] = -3;
  logits[900] = -3;
  expect(choose_token(sampling, seen, logits, random) == 777, "the first of equals");
  sampling.temperature = 1;
  bool found[2] = {false, false};
  for (int i = 0; i < 100; ++i) found[choose_token(sampling, seen, logits, random) == 900] = true;
  expect(found[0] && found[1], "equals are drawn alike");
  sampling.top_k = 1;
  sampling.top_p = 0;
  sampling.min_p = 1;
  const std::int32_t chosen = choose_token(sampling, seen, logits, random);
  expect(chosen == 777 || chosen == 900, "the narrowest filters keep a token");
  for (const float bad : {std::nanf(""), kInfinity}) {
    logits[5] = bad;
    try {
      choose_token(sampling, seen, logits, random);
      expect(false, "logits that are no numbers are refused");
    } catch (const Error& error) {
      expect(error.code == KVCONV_FAILED, "with a code");
    }
  }
}

}  // namespace
}  // namespace kvconv::runtime

int main() {
  using namespace kvconv::runtime;
  json_is_read_and_refused();
  json_survives_damage();
  sha256_has_published_values();
  random_numbers_are_split_mix_64();
  sampling_takes_hard_logits();
  std::puts("ok");
}

// The reader of kernel packs: whole ones, and everything that can be wrong with one.
#include <functional>

#include "check.h"
#include "pack_writer.h"

namespace kvconv::test {
namespace {

using cuda::Argument;
using cuda::CudaError;
using cuda::Device;
using cuda::ImageFormat;
using cuda::KernelKind;
using cuda::KernelPack;
using cuda::Variant;

constexpr Device kA100 = {80, 166912};

std::string complaint_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const CudaError& error) {
    return error.message;
  }
  return "";
}

void check_complains(const std::function<void()>& body, const std::string& part) {
  const std::string message = complaint_of(body);
  CHECK(message.find(part) != std::string::npos, "wanted \"%s\" in \"%s\"", part.c_str(),
        message.c_str());
}

std::string hex(std::span<const std::uint8_t> bytes) {
  std::string result;
  for (std::uint8_t byte : bytes) {
    result += "0123456789abcdef"[byte >> 4];
    result += "0123456789abcdef"[byte & 15];
  }
  return result;
}

void test_sha256() {
  const auto digest = [](const std::string& text) {
    return hex(
        cuda::sha256(std::span(reinterpret_cast<const std::uint8_t*>(text.data()), text.size())));
  };
  CHECK(digest("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", "empty");
  CHECK(digest("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", "abc");
  CHECK(digest("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1",
        "56 bytes");
  CHECK(digest(std::string(1000000, 'a')) ==
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0",
        "a million");
}

PackedKernel kernel_of(KernelKind kind, ImageFormat format, std::uint32_t capability) {
  PackedKernel kernel;
  kernel.variant = {kind, DataType::kFloat16, DataType::kInt8, 64, 64, 3, 64, cuda::kCausal};
  kernel.format = format;
  kernel.compute_capability = capability;
  kernel.function = "kernel_" + std::to_string(capability);
  kernel.arguments = {Argument::kQuery, Argument::kScale, Argument::kCapacity};
  return kernel;
}

Bytes small_pack() {
  return write_pack({kernel_of(KernelKind::kAppend, ImageFormat::kPtx, 80),
                     kernel_of(KernelKind::kPrefill, ImageFormat::kPtx, 80)});
}

void test_whole_pack_reads_back() {
  const Bytes bytes = small_pack();
  const KernelPack pack(bytes);
  CHECK(pack.kernels().size() == 2, "%zu kernels", pack.kernels().size());
  const cuda::Kernel& kernel = pack.kernels()[1];
  const PackedKernel written = kernel_of(KernelKind::kPrefill, ImageFormat::kPtx, 80);
  CHECK(kernel.variant == written.variant, "%s", cuda::variant_text(kernel.variant).c_str());
  CHECK(kernel.function == written.function, "%s", kernel.function.c_str());
  CHECK(kernel.arguments == written.arguments, "the arguments differ");
  CHECK(kernel.num_warps == 4 && kernel.tile_m == 64 && kernel.tile_n == 32, "the sizes differ");
  CHECK(std::string(reinterpret_cast<const char*>(kernel.image.data())) == ptx_of(written),
        "the image differs");
  CHECK(pack.is_copy_of(bytes) && !pack.is_copy_of(Bytes(3)), "copies");
}

void test_every_cut_is_refused() {
  const Bytes bytes = small_pack();
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    const Bytes cut(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
    check_complains([&] { KernelPack pack(cut); }, "cut short");
  }
}

// Whatever an entry says, sealed so that only the entry itself can be complained about.
void test_each_damage_has_its_message() {
  const auto with = [](std::size_t at, std::uint64_t value, std::size_t width) {
    Bytes bytes = small_pack();
    put(bytes, at, value, width);
    if (at >= 12) seal(bytes);
    return bytes;
  };
  const auto check = [](const Bytes& bytes, const std::string& part) {
    check_complains([&] { KernelPack pack(bytes); }, part);
  };
  check(with(0, 'X', 1), "another file");
  check(with(8, 2, 4), "has version 2; this kvconv reads version 1");
  check(with(12, 1000, 4), "1000 kernels");
  check(with(12, 0xFFFFFFFF, 4), "4294967295 kernels");
  constexpr std::size_t kEntry = 64;
  check(with(kEntry, 9, 4), "kernel 0 has the unknown kind 9");
  check(with(kEntry + 4, 3, 4), "unknown format 3");
  check(with(kEntry + 8, 0, 4), "compute capability 0");
  check(with(kEntry + 12, 11, 4), "unknown element type 11");
  check(with(kEntry + 40, 64, 4), "64 warps");
  check(with(kEntry + 48, 0, 4), "tiles of 0 x 32");
  check(with(kEntry + 64, 65, 4), "65 arguments");
  check(with(kEntry + 72, 64, 8), "bytes at 64");    // inside the table
  check(with(kEntry + 72, 705, 8), "bytes at 705");  // not aligned
  check(with(kEntry + 72, std::uint64_t{1} << 63, 8), "the file has");
  check(with(kEntry + 80, 0, 8), "said to be 0 bytes");
  check(with(kEntry + 80, ~std::uint64_t{0}, 8), "the file has");
  check(with(kEntry + 88, 1, 8), "another sha256 than its table");
  check(with(kEntry + 120, 0, 1), "has no name");
  check(with(kEntry + 216, 200, 1), "unknown argument 200");

  Bytes flipped = small_pack();
  flipped.back() ^= 1;
  check(flipped, "its sha256 is not what its header says");
  Bytes grown = small_pack();
  grown.push_back(0);
  check(grown, "has grown");
  Bytes unended = write_pack({kernel_of(KernelKind::kAppend, ImageFormat::kPtx, 80)});
  unended.back() = 'x';
  put_digest(unended, kEntry + 88, std::span(unended).subspan(384));
  seal(unended);
  check(unended, "without its final zero");
}

// Random bytes anywhere in table and header, sealed: refused or read, never out of bounds.
void test_random_damage_stays_inside() {
  Random random(7);
  int refused = 0;
  for (int round = 0; round < 3000; ++round) {
    Bytes bytes = small_pack();
    for (std::int64_t i = 1 + random.below(4); i > 0; --i) {
      bytes[static_cast<std::size_t>(12 + random.below(64 + 2 * 320 - 12))] =
          static_cast<std::uint8_t>(random.below(256));
    }
    seal(bytes);
    if (!complaint_of([&] { KernelPack pack(bytes); }).empty()) ++refused;
  }
  CHECK(refused > 1000, "only %d of 3000 were refused", refused);
}

void test_choice_is_the_newest_that_runs() {
  std::vector<PackedKernel> kernels = {kernel_of(KernelKind::kPrefill, ImageFormat::kCubin, 80),
                                       kernel_of(KernelKind::kPrefill, ImageFormat::kCubin, 86),
                                       kernel_of(KernelKind::kPrefill, ImageFormat::kCubin, 90),
                                       kernel_of(KernelKind::kPrefill, ImageFormat::kPtx, 80)};
  const Variant variant = kernels[0].variant;
  const auto chosen = [&](const std::vector<PackedKernel>& from, const Device& device) {
    const Bytes bytes = write_pack(from);
    const KernelPack pack(bytes);
    const cuda::Kernel& kernel = pack.kernels()[pack.find(variant, device)];
    return (kernel.format == ImageFormat::kPtx ? "ptx" : "") +
           std::to_string(kernel.compute_capability);
  };
  CHECK(chosen(kernels, {80, 166912}) == "80", "sm_80");
  CHECK(chosen(kernels, {86, 101376}) == "86", "sm_86");
  CHECK(chosen(kernels, {87, 166912}) == "86", "sm_87");
  CHECK(chosen(kernels, {89, 101376}) == "86", "sm_89");
  CHECK(chosen(kernels, {90, 232448}) == "90", "sm_90");
  CHECK(chosen(kernels, {100, 232448}) == "ptx80", "sm_100: no machine code of an older kind");
  kernels[1].shared_bytes = 120000;
  CHECK(chosen(kernels, {86, 101376}) == "80", "what takes more shared memory is passed over");

  check_complains([&] { chosen(kernels, {75, 65536}); },
                  "compute capability 7.5 and 65536 bytes of shared memory for a block; the kernel "
                  "pack has sm_80, sm_86, sm_90, PTX from 8.0");
  for (std::uint32_t Variant::* field :
       {&Variant::head_dim, &Variant::value_head_dim, &Variant::group, &Variant::rotary_dim,
        &Variant::features}) {
    Variant other = variant;
    other.*field += 1;
    const Bytes bytes = write_pack(kernels);
    const KernelPack pack(bytes);
    check_complains([&] { pack.find(other, kA100); }, "has no prefill of float16 over int8");
  }
}

}  // namespace
}  // namespace kvconv::test

int main() {
  using namespace kvconv::test;
  test_sha256();
  test_whole_pack_reads_back();
  test_every_cut_is_refused();
  test_each_damage_has_its_message();
  test_random_damage_stays_inside();
  test_choice_is_the_newest_that_runs();
  std::printf("kernel packs: all right\n");
  return 0;
}

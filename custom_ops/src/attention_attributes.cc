// The attributes of kvconv::FlashAttention, checked when a session is made.
#include <cmath>

#include "attention_op.h"

namespace kvconv {

AttentionAttributes read_attributes(const ort::Api* api, const ort::KernelInfo* info) {
  AttentionAttributes a;
  a.num_heads = read_int(api, info, "num_heads", 0);
  a.kv_num_heads = read_int(api, info, "kv_num_heads", 0);
  a.scale = read_float(api, info, "scale", 0.0F);
  a.softcap = read_float(api, info, "softcap", 0.0F);
  a.window_size = read_int(api, info, "window_size", 0);
  a.is_causal = read_int(api, info, "causal", 1) != 0;
  a.rotary_interleaved = read_int(api, info, "rotary_interleaved", 0) != 0;
  a.rotary_dim = read_int(api, info, "rotary_dim", 0);
  const std::string cache_mode = read_string(api, info, "cache_mode", "auto");

  if (a.num_heads < 1 || a.kv_num_heads < 1 || a.num_heads % a.kv_num_heads != 0) {
    refuse(text("num_heads is ", a.num_heads, " and kv_num_heads is ", a.kv_num_heads,
                "; both must be at least 1 and the first a multiple of the second."));
  }
  if (!std::isfinite(a.scale)) refuse(text("scale is ", a.scale, "; it must be finite."));
  if (!std::isfinite(a.softcap) || a.softcap < 0.0F) {
    refuse(text("softcap is ", a.softcap, "; it must be finite and at least 0 (0 = off)."));
  }
  if (a.window_size < 0) {
    refuse(text("window_size is ", a.window_size, "; it must be at least 0 (0 = off)."));
  }
  if (a.rotary_dim < 0 || a.rotary_dim % 2 != 0) {
    refuse(text("rotary_dim is ", a.rotary_dim,
                "; it must be even and at least 0 (0 = the whole head)."));
  }
  a.is_ring = cache_mode == "ring";
  if (!a.is_ring && cache_mode != "auto") {
    refuse(text("cache_mode is \"", cache_mode, "\"; it must be \"auto\" or \"ring\"."));
  }
  if (a.is_ring && a.window_size == 0) {
    refuse(
        "cache_mode is \"ring\" but window_size is 0; a ring needs a window, because it keeps the "
        "newest tokens only.");
  }
  return a;
}

}  // namespace kvconv

// The vectors of the instruction set that a file is compiled for. Their interface is described in
// vec_generic.h.
#pragma once

#if defined(KVCONV_USE_AVX512)
#include "vec_avx512.h"
#elif defined(KVCONV_USE_AVX2)
#include "vec_avx2.h"
#else
#include "vec_generic.h"
#endif

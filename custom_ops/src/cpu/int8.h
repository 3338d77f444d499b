// Products of bytes on the vectors of the instruction set that a file is compiled for. Their
// interface is described in int8_generic.h.
#pragma once

#if defined(KVCONV_USE_AVX512)
#include "int8_avx512.h"
#elif defined(KVCONV_USE_AVX2)
#include "int8_avx2.h"
#else
#include "int8_generic.h"
#endif

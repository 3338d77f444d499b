#include "fake_ort.h"

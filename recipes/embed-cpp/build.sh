#!/bin/sh
# build.sh OUT: the program, linked with the kvconv that is installed (KVCONV: its command).
set -eu
here=$(dirname "$0")
native=$(cd "$("${KVCONV:-kvconv}" doctor --cmake-dir)/.." && pwd)
"${CXX:-c++}" -std=c++17 -O2 -Wall -Wextra -pedantic ${CXXFLAGS:-} -I"$native/include" "$here/generate.cpp" -L"${native%/*}/custom_ops" -lkvconv_runtime -Wl,-rpath,"${native%/*}/custom_ops" -pthread -o "$1"

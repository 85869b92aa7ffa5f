#!/usr/bin/env bash
# Builds llama.cpp with its RPC backend from the source distribution of llama-cpp-python, for benchmarks/peers.py.
#
#   benchmarks/build_llama_cpp.sh [FOLDER]
#
# FOLDER (else $LLAMA_CPP_DIR, else ~/.cache/p2pshard-benchmarks/llama.cpp) gets the archive, the source and build/bin.
# Needs cmake, ninja, a C++ compiler and pip ($PYTHON, else python3). JOBS: compilers at once, all cores by default.
# What is there already is not fetched or built again.
set -euo pipefail
version=0.3.36
folder=${1:-${LLAMA_CPP_DIR:-$HOME/.cache/p2pshard-benchmarks/llama.cpp}}
mkdir -p "$folder"
cd "$folder"
source=llama_cpp_python-$version/vendor/llama.cpp
if [ ! -d "$source" ]; then
  "${PYTHON:-python3}" -m pip download --no-deps --no-binary :all: --dest . "llama-cpp-python==$version"
  tar -xzf "llama_cpp_python-$version.tar.gz"
fi
cmake -S "$source" -B build -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DGGML_NATIVE=ON -DGGML_RPC=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF
ninja -C build -j "${JOBS:-$(nproc)}" llama-batched-bench ggml-rpc-server
echo "built: $folder/build/bin"

#!/usr/bin/env bash
# Gathers in one folder all that gpu_day.sh needs on a machine without a package index: kvjax's wheel with the CUDA
# module, the C++ test of the GPU, and wheels of what the tests import and such a machine may lack (it has jax for CUDA
# and NumPy).
#
#     benchmarks/gpu_pack.sh [FOLDER]        # build/gpu by default, which git ignores; wants nvcc, and no GPU
#
# Named by variables: PYTHON, whose version has to be the machine's (3.12); ARCHITECTURES of its GPU (90: H100, H200).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(realpath -m "${1:-$root/build/gpu}")
python=${PYTHON:-python3.12}
limit=$((64 << 20)) # bytes

rm -rf "$folder/wheels" "$folder/device_gpu_test"
mkdir -p "$folder/wheels"
git -C "$root" describe --always --dirty --abbrev=12 >"$folder/commit" # which gpu_day.sh compares with its own
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Built against the headers of the oldest JAX, as for anyone (pyproject.toml): it runs with that and newer ones.
(cd "$root" && "$python" -m pip wheel -q --no-deps -w "$folder/wheels" . \
  -C cmake.define.KVJAX_CUDA=ON -C cmake.define.CMAKE_CUDA_ARCHITECTURES="${ARCHITECTURES:-90}")

cmake -S "$root" -B "$scratch" -DKVJAX_CPP_TESTS=ON -DKVJAX_CUDA=ON \
  -DCMAKE_CUDA_ARCHITECTURES="${ARCHITECTURES:-90}" >"$scratch/log" || { cat "$scratch/log"; exit 1; }
cmake --build "$scratch" --target device_gpu_test -j 2 >"$scratch/log" || { cat "$scratch/log"; exit 1; }
cp "$scratch/tests/cpp/device_gpu_test" "$folder/"

# pip finds wheels of one platform tag at a time, so several are named.
platforms=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
  platforms+=(--platform "${tag}_x86_64")
done
"$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
  -d "$folder/wheels" \
  "flax>=0.12.8" "optax>=0.2.8" "orbax-checkpoint>=0.12.8,<1" "tensorstore>=0.1.80" absl-py aiofiles etils humanize \
  msgpack nest-asyncio psutil simplejson treescope "hypothesis>=6.100" sortedcontainers "pytest>=8" iniconfig pluggy \
  packaging pygments "pytest-xdist>=3.6" execnet "xxhash>=3.4" "rich>=13" markdown-it-py mdurl importlib-resources zipp \
  "google-crc32c>=1.5" "uvicorn>=0.30"

bytes=$(du -sb "$folder" | cut -f 1)
echo "$folder: $(ls "$folder/wheels" | wc -l) wheels and device_gpu_test, $((bytes >> 20)) MiB of at most $((limit >> 20))"
[ "$bytes" -le "$limit" ]

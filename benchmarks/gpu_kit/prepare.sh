#!/bin/bash
# make gpu-kit: pack this tree, and the wheels that a machine with a CUDA device and no package registry lacks.
#
# Writes dist/gpu-kit/*.whl and dist/gpu-kit.tar (tracked files and those wheels). On that machine, in the unpacked
# folder: bash benchmarks/gpu_kit/on_device.sh A, then B and C, each within ten minutes.
#   GPU_KIT_PYTHON    Python of that machine (3.12)
#   GPU_KIT_PACKAGES  what is missing there; versions are those of constraints.txt. The default suits an image with
#                     torch, triton, numpy, numba, pandas, matplotlib and pytest, and what these require.
#                     ray (79 MB) is not needed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${GPU_KIT_PYTHON:-3.12}
# transformers too: exports of other versions may keep attention masks, so that times would not be comparable
packages=${GPU_KIT_PACKAGES:-annotated-doc annotated-types anyio cffi click cryptography h11 hf-xet httpcore2 httpx2
    huggingface_hub idna markdown-it-py mdurl prometheus_client psutil pycparser pydantic pydantic_core pytest-timeout
    PyYAML regex rich safetensors shellingham simpy tokenizers tornado tqdm transformers truststore typer typing-inspection
    typing_extensions xxhash}
into=dist/gpu-kit
rm -rf "$into" && mkdir -p "$into"
for package in $packages; do
    pin=$(grep -iE "^${package//[-_]/[-_]}==" constraints.txt) || {
        echo "error: constraints.txt has no version of $package" >&2
        exit 1
    }
    "${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$into" \
        --python-version "$python" --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform manylinux1_x86_64 "$pin"
done
git ls-files -z | tar --create --file dist/gpu-kit.tar --null --files-from - "$into"
echo "dist/gpu-kit.tar: $(du -h dist/gpu-kit.tar | cut -f1), $(ls "$into" | wc -l) wheels"

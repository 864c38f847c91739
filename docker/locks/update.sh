#!/bin/sh
# Writes {build,cpu,tpu,cuda}.txt anew, for Linux on x86-64; `make locks` runs it. $1: the uv to use.
# uv reads hashes and requirements from the index: nothing large is downloaded. torch-cpu.txt is
# written by hand.
set -eu
uv=$1
locks=$(cd "$(dirname "$0")" && pwd)
cd "$locks/../.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# compile NAME PLATFORM ARGUMENTS...: one file for Python 3.11 and 3.12, or it is refused.
compile() {
    name=$1 platform=$2
    shift 2
    for python in 3.11 3.12; do
        : >> "$scratch/3.11"
        "$uv" --quiet --no-progress pip compile --only-binary :all: --generate-hashes --no-header \
            --no-annotate --python-platform "$platform" --python-version "$python" \
            --constraints "$scratch/3.11" --output-file "$scratch/$python.new" "$@"
        mv "$scratch/$python.new" "$scratch/$python"
    done
    cmp "$scratch/3.11" "$scratch/3.12" || {
        echo "$name.txt would differ between Python 3.11 and 3.12" >&2
        exit 1
    }
    { echo "# Written by \`make locks\`."; cat "$scratch/3.11"; } > "$locks/$name.txt"
    rm "$scratch/3.11" "$scratch/3.12"
    echo "$name.txt: $(grep -c == "$locks/$name.txt") packages"
}

compile build x86_64-manylinux_2_28 --no-config docker/locks/build.in
# torch itself is in torch-cpu.txt; uv.toml says why.
compile cpu x86_64-manylinux_2_28 --config-file docker/locks/uv.toml --no-emit-package torch \
    --extra serve --extra batch pyproject.toml docker/locks/cpu.in
compile tpu x86_64-manylinux_2_31 --config-file docker/locks/uv.toml --no-emit-package torch \
    --extra serve --extra jax --extra batch pyproject.toml docker/locks/tpu.in  # libtpu's wheels name glibc 2.31
compile cuda x86_64-manylinux_2_28 --no-config --overrides docker/locks/cuda-without.txt \
    --extra serve --extra cuda --extra batch pyproject.toml docker/locks/cuda.in

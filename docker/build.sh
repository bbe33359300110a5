#!/usr/bin/env bash
# Builds the images with docker, podman or buildah, whichever runs here: docker/build.sh [control|train ...]
# IMAGE is the trainer's name (default wandistill), the other is IMAGE-control; TAG defaults to the version. BUILD_ARGS is
# passed on: `--build-arg BASE=...`, or for podman and buildah behind a private CA
# `--volume /path/ca.crt:/run/ca.crt:ro --build-arg SSL_CERT_FILE=/run/ca.crt --build-arg PIP_CERT=/run/ca.crt`.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
image=${IMAGE:-wandistill}
tag=${TAG:-$version}
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)

if docker info >/dev/null 2>&1; then
  engine=docker build=(docker build)
elif command -v podman >/dev/null; then
  engine=podman build=(podman build)
elif command -v buildah >/dev/null; then
  engine=buildah build=(buildah bud --layers)
else
  echo "No docker that runs, no podman, no buildah: install one of them, for example: apt-get install buildah" >&2
  exit 2
fi

read -ra extra <<<"${BUILD_ARGS:-}"
[ $# -gt 0 ] || set -- control train
for target in "$@"; do
  name=$image
  [ "$target" = train ] || name=$image-$target
  "${build[@]}" --file docker/Dockerfile --target "$target" --tag "$name:$tag" \
    --build-arg "VERSION=$version" --build-arg "REVISION=$revision" "${extra[@]}" .
  echo "built $name:$tag; to give it to its registry: $engine push $name:$tag"
done

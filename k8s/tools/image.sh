#!/bin/sh
# Build both images with podman, or docker where that is what there is: k8s/tools/image.sh [TAG]
#
#   BASE=debian    no image registry is reached: the base comes from Debian's packages (debootstrap, as root), a stand-in for
#                  the Redis image too, and Python's packages are downloaded by this machine's pip, as it is configured
#   VARIANT=cuda   torch with NVIDIA's libraries; the engine's image is then named triptych-engine-cuda
#   TORCH_CPU_INDEX=URL   index of torch's CPU builds; without it the usual index decides, whose builds are larger
#   ENGINE=docker  takes that one
set -eu
cd "$(dirname "$0")/../.."
tag=${1:-$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)}
variant=${VARIANT:-cpu}
engine=${ENGINE:-$(command -v podman >/dev/null && echo podman || echo docker)}
command -v "$engine" >/dev/null || { echo "neither podman nor docker is installed; on Debian: apt-get install podman" >&2; exit 1; }
if [ "$engine" = podman ] && [ -z "${CONTAINERS_CONF:-}" ] && [ ! -d /run/systemd/system ]; then
    export CONTAINERS_CONF="$PWD/k8s/tools/containers.conf"
fi
base=$(sed -n 's/^ARG BASE_IMAGE=//p' Dockerfile)
redis=$(sed -n '/name: redis$/,/newTag/s/ *newTag: //p' k8s/components/images/kustomization.yaml)
extra=""

# The root file system that Debian's packages make, as an image of the name that the Dockerfile asks for.
debian_base() {
    "$engine" image inspect "$base" >/dev/null 2>&1 && return
    root=$(mktemp -d)
    chmod 755 "$root"  # it becomes /, which others than root are to enter
    debootstrap --variant=minbase --include=ca-certificates bookworm "$root" >"$root.log" 2>&1 || { tail -5 "$root.log" >&2; exit 1; }
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/usr/share/doc "$root"/usr/share/man
    tar -C "$root" -c . | "$engine" import --quiet - "$base" >/dev/null
    rm -rf "$root" "$root.log"
}

# Redis from Debian, under the name that the manifests ask for.
debian_redis() {
    "$engine" image inspect "redis:$redis" >/dev/null 2>&1 && return
    # shellcheck disable=SC2086
    printf 'FROM %s\nRUN apt-get update && apt-get install -y --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/*\nUSER 999:999\n' "$base" |
        "$engine" build --quiet --network=host --tag "redis:$redis" - >/dev/null
}

# What pip would install for this Python, as wheels in a folder, so that the build needs no index.
wheels() {
    folder="$PWD/.cache/wheels/$variant"
    mkdir -p "$folder"
    python=.venv/bin/python
    [ -x "$python" ] || python=python3
    wanted=$("$python" -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']
print('\n'.join(p['dependencies'] + p['optional-dependencies']['engine'] + ['setuptools>=77']))")
    # redis-py asks for the last one on Pythons before 3.11.3, which Debian's is and this machine's may not be.
    printf '%s\n' "$wanted" async-timeout >"$folder/requirements.txt"
    "$python" -m pip download --quiet --quiet --disable-pip-version-check --only-binary=:all: --exists-action=i \
        -c constraints.txt -r "$folder/requirements.txt" -d "$folder"
    extra="--network=host --volume=$folder:/wheels:ro --build-arg=PIP_FIND_LINKS=/wheels --build-arg=PIP_NO_INDEX=1"
}

if [ "${BASE:-}" = debian ]; then
    [ "$engine" = podman ] || { echo "BASE=debian needs podman, since docker mounts no folder into a build" >&2; exit 1; }
    command -v debootstrap >/dev/null || sh .ci/system-packages debootstrap
    debian_base
    debian_redis
    wheels
elif [ -n "${BASE:-}" ]; then
    echo "BASE=$BASE: only debian is known; BASE_IMAGE in the Dockerfile says what is used else" >&2
    exit 1
fi

suffix=""
[ "$variant" = cpu ] || suffix="-$variant"
for target in router engine; do
    name="triptych-$target:$tag"
    [ "$target" = router ] || name="triptych-$target$suffix:$tag"
    # shellcheck disable=SC2086
    "$engine" build --quiet $extra --target "$target" --build-arg "VARIANT=$variant" --build-arg "VERSION=$tag" \
        --build-arg "TORCH_CPU_INDEX=${TORCH_CPU_INDEX:-}" --tag "$name" . >/dev/null
    bytes=$("$engine" image inspect --format '{{.Size}}' "$name")
    echo "$name: $((bytes / 1000000)) MB"
done

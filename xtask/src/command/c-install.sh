#!/usr/bin/env bash
# Installs the libraries in the folder $2 into the prefix $1, as version $3: with the header, the
# files for pkg-config and CMake, and the NIXL backend. Files are replaced and not written to: a
# program that runs keeps its library.
set -euo pipefail
prefix=$1 built=$2 version=$3 lib=$1/lib
source=${0%/*}/../../../objstore/c
# As in objstore/c/build.rs.
case $version in
0.*) soname=libripieno.so.${version%.*} ;;
*) soname=libripieno.so.${version%%.*} ;;
esac
mkdir -p "$prefix/include" "$lib/pkgconfig" "$lib/cmake/Ripieno" "$lib/nixl"
install -v -m 644 "$source/include/ripieno.h" "$prefix/include/ripieno.h"
install -v -m 644 "$built/libripieno_c.a" "$lib/libripieno.a"
install -v -m 755 "$built/libripieno_c.so" "$lib/libripieno.so.$version"
ln -sfv "libripieno.so.$version" "$lib/$soname"
ln -sfv "$soname" "$lib/libripieno.so"
for file in pkgconfig/ripieno.pc cmake/Ripieno/RipienoConfig{,Version}.cmake; do
    text=$(sed "s/@VERSION@/$version/g; s/@SONAME@/$soname/g" "$source/${file##*/}.in")
    install -v -m 644 /dev/stdin "$lib/$file" <<<"$text"
done
# The static library is in it. Renamed at once: a process may have the old one open.
"${CXX:-c++}" -std=c++20 -O2 -fPIC -shared -fvisibility=hidden -pthread -Wall -Wextra -Werror \
    -pedantic -DRIPIENO_PLUGIN_VERSION="\"$version\"" -I "$prefix/include" "$source/nixl/plugin.cpp" \
    "$lib/libripieno.a" -Wl,--exclude-libs,ALL -ldl -lm -lrt -o "$lib/nixl/made.so"
mv -v "$lib/nixl/made.so" "$lib/nixl/libplugin_RIPIENO.so"

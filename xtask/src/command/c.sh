# Builds and runs the examples in $2 with the files installed in $1/prefix, of version $3.
cd "$1"
export PKG_CONFIG_PATH="$1/prefix/lib/pkgconfig"
test "$(pkg-config --modversion ripieno)" = "$3"

cc -std=c11 "$2/engine.c" $(pkg-config --cflags --libs ripieno) -o shared
LD_LIBRARY_PATH="$1/prefix/lib" ./shared "$1/home" 100

libraries=$(pkg-config --static --libs ripieno | sed 's/-lripieno/-l:libripieno.a/')
cc -std=c11 "$2/engine.c" $(pkg-config --cflags ripieno) $libraries -o static
env -u LD_LIBRARY_PATH ./static "$1/home" 200

# A new home: the example creates it, and opens it again after a killed process.
if test -z "${RIPIENO_SKIP_VALGRIND+set}"; then
    LD_LIBRARY_PATH="$1/prefix/lib" \
        valgrind --quiet --error-exitcode=1 --leak-check=full ./shared "$1/valgrind" 3
else
    echo "SKIPPED c: valgrind is not there, or not wanted (RIPIENO_SKIP_VALGRIND)"
fi

# The shared library and the static one, in a prefix that was moved. hello finds its block when it
# is run again.
if test -z "${RIPIENO_SKIP_CMAKE+set}"; then
    mv "$1/prefix" "$1/moved"
    cmake -S "$2" -B cmake -DCMAKE_PREFIX_PATH="$1/moved"
    cmake --build cmake
    test "$(cmake/hello "$1/hello")" = "stored; run it again"
    test "$(cmake/hello "$1/hello")" = "found"
    cmake/engine "$1/cmake-home" 100
else
    echo "SKIPPED c: cmake is not there, or not wanted (RIPIENO_SKIP_CMAKE)"
fi
rm -rf "$1/home" "$1/valgrind" "$1/hello" "$1/cmake-home"

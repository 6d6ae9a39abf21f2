# Builds and runs the example engine $2 with the files installed in $1/prefix, of version $3.
cd "$1"
export PKG_CONFIG_PATH="$1/prefix/lib/pkgconfig"
test "$(pkg-config --modversion ripieno)" = "$3"

cc -std=c11 "$2" $(pkg-config --cflags --libs ripieno) -o shared
LD_LIBRARY_PATH="$1/prefix/lib" ./shared "$1/home" 100

libraries=$(pkg-config --static --libs ripieno | sed 's/-lripieno/-l:libripieno.a/')
cc -std=c11 "$2" $(pkg-config --cflags ripieno) $libraries -o static
env -u LD_LIBRARY_PATH ./static "$1/home" 200

# A new home: the example creates it, and opens it again after a killed process.
if test -z "${RIPIENO_SKIP_VALGRIND+set}"; then
    LD_LIBRARY_PATH="$1/prefix/lib" \
        valgrind --quiet --error-exitcode=1 --leak-check=full ./shared "$1/valgrind" 3
else
    echo "SKIPPED c: valgrind is not there, or not wanted (RIPIENO_SKIP_VALGRIND)"
fi

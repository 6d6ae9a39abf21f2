# Runs the program $2 on the CPU $3 of the emulator $1, in the folder $4.
set -uo pipefail
mkdir -p "$4" && cd "$4" || exit
echo 'int main() { __asm__ volatile("vpaddd %ymm0, %ymm0, %ymm0"); }' >avx2.cpp
"${CXX:-c++}" avx2.cpp -o avx2 || exit
passed=0 failed=0

trial() { # name, exit code, CPU, command
    "$qemu" -cpu "$3" "${@:4}" >output 2>&1
    local code=$?
    if [ $code = "$2" ]; then
        passed=$((passed + 1))
        echo "test $1 ($3) ... ok"
    else
        failed=$((failed + 1))
        echo "test $1 ($3) ... FAILED: exit code $code, and not $2"
        cat output >&2
    fi
}

qemu=$1
# Killed by SIGILL, of which QEMU leaves a core dump here.
trial 'the emulated CPU has no AVX2' 132 "$3" ./avx2
trial 'a CPU with AVX2 has it' 0 Haswell ./avx2
replay=("$2" replay --model tiny --requests 50 --verify full)
trial 'replay' 0 "$3" "${replay[@]}"
trial 'replay with PRPs and two queues' 0 "$3" "${replay[@]}" --descriptors prp --queues 2 \
    --executor inline
echo "test result: done. $passed passed; $failed failed"
[ $failed = 0 ]

#!/usr/bin/env bash
# Runs what is packed beside it on a machine with an NVIDIA GPU, and writes down what came of it.
# Needs bash, coreutils and the NVIDIA driver; no compiler, no CUDA toolkit, no network.
#
#   ./run.sh [RESULTS]              about 6 minutes, at most 8
#   ./run.sh --rehearse [RESULTS]   the same parts in tiny; figures are not kept
#
# Every part has a time limit, and one that fails does not stop the others. Ends with 0 when all
# passed, 1 when one failed or there was no time for it, 2 when there is nothing to run on.
# RIPIENO_SECONDS: time for all of it [450]; a part that would go beyond is cut short or left out.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 2
rehearse=
if [ "${1:-}" = --rehearse ]; then
  rehearse=yes
  shift
fi
results=${1:-results}
mkdir -p "$results" || exit 2
total=${RIPIENO_SECONDS:-450}
least=5
passed=0 failed=0 skipped=0 late=0
summary=$results/summary.txt
: >"$summary"

# Compiled kernels are kept from one part to the next; loaded when they are compiled, because a
# resident kernel would hold a later loading up; and streams share no hardware queue.
CUDA_CACHE_PATH=$(mktemp -d)
export CUDA_CACHE_PATH CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32
trap 'rm -rf "$CUDA_CACHE_PATH"' EXIT

note() { # verdict, seconds, what
  printf '%-8s %5ss  %s\n' "$1" "$2" "$3" | tee -a "$summary"
}
skip() { # name, why
  skipped=$((skipped + 1))
  note skipped 0 "$1: $2"
}
# Runs a command with a limit in seconds. Its output goes to NAME.out, the rest to NAME.log.
part() { # name, limit, command...
  local name=$1 limit=$2 start=$SECONDS left=$((total - SECONDS)) code
  shift 2
  if [ "$left" -lt "$least" ]; then
    skip "$name" "no time left"
    late=$((late + 1))
    return
  fi
  [ "$limit" -le "$left" ] || limit=$left
  printf '$ %s\n' "$*" >"$results/$name.log"
  timeout -k 5 "$limit" "$@" >"$results/$name.out" 2>>"$results/$name.log"
  code=$?
  printf '# exit code %s\n' "$code" >>"$results/$name.log"
  case $code in
    0)
      passed=$((passed + 1))
      note passed $((SECONDS - start)) "$name"
      ;;
    124 | 137)
      failed=$((failed + 1))
      note FAILED $((SECONDS - start)) "$name: did not end within $limit s"
      ;;
    *)
      failed=$((failed + 1))
      note FAILED $((SECONDS - start)) "$name: exit code $code: $(tail -n 2 "$results/$name.log" | head -n 1 | cut -c1-160)"
      ;;
  esac
}

if ! ./ripieno --version >/dev/null; then
  echo 'the programs do not start here: pack them on Linux with a glibc that is no newer'
  exit 2
fi
{
  printf 'date: '
  date -u '+%Y-%m-%d %H:%M:%S UTC'
  cat packed.txt
  printf 'kernel: '
  uname -sr
  printf 'processors: '
  nproc
  grep -m 1 'model name' /proc/cpuinfo
  grep MemTotal /proc/meminfo
  printf 'locked memory: '
  ulimit -l
  printf 'libraries: %s\n' "${LD_LIBRARY_PATH:-}"
  ldconfig -p 2>/dev/null | grep -E 'libcuda\.|libgdrapi'
  if command -v nvidia-smi >/dev/null; then
    timeout 20 nvidia-smi --query-gpu=index,name,driver_version,pci.bus_id,pcie.link.gen.current,pcie.link.width.current,clocks.max.sm,memory.total --format=csv
    timeout 20 nvidia-smi | head -n 12
  else
    echo 'nvidia-smi: not found'
  fi
} >"$results/about.txt" 2>&1
cat "$results/about.txt"

part doctor 60 ./ripieno doctor
if grep -q -i 'no nvidia driver' "$results/doctor.out" "$results/doctor.log"; then
  echo 'no NVIDIA driver: there is nothing to run on'
  exit 2
fi

tiny='' rounds=3
[ -z "$rehearse" ] || tiny=--tiny rounds=1
bench() { # part, limit
  local keep=()
  [ -n "$rehearse" ] || keep=(--keep "$results/bench-$1.json")
  part "bench-$1" "$2" ./bench gpu --only "$1" --rounds "$rounds" $tiny \
    --plots "$results" ${keep[@]+"${keep[@]}"}
  [ ! -s "$results/bench-$1.out" ] || cat "$results/bench-$1.out"
}
replay() { # launch, route
  local trace=()
  [ ! -f trace.jsonl ] || trace=(--trace trace.jsonl --model tiny)
  [ -z "$rehearse" ] || trace=(--requests 50)
  part "replay-$2-$1" 45 ./ripieno replay --executor cuda --launch "$1" --require "$2" \
    --verify full --progress never --json ${trace[@]+"${trace[@]}"}
}

# The kernels' tests, each in a process of its own: after an error that stays, or in a call that does
# not return, a process is of no more use.
tests=$(./cuda-tests --ignored --list 2>/dev/null | sed -n 's/: test$//p')
[ -n "$tests" ] || part tests 10 ./cuda-tests --ignored --list
for test in $tests; do
  part "test-${test//::/-}" 30 ./cuda-tests --ignored --exact "$test"
done
replay per-batch staged
replay resident staged
replay per-batch direct
replay resident direct
bench rate 75
bench matmul 75
bench retrieve 45
bench caller 45

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)
if [ -n "$sanitizer" ]; then
  check() { # tool, name, command...
    local tool=$1 name=$2
    shift 2
    part "$tool-$name" 45 "$sanitizer" --tool "$tool" --error-exitcode 9 "$@"
  }
  check memcheck moves ./cuda-tests --ignored --exact \
    gpu::a_launch_per_batch_moves_the_right_bytes
  check memcheck contents ./cuda-tests --ignored pool::
  check racecheck product ./bench gpu --only matmul --tiny --rounds 1 --plots "$results/sanitizer"
  check racecheck moves ./cuda-tests --ignored --exact \
    gpu::a_launch_per_batch_moves_the_right_bytes
else
  skip memcheck 'no compute-sanitizer on this machine'
  skip racecheck 'no compute-sanitizer on this machine'
fi

echo
cat "$summary"
echo "$passed passed, $failed failed, $skipped skipped in $SECONDS s; everything is in $results" |
  tee -a "$summary"
[ "$failed" -eq 0 ] && [ "$late" -eq 0 ]

#!/usr/bin/env bash
# Runs what is packed beside it on a machine with an NVIDIA GPU, and writes down what came of it.
# Needs bash, coreutils and the NVIDIA driver; no compiler, no CUDA toolkit, no network.
#
#   ./run.sh [RESULTS]              about 6 minutes, at most 10
#   ./run.sh --rehearse [RESULTS]   the same steps in tiny; figures are not kept
#   ./run.sh --plan                 the steps and their limits in seconds; runs nothing
#
# The steps are those of the table "Run first on a GPU" in docs/results/gpu.md, the cheapest answers
# first. Every step has a limit; their sum is the limit of the whole. Each result is printed when it
# is there. After the first step with a resident kernel that did not end, the others are left out.
# Ends with 0 when all passed, 1 when one failed or there was no time for it, 2 when there is nothing
# to run on. RIPIENO_SECONDS: less time for all of it than 600 s.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 2
rehearse='' plan=''
case ${1:-} in
  --rehearse) rehearse=yes && shift ;;
  --plan) plan=yes && shift ;;
esac
results=${1:-results}
total=${RIPIENO_SECONDS:-600}
least=2
passed=0 failed=0 skipped=0 late=0 stuck=''
summary=/dev/null
if [ -z "$plan" ]; then
  mkdir -p "$results" || exit 2
  summary=$results/summary.txt
  : >"$summary"
  # Compiled kernels are kept from one step to the next; loaded when they are compiled, because a
  # resident kernel would hold a later loading up; and streams share no hardware queue.
  CUDA_CACHE_PATH=$(mktemp -d)
  export CUDA_CACHE_PATH CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32
  trap 'rm -rf "$CUDA_CACHE_PATH"' EXIT
fi

note() { # verdict, seconds, what
  printf '%-8s %5ss  %s\n' "$1" "$2" "$3" | tee -a "$summary"
}
skip() { # name, why
  skipped=$((skipped + 1))
  note skipped 0 "$1: $2"
}
# Runs a command with a limit in seconds. Its output goes to NAME.out, the rest to NAME.log.
run() { # name, limit, command...
  local name=$1 limit=$2 start=$SECONDS left=$((total - SECONDS)) code
  shift 2
  if [ "$left" -lt "$least" ]; then
    skip "$name" "no time left"
    late=$((late + 1))
    return 1
  fi
  [ "$limit" -le "$left" ] || limit=$left
  printf '$ %s\n' "$*" >"$results/$name.log"
  timeout -k 2 "$limit" "$@" >"$results/$name.out" 2>>"$results/$name.log"
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
  return $code
}
step() { # name, limit, command...
  if [ -n "$plan" ]; then
    printf '%s %s\n' "$2" "$1"
    return
  fi
  run "$@"
}
# As step, of what runs a resident kernel.
resident() { # name, limit, command...
  if [ -n "$stuck" ]; then
    skip "$1" "a resident kernel did not end before, in $stuck"
    return
  fi
  local code=0
  step "$@" || code=$?
  case $code in 124 | 137) stuck=$1 ;; esac
}
show() { # name
  [ -n "$plan" ] || [ ! -s "$results/$1.out" ] || cat "$results/$1.out"
}

about() {
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
  cat /proc/driver/nvidia/version /proc/driver/nvidia/params 2>/dev/null
  ls -l /dev/nvidia* /dev/gdrdrv 2>/dev/null
}
# What the kernel has said of the GPU's errors; needs the right to read its log.
xids() {
  { dmesg 2>/dev/null || journalctl -k --no-pager 2>/dev/null; } | grep -iE 'xid|nvrm' | tail -n 50
}

if [ -z "$plan" ] && ! ./ripieno --version >/dev/null; then
  echo 'the programs do not start here: they need x86-64 Linux with glibc 2.34 or later'
  exit 2
fi
if [ -z "$plan" ]; then
  about >"$results/about.txt" 2>&1
  cat "$results/about.txt"
  xids >"$results/xid-before.txt"
fi
if [ -n "$plan" ] || command -v nvidia-smi >/dev/null; then
  step nvidia-smi 10 nvidia-smi
  step nvidia-smi-q 10 nvidia-smi -q
  step nvidia-smi-topo 5 nvidia-smi topo -m
else
  skip nvidia-smi 'not found'
fi

# 1. What there is. It tries a resident kernel at its end, and prints what it finds as it goes.
resident doctor 35 ./ripieno doctor
show doctor
if [ -z "$plan" ] && grep -q -i 'no nvidia driver' "$results/doctor.out" "$results/doctor.log"; then
  echo 'no NVIDIA driver: there is nothing to run on'
  exit 2
fi

experiment() { # how, question, limit
  "$1" "experiment-$2" "$3" ./bench gpu experiment "$2" --kernel 3 --timeout 8
  show "experiment-$2"
}
tiny='' rounds=3 each=''
[ -z "$rehearse" ] || tiny=--tiny rounds=1
bench() { # how, part, limit
  local keep=()
  # Over a stand-in for the driver nothing is kept.
  [ -n "$rehearse" ] || keep=(--keep "$results/bench-$2.json")
  "$1" "bench-$2" "$3" ./bench gpu --only "$2" --rounds "$rounds" $tiny $each \
    --plots "$results" ${keep[@]+"${keep[@]}"}
  show "bench-$2"
}
# What is measured without a resident kernel, once one did not end.
either() { # part, limit
  if [ -n "$stuck" ]; then
    each=--per-batch
    bench step "$1" "$2"
    each=''
  else
    bench resident "$1" "$2"
  fi
}
replay() { # how, launch, route
  local trace=()
  [ ! -f trace.jsonl ] || trace=(--trace trace.jsonl --model tiny)
  [ -z "$rehearse" ] || trace=(--requests 50)
  "$1" "replay-$3-$2" 12 ./ripieno replay --executor cuda --launch "$2" --require "$3" \
    --verify full --progress never --json ${trace[@]+"${trace[@]}"}
}
ran=' '
gpu_test() { # how, limit, test
  ran="$ran$3 "
  "$1" "test-${3//::/-}" "$2" ./cuda-tests --ignored --exact "$3" --nocapture
}

# 2. Partitions, and kernels of the primary context in them.
experiment step partition 12
# 3. Smoke tests.
gpu_test step 20 gpu::a_launch_per_batch_moves_the_right_bytes
gpu_test resident 20 gpu::a_resident_kernel_moves_the_right_bytes
# 4 to 6. What waits for a kernel that does not end; the kernel of 4 and 5 ends by itself.
experiment step calls 45
experiment step connections 25
experiment step layers 10
# 7 and 8. Rates.
either rate 70
either operation 25
# 9. GPU memory for drives.
gpu_test step 8 gdr::a_mapping_is_the_same_memory_on_a_gpu
gpu_test step 8 gdr::a_pool_of_allocations_on_a_gpu
show test-gdr-a_pool_of_allocations_on_a_gpu

# The other tests, each in a process of its own: after an error that stays, or in a call that does
# not return, a process is of no more use. One limit for all of them.
if [ -n "$plan" ]; then
  echo '90 other-tests'
else
  tests=$(./cuda-tests --ignored --list 2>/dev/null | sed -n 's/: test$//p')
  [ -n "$tests" ] || run tests 5 ./cuda-tests --ignored --list
  before=$SECONDS
  for test in $tests; do
    case $ran in *" $test "*) continue ;; esac
    left=$((90 - (SECONDS - before)))
    if [ "$left" -lt "$least" ]; then
      skip "test-${test//::/-}" 'no time left for tests'
      late=$((late + 1))
      continue
    fi
    how=step
    case $test in *resident*) how=resident ;; esac
    gpu_test "$how" $((left < 10 ? left : 10)) "$test"
  done
fi

replay step per-batch staged
replay step per-batch direct
replay resident resident staged
replay resident resident direct
either retrieve 30
either caller 25
bench resident matmul 40

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)
if [ -n "$plan" ] || [ -n "$sanitizer" ]; then
  step memcheck 20 "$sanitizer" --tool memcheck --error-exitcode 9 ./cuda-tests --ignored --exact \
    gpu::a_launch_per_batch_moves_the_right_bytes
  step racecheck 20 "$sanitizer" --tool racecheck --error-exitcode 9 ./bench gpu --only matmul \
    --tiny --rounds 1 --plots "$results/sanitizer"
else
  skip sanitizer 'no compute-sanitizer on this machine'
fi
[ -z "$plan" ] || exit 0

xids >"$results/xid.txt"
new=$(comm -13 <(sort "$results/xid-before.txt") <(sort "$results/xid.txt"))
[ -z "$new" ] || printf 'the kernel says:\n%s\n' "$new" | tee -a "$summary"
echo
cat "$summary"
echo "$passed passed, $failed failed, $skipped skipped in $SECONDS s; everything is in $results" |
  tee -a "$summary"
[ "$failed" -eq 0 ] && [ "$late" -eq 0 ]

#!/usr/bin/env bash
# Runs the packed programs on a machine with an NVIDIA GPU, and records the results.
# Needs bash, coreutils, tar, gzip and the NVIDIA driver; no compiler, no CUDA toolkit, no network.
#
#   ./run.sh [RESULTS]              the first steps, within ten minutes: at most 9
#   ./run.sh --second [RESULTS]     further steps for another ten; read the first results before
#   ./run.sh --rehearse [RESULTS]   the same steps with tiny sizes; figures are not kept
#   ./run.sh --plan [--second]      the steps and their limits in seconds; runs nothing
#
# The steps are those of the table "Answers" in docs/results/gpu.md, the cheapest first.
# Every step has a time limit, and so has the run. After a step whose resident kernel did not end,
# the other steps with resident kernels are skipped.
#
# For machines that kill a command after ten minutes, show the end of its output and return few
# files: RESULTS holds one archive, results.tgz, which is replaced after each step, and at the end
# summary.txt, which is also printed last. A killed run leaves the archive of the completed steps.
#
# Exit codes: 0 all steps passed, 1 a step failed or there was no time for it, 2 no GPU to run on.
# RIPIENO_SECONDS: time limit of the run, 540 by default.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 2
rehearse='' plan='' second=''
for _ in 1 2 3; do
  case ${1:-} in
    --rehearse) rehearse=yes && shift ;;
    --plan) plan=yes && shift ;;
    --second) second=yes && shift ;;
  esac
done
out=${1:-results${second:+-second}}
total=${RIPIENO_SECONDS:-540}
least=2
# Maximum bytes of one file in the archive, and of the summary.
file_max=131072 summary_max=8000
# Text that a GPU test prints instead of testing anything.
no_gdrcopy="GDRCopy's library is not there"
passed=0 failed=0 skipped=0 late=0 stuck='' child='' results='' summary=/dev/null

# Archives all results so far. The old archive stays until the new one is complete.
pack() {
  tar -czf "$out/results.tgz.part" -C "$work" results && mv -f "$out/results.tgz.part" "$out/results.tgz"
}
# Truncates a long file to its first and last bytes.
shorten() { # file
  local bytes half=$((file_max / 2))
  bytes=$(stat -c %s "$1")
  [ "$bytes" -gt "$file_max" ] || return 0
  {
    head -c "$half" "$1"
    printf '\n# %s bytes are left out\n' $((bytes - 2 * half))
    tail -c "$half" "$1"
  } >"$1.short" && mv -f "$1.short" "$1"
}
# Prints failures first, in whole lines, up to the length that the end of the output shows.
summarise() {
  local line used=0 left=0
  {
    grep '^FAILED' "$summary"
    grep -v -e '^FAILED' -e '^passed' "$summary"
    grep '^passed' "$summary"
  } | cut -b 1-200 | {
    while IFS= read -r line; do
      used=$((used + ${#line} + 1))
      if [ "$used" -le "$summary_max" ]; then printf '%s\n' "$line"; else left=$((left + 1)); fi
    done
    [ "$left" -eq 0 ] || echo "$left more lines are in results/summary.txt of the archive"
  }
  echo "$passed passed, $failed failed, $skipped skipped in $SECONDS s; everything is in $out/results.tgz"
}
finish() {
  local code=$?
  trap - EXIT INT TERM HUP
  [ -z "$child" ] || kill "$child" 2>/dev/null
  pack
  echo
  summarise | tee "$out/summary.txt"
  rm -rf "$work"
  exit "$code"
}
if [ -z "$plan" ]; then
  mkdir -p "$out" || exit 2
  out=$(cd "$out" && pwd)
  work=$(mktemp -d)
  results=$work/results
  mkdir -p "$results" "$work/cache" || exit 2
  summary=$results/summary.txt
  : >"$summary"
  # Steps share a cache of compiled kernels; kernels are loaded when they are compiled, because a
  # resident kernel would block loading later; and streams do not share hardware queues.
  export CUDA_CACHE_PATH=$work/cache CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32
  trap finish EXIT
  trap 'exit 143' INT TERM HUP
fi

note() { # verdict, seconds, what
  printf '%-8s %5ss  %s\n' "$1" "$2" "$3" | tee -a "$summary"
}
skip() { # name, why
  skipped=$((skipped + 1))
  note skipped 0 "$1: $2"
}
# Runs a command with a time limit in seconds. Its stdout goes to NAME.out, the rest to NAME.log.
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
  # In the background, so that signals to this script are handled immediately.
  timeout -k 2 "$limit" "$@" >"$results/$name.out" 2>>"$results/$name.log" &
  child=$!
  wait "$child"
  code=$?
  child=''
  printf '# exit code %s\n' "$code" >>"$results/$name.log"
  case $code in
    0)
      if [[ $name == test-* ]] && grep -q "$no_gdrcopy" "$results/$name.out"; then
        skip "$name" "$no_gdrcopy"
      else
        passed=$((passed + 1))
        note passed $((SECONDS - start)) "$name"
      fi
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
  shorten "$results/$name.out"
  shorten "$results/$name.log"
  pack
  return $code
}
step() { # name, limit, command...
  if [ -n "$plan" ]; then
    printf '%s %s\n' "$2" "$1"
    return
  fi
  run "$@"
}
# Same as step, for a command that runs a resident kernel.
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
# Prints the kernel's messages on errors of the GPU; needs permission to read its log.
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

# 1. The machine. It tests a resident kernel at its end, and prints its findings as it goes.
resident doctor 60 ./ripieno doctor
show doctor
if [ -z "$plan" ] && grep -q -i 'no nvidia driver' "$results/doctor.out" "$results/doctor.log"; then
  echo 'no NVIDIA driver: there is nothing to run on'
  exit 2
fi

tiny='' rounds=3 each=''
[ -z "$rehearse" ] || tiny=--tiny rounds=1
bench() { # how, part, limit
  local keep=()
  # Results over a mock of the driver are not kept.
  [ -n "$rehearse" ] || keep=(--keep "$results/bench-$2.json")
  "$1" "bench-$2" "$3" ./bench gpu --only "$2" --rounds "$rounds" $tiny $each \
    ${keep[@]+"${keep[@]}"}
  show "bench-$2"
}
# Measures without a resident kernel if one did not end before.
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
  [ ! -f trace.jsonl ] || trace=(--trace trace.jsonl)
  [ -z "$rehearse" ] || trace=(--requests 50)
  "$1" "replay-$3-$2" 12 ./ripieno replay --model tiny --executor cuda --launch "$2" --route "$3" \
    --verify full --progress never --json ${trace[@]+"${trace[@]}"}
}
gpu_test() { # how, limit, test
  "$1" "test-${3//::/-}" "$2" ./cuda-tests --ignored --exact "$3" --nocapture
}

first() {
  # 3 and 4. Smoke tests, and the handshake of a kernel that exits while the host submits.
  gpu_test step 20 gpu::a_launch_per_batch_moves_the_right_bytes
  gpu_test resident 20 gpu::a_resident_kernel_moves_the_right_bytes
  gpu_test resident 30 gpu::no_submission_is_lost_while_the_kernel_leaves
  # 9 and 10. Rates.
  either rate 70
  either operation 25
  # 12. GPU memory for drives.
  gpu_test step 8 gdr::a_mapping_is_the_same_memory_on_a_gpu
  gpu_test step 8 gdr::a_pool_of_allocations_on_a_gpu
  show test-gdr-a_pool_of_allocations_on_a_gpu
  replay step per-batch staged
  replay step per-batch direct
  replay resident resident staged
  replay resident resident direct
}

# Steps to run after the first results were read.
second() {
  # The other tests, each in its own process: a process is unusable after a sticky error, or in a
  # call that does not return. One time limit for all of them.
  if [ -n "$plan" ]; then
    echo '90 other-tests'
  else
    tests=$(./cuda-tests --ignored --list 2>/dev/null | sed -n 's/: test$//p')
    [ -n "$tests" ] || run tests 5 ./cuda-tests --ignored --list
    ran=" $(./run.sh --plan | tr '\n' ' ') "
    before=$SECONDS
    for test in $tests; do
      case $ran in *" test-${test//::/-} "*) continue ;; esac
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

  either retrieve 30
  either caller 25

  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)
  if [ -n "$plan" ] || [ -n "$sanitizer" ]; then
    step memcheck 20 "$sanitizer" --tool memcheck --error-exitcode 9 ./cuda-tests --ignored --exact \
      gpu::a_launch_per_batch_moves_the_right_bytes
  else
    skip sanitizer 'no compute-sanitizer on this machine'
  fi
}

if [ -n "$second" ]; then second; else first; fi
[ -z "$plan" ] || exit 0

xids >"$results/xid.txt"
new=$(comm -13 <(sort "$results/xid-before.txt") <(sort "$results/xid.txt") | tail -n 10)
[ -z "$new" ] || printf 'the kernel says: %s\n' "$new" | tee -a "$summary"
[ "$failed" -eq 0 ] && [ "$late" -eq 0 ]

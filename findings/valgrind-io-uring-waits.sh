#!/usr/bin/env bash
# valgrind: while one thread waits in io_uring_enter, all others stand still.
#
# valgrind 3.19.0 (Debian 12), --tool=none; a thread waits 2 s for a timeout of its io_uring, and
# the main thread counts how often a sleep of 10 ms ended meanwhile.
#
# Guess: valgrind runs one thread at a time, but one that waits in a system call gives way, in
#        io_uring_enter as in read or poll.
# Seen:  in poll, it does. In io_uring_enter, whose wrapper valgrind has, it does not: the main
#        thread does not run until the wait is over. A thread that waits for work of another one in
#        io_uring_enter, without a time limit, waits for ever.
#
#            natively, in io_uring_enter: the others run
#            in valgrind, in io_uring_enter: the others stand still
#            in valgrind, in poll of the ring: the others run
#
# For whoever waits in io_uring: wait in poll on the ring's descriptor where valgrind is to work.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
apt-get -q download valgrind >/dev/null 2>&1
dpkg -x valgrind_*.deb system
export VALGRIND_LIB=$work/system/usr/libexec/valgrind
valgrind=$work/system/usr/bin/valgrind
[ "$("$valgrind" --version)" = valgrind-3.19.0 ] || { "$valgrind" --version; exit 1; }

cat >waits.c <<'C'
#include <linux/io_uring.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static atomic_int waiting, done;
static int in_poll, ring;
static struct __kernel_timespec limit = {.tv_sec = 2};

static void *wait_for_it(void *unused) {
  atomic_store(&waiting, 1);
  if (in_poll) {
    struct pollfd ready = {.fd = ring, .events = POLLIN};
    syscall(SYS_io_uring_enter, ring, 1, 0, 0, NULL, 0);
    poll(&ready, 1, 10000);
  } else {
    syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0);
  }
  atomic_store(&done, 1);
  return unused;
}

int main(int count, char **words) {
  in_poll = count > 1 && strcmp(words[1], "poll") == 0;
  struct io_uring_params p;
  memset(&p, 0, sizeof p);
  ring = syscall(SYS_io_uring_setup, 4, &p);
  if (ring < 0) return perror("io_uring_setup"), 2;
  size_t bytes = p.sq_off.array + p.sq_entries * sizeof(unsigned);
  int access = PROT_READ | PROT_WRITE;
  char *sq = mmap(NULL, bytes, access, MAP_SHARED, ring, IORING_OFF_SQ_RING);
  struct io_uring_sqe *sqes =
      mmap(NULL, p.sq_entries * sizeof *sqes, access, MAP_SHARED, ring, IORING_OFF_SQES);
  memset(sqes, 0, sizeof *sqes);
  sqes->opcode = IORING_OP_TIMEOUT;
  sqes->addr = (unsigned long)&limit;
  sqes->len = 1;
  *(unsigned *)(sq + p.sq_off.array) = 0;
  atomic_store((atomic_uint *)(sq + p.sq_off.tail), 1);
  pthread_t thread;
  pthread_create(&thread, NULL, wait_for_it, NULL);
  int ticks = 0;
  while (!atomic_load(&done)) {
    usleep(10000);
    if (atomic_load(&waiting) && !atomic_load(&done)) ticks++;
  }
  pthread_join(thread, NULL);
  // Of up to 200. On a busy machine there are fewer.
  puts(ticks > 3 ? "the others run" : "the others stand still");
}
C
cc -O1 -pthread waits.c -o waits
{
    echo "natively, in io_uring_enter: $(./waits)"
    echo "in valgrind, in io_uring_enter: $("$valgrind" -q --tool=none ./waits)"
    echo "in valgrind, in poll of the ring: $("$valgrind" -q --tool=none ./waits poll)"
} | tee seen
cat >expected <<'TEXT'
natively, in io_uring_enter: the others run
in valgrind, in io_uring_enter: the others stand still
in valgrind, in poll of the ring: the others run
TEXT
diff expected seen && echo "as written above"

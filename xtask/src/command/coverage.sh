#!/usr/bin/env bash
# Wraps rustc for the crates of the workspace; others are built as always. Not a POSIX shell: dash
# drops the variables that have a `-` in their name, as CARGO_BIN_EXE_* may. Names are not compressed
# because not every build of LLVM's tools can read them then.
exec "$@" -Cinstrument-coverage -Cllvm-args=-enable-name-compression=false
